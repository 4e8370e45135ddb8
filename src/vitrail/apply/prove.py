"""Comparing values: a plan is right when all ranks together give what the whole model gives.

The ranks are simulated in one process with real reductions (`.simulate`), on random weights, in float64 throughout.
"""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..errors import PlanError, UnsupportedError, VitrailError
from ..plan import Plan, ResolvedPlan, degrees_beyond, resolve, valid_degrees
from ..plan.derive import Derivation, Proposal
from ..plan.derive.record import tensors_in
from ..plan.derive.trace import first_line
from .simulate import Ranks, run_all, shard_all
from .wide import Wide, dense_flex_attention

TOLERANCE = 1e-9
Arguments = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class Comparison:
    """``error`` is the largest difference over the largest value, NaN and infinity being infinite.

    ``trouble`` says what stopped the ranks, if they did not get to the end. ``collectives`` are those of one call.
    ``beyond`` is set at degrees at which axes within others are cut.
    """

    degree: int
    error: float
    trouble: str = ""
    collectives: int = 0
    beyond: bool = False

    @property
    def ok(self) -> bool:
        return not self.trouble and self.error <= TOLERANCE


def relative_error(given: Any, expected: Any) -> float:
    """The largest difference between two outputs, relative to the largest value of each tensor."""
    ours, theirs = list(tensors_in(given)), list(tensors_in(expected))
    if len(ours) != len(theirs):
        return math.inf
    worst = 0.0
    for own, other in zip(ours, theirs, strict=True):
        if own.shape != other.shape:
            return math.inf
        if not own.numel():
            continue
        if not own.is_floating_point() and not own.is_complex():
            worst = worst if torch.equal(own, other) else math.inf
            continue
        scale = float(other.abs().max())
        error = float((own - other).abs().max())
        error = error / scale if scale > 0 else error
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def whole(model: nn.Module, arguments: Arguments) -> Any:
    """The output of the whole model, in float64 throughout. A copy runs: what a forward keeps is not kept."""
    with torch.no_grad(), Wide():
        return copy.deepcopy(model)(**arguments())


def compare(plan: Plan, model: nn.Module, calls: Sequence[Arguments], degree: int, pad: bool = False) -> Comparison:
    """The sharded ``model``, whole and in float64, against itself on every call."""
    with one_thread(), dense_flex_attention():
        references = [whole(model, arguments) for arguments in calls]
        return _against(plan, model, calls, references, degree, pad)


def _against(
    plan: Plan,
    model: nn.Module,
    calls: Sequence[Arguments],
    references: Sequence[Any],
    degree: int,
    pad: bool = False,
) -> Comparison:
    try:
        resolved = resolve(plan, model, degree, pad)
    except VitrailError as error:
        return Comparison(degree, math.inf, error.message)
    return against(resolved, model, calls, references)


def against(
    resolved: ResolvedPlan, model: nn.Module, calls: Sequence[Arguments], references: Sequence[Any]
) -> Comparison:
    """The ranks of a resolved plan on every call, against what the whole ``model`` gave."""
    assert calls, "no call compares nothing"
    ranks = Ranks(resolved.degree)
    worst = 0.0
    try:
        models = shard_all(model, resolved, ranks)
        for arguments, reference in zip(calls, references, strict=True):
            ranks.calls.clear()
            for output in run_all(models, ranks, arguments):
                worst = max(worst, relative_error(output, reference))
    except VitrailError as error:
        return Comparison(resolved.degree, math.inf, error.message)
    except Exception as error:  # noqa: BLE001  a slice that a stranger's forward cannot take
        return Comparison(resolved.degree, math.inf, first_line(error))
    return Comparison(resolved.degree, worst, collectives=len(ranks.calls))


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """A copy on the CPU in float64 with random weights, none of them 0 or 1: those would hide a fault."""
    memo: dict[int, Any] = {}
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in memo:
                continue
            value = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            if parameter.dim() > 1:
                value /= max(1, parameter.numel() // parameter.shape[0]) ** 0.5
            elif name == "bias":
                value *= 0.1
            else:
                value = 1 + 0.3 * value
            memo[id(parameter)] = nn.Parameter(value, requires_grad=False)
    trial = copy.deepcopy(model, memo)
    for name, buffer in trial.named_buffers():
        if buffer.is_floating_point():
            owner, _, attribute = name.rpartition(".")
            setattr(trial.get_submodule(owner), attribute, buffer.double())
    return trial.eval()


def prove(
    derivation: Derivation, model: nn.Module, calls: Sequence[Arguments], degrees: Sequence[int], degree: int = 2
) -> tuple[Proposal, list[Comparison]]:
    """The largest proposal whose values are right, and the comparisons that say so.

    ``model`` is the recorded one, or a smaller one of the same structure, as `randomised` makes it. An axis whose
    values are wrong is excluded, with the reason. Raises `PlanError` when nothing is left, `UnsupportedError` when
    the whole model itself gives nothing to compare with.
    """
    with one_thread(), dense_flex_attention():
        try:
            references = [whole(model, arguments) for arguments in calls]
        except Exception as error:
            raise UnsupportedError(
                f"{type(model).__name__} cannot be run in float64 on the CPU to compare a plan with: "
                f"{first_line(error)}"
            ) from error
        if not all(tells(reference) for reference in references):
            raise UnsupportedError(
                f"{type(model).__name__} gives nothing to compare a plan by: "
                "a call must give tensors (alone, or in tuples, lists, dicts or objects) that are not all zero",
                hint="pass inputs=... for which it does, or a plan (plan=...)",
            )
        if not all(finite(reference) for reference in references):
            raise UnsupportedError(
                f"{type(model).__name__} gives NaN or infinity on random weights: nothing to compare"
            )

        def check(proposal: Proposal) -> list[Comparison]:
            found = []
            # A small model may have fewer units than ranks: the plan is then for as many ranks as it has units.
            try:
                possible = set(valid_degrees(proposal.plan, model)) if proposal.axes else set(degrees)
            except PlanError as error:
                return [Comparison(degree, math.inf, error.message)]
            usual = [number for number in degrees if number in possible] or list(degrees[:1])
            beyond = degrees_beyond(proposal.plan, model)
            for number in dict.fromkeys([*usual, *beyond]):
                comparison = _against(proposal.plan, model, calls, references, number)
                found.append(replace(comparison, beyond=number in beyond))
                if not found[-1].ok:
                    break
            return found

        return search(derivation, check, type(model).__name__, degree)


Check = Callable[[Proposal], list[Comparison]]


def search(derivation: Derivation, check: Check, name: str, degree: int = 2) -> tuple[Proposal, list[Comparison]]:
    """The largest proposal that ``check`` finds right, dropping what is not. Raises `PlanError` if nothing is left."""
    for _ in range(16):
        proposal = derivation.propose(degree)
        found = check(proposal)
        if all(comparison.ok for comparison in found):
            return proposal, found
        if not proposal.axes:
            break
        inner = [axis for axis, entry in proposal.plan.axes.items() if entry.within]
        if inner and found[-1].beyond:
            for axis in inner:  # what it adds is a few more degrees
                derivation.exclude(proposal, axis, f"cut, {found[-1].trouble or 'the values would be wrong'}")
            continue
        _drop(derivation, proposal, check)
    trouble = found[-1].trouble or f"it is off by {found[-1].error:.1e}"
    raise PlanError(f"no plan for {name} gives the whole model's values: {trouble}")


def _drop(derivation: Derivation, proposal: Proposal, check: Check) -> None:
    """Exclude every axis that is wrong by itself; if none is, the one without which the others are right."""
    wrong: dict[str, Comparison] = {}
    for axis in proposal.axes:
        alone = derivation.only(proposal, frozenset({axis})).propose(2)
        found = check(alone)[-1]
        if not found.ok:
            wrong[axis] = found
    if not wrong:
        for axis in proposal.axes:
            others = derivation.only(proposal, frozenset(proposal.axes) - {axis}).propose(2)
            if check(others)[-1].ok:
                wrong[axis] = Comparison(2, math.inf, "it does not go together with the others")
                break
    if not wrong:
        wrong = dict.fromkeys(proposal.axes, Comparison(2, math.inf, "the axes are not right together"))
    for axis, comparison in wrong.items():
        why = comparison.trouble or f"the values would be off by {comparison.error:.0e}"
        derivation.exclude(proposal, axis, f"sharded, {why}")


def tells(output: Any) -> bool:
    """Whether an output can tell right from wrong: it has tensors, and not only zeros."""
    tensors = list(tensors_in(output))
    return any(tensor.numel() and bool((tensor != 0).any()) for tensor in tensors)


def finite(output: Any) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors_in(output) if tensor.is_floating_point())


@contextmanager
def quiet() -> Iterator[None]:
    """A model's own warnings, once for each of many trial runs, are no news."""
    logger = logging.getLogger("diffusers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """The simulated ranks are threads: more of torch's own would only be in their way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
