"""Proving a plan block by block: for a model that is too large to be run whole in float64.

Every block is given random weights, and random numbers of the shapes it was given when the model was recorded, and its
output whole is compared with what the ranks make of it. What is cut across blocks is left out of the plan.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import PlanError, UnsupportedError
from ..plan import ResolvedPlan, resolve, valid_degrees
from ..plan.derive import Derivation, Proposal
from ..plan.derive.record import Recorder
from ..plan.derive.trace import first_line
from ..plan.document import CHUNKED
from .prove import Arguments, Comparison, against, finite, one_thread, randomised, search, tells, whole
from .variants import mapped
from .wide import dense_flex_attention

# The whole's weights, a slice of them for every rank, and what computing with them needs: in float64 each.
_COPIES = 5
_LEAST, _MOST = 60_000_000, 1_000_000_000


def most_numel() -> int:
    """How many parameters this machine can compare at once, of which there is a copy for the ranks."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if hasattr(os, "sysconf") else 0
    return min(max(free // (8 * _COPIES), _LEAST), _MOST)


def numel(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


class _Alone(nn.Module):
    """One block, called with what it was called with."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self.block(*args, **kwargs)


def prove_by_blocks(
    derivation: Derivation, model: nn.Module, degrees: Sequence[int], most: int
) -> tuple[Proposal, list[Comparison], int]:
    """The largest proposal for ``model`` (on meta) whose blocks are right, the comparisons, and how many blocks.

    No block may have more than ``most`` parameters: the parts of a larger one are compared instead.

    Raises `PlanError` when nothing can be shown to be right.
    """
    recorder = derivation.recorder
    paths = list(_units(recorder, most))
    compared: set[str] = set()

    def check(proposal: Proposal) -> list[Comparison]:
        try:
            possible = set(valid_degrees(proposal.plan, model))
            wanted = [degree for degree in degrees if degree in possible] or list(degrees[:1])
            resolved = [resolve(proposal.plan, model, degree) for degree in wanted]
        except PlanError as error:
            return [Comparison(degrees[0], math.inf, error.message)]
        if outside := _outside(resolved[0], paths):
            return [Comparison(wanted[0], math.inf, f"{outside} is cut outside of every block that can be compared")]
        worst = [Comparison(degree, 0.0) for degree in wanted]
        compared.clear()
        for path in paths:
            if not any(_inside(name, path) for name in resolved[0].shards):
                continue
            compared.add(path)
            worst = [_larger(*pair) for pair in zip(worst, _compare_unit(recorder, path, resolved), strict=True)]
            if not all(comparison.ok for comparison in worst):
                break
        return worst

    with one_thread(), dense_flex_attention():
        proposal, comparisons = search(derivation, check, type(model).__name__)
    if not compared:
        raise PlanError(
            f"{type(model).__name__} is too large to compare a derived plan's values, and no part of it that can be "
            "compared is sharded",
            hint="derive the plan with a smaller configuration of the same structure: the plan serves both",
        )
    return proposal, comparisons, len(compared)


def _units(recorder: Recorder, most: int, path: str = "") -> Iterator[str]:
    """The outermost modules below the model that ran, and are small enough."""
    for name, child in recorder.modules[path].named_children():
        inner = f"{path}.{name}" if path else name
        if not any(True for _ in child.parameters()):
            continue
        if recorder.ran[inner] and numel(child) <= most:
            yield inner
        else:
            yield from _units(recorder, most, inner)


def _inside(name: str, path: str) -> bool:
    return name == path or name.startswith(path + ".")


def _is_cut(name: str, resolved: ResolvedPlan) -> bool:
    """Whether a tensor is sharded along an axis; what is gathered is whole outside its own module."""
    return name not in resolved.held and resolved.styles.get(name.rpartition(".")[0]) not in CHUNKED


def _outside(resolved: ResolvedPlan, paths: Sequence[str]) -> str:
    """Something that is cut where no unit's comparison would notice; empty if there is nothing."""
    names = [name for name in resolved.shards if _is_cut(name, resolved)]
    names += [f"{module}.{attribute}" for module, attribute in resolved.attributes]
    names += list(resolved.inputs)
    return next((name for name in names if not any(_inside(name, path) for path in paths)), "")


def _larger(first: Comparison, second: Comparison) -> Comparison:
    return second if second.trouble or second.error > first.error else first


def _compare_unit(recorder: Recorder, path: str, resolved: Sequence[ResolvedPlan]) -> list[Comparison]:
    model = randomised(_Alone(recorder.modules[path]))
    calls = [_arguments(args, kwargs) for args, kwargs in _different(recorder.entered[path])]
    try:
        references = [whole(model, arguments) for arguments in calls]
    except Exception as error:
        raise UnsupportedError(
            f"{path} cannot be run in float64 on the CPU to compare a plan with: {first_line(error)}",
            hint="derive the plan with a smaller configuration of the same structure: the plan serves both",
        ) from error
    if not all(tells(reference) and finite(reference) for reference in references):
        raise UnsupportedError(f"{path} gives only zeros, NaN or infinity on random numbers: nothing to compare")
    return [against(_part(one, path), model, calls, references) for one in resolved]


def _part(resolved: ResolvedPlan, path: str) -> ResolvedPlan:
    """What a resolved plan says of one block, which is called ``block``."""

    def own(entries: Mapping[str, Any]) -> dict[str, Any]:
        return {_renamed(name, path): value for name, value in entries.items() if _inside(name, path)}

    return replace(
        resolved,
        shards=own(resolved.shards),
        styles=own(resolved.styles),
        attributes={
            (_renamed(module, path), attribute): value
            for (module, attribute), value in resolved.attributes.items()
            if _inside(module, path)
        },
        norms=own(resolved.norms),
        inputs=own(resolved.inputs),
        untraced=tuple(_renamed(name, path) for name in resolved.untraced if _inside(name, path)),
        held=own(resolved.held),
        together=own(resolved.together),
        reduced=tuple(_renamed(name, path) for name in resolved.reduced if _inside(name, path)),
    )


def _renamed(name: str, path: str) -> str:
    return "block" + name[len(path) :]


def _different(calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> list[tuple[Any, Any]]:
    """One call for each set of shapes."""
    found: dict[str, tuple[Any, Any]] = {}
    for args, kwargs in calls:
        found.setdefault(str(_shapes((args, dict(kwargs)))), (args, kwargs))
    return list(found.values())


def _shapes(value: Any) -> Any:
    return mapped(value, lambda tensor: tuple(tensor.shape))


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """The arguments of a recorded call, with random numbers for what was on meta."""

    def make() -> Mapping[str, Any]:
        generator = torch.Generator().manual_seed(5)

        def real(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_meta:
                return tensor.detach().double() if tensor.is_floating_point() else tensor.clone()
            if tensor.is_floating_point():
                return torch.randn(tensor.shape, dtype=torch.float64, generator=generator)
            if tensor.is_complex():
                return torch.randn(tensor.shape, dtype=torch.complex128, generator=generator)
            # A mask that lets everything through; indices that are in any table.
            fill = torch.ones if tensor.dtype == torch.bool else torch.zeros
            return fill(tensor.shape, dtype=tensor.dtype)

        return {"args": mapped(args, real), "kwargs": mapped(dict(kwargs), real)}

    return make
