"""Dropping every collective in turn: a comparison that does not notice is no comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..apply.family import MOST_ROWS
from ..apply.prove import TOLERANCE, Arguments, one_thread, relative_error, whole
from ..apply.simulate import Ranks, run_all, shard_all
from ..apply.wide import dense_flex_attention
from ..layout import Ranges
from ..plan import ResolvedPlan
from .outputs import Outputs, differences, recorded


@dataclass(frozen=True)
class Mutation:
    """``dropped`` collectives, one at a time; ``unnoticed`` are the modules of those that changed nothing.

    ``idle`` are those that carried nothing, such as the products of a zero: to drop one is to drop nothing.
    ``planned`` is how many the plan's modules should run, by how often the whole model runs them.
    """

    dropped: int
    planned: int
    unnoticed: tuple[str, ...]
    idle: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.unnoticed and self.dropped == self.planned


def mutate(resolved: ResolvedPlan, model: nn.Module, arguments: Arguments) -> Mutation:
    """Try every collective of one call of ``model`` (whole, in float64). The ranks are simulated."""
    with one_thread(), dense_flex_attention():
        with recorded(model) as expected:
            reference = whole(model, arguments)
        ranks = Ranks(resolved.degree)
        models = shard_all(model, resolved, ranks)
        own = [{id(module): name for name, module in copy.named_modules()} for copy in models]
        run_all(models, ranks, arguments)
        trace = [(what, own[0][id(module)]) for what, module, _ in ranks.calls]
        slices = _norm_slices(resolved)
        unnoticed: list[str] = []
        idle: list[str] = []
        for number in range(len(trace)):
            ranks.calls.clear()
            ranks.dropped, ranks.effect = number, False
            if not _noticed(models, ranks, arguments, reference, expected, slices):
                (unnoticed if ranks.effect else idle).append(f"{trace[number][0]} in {trace[number][1]}")
            if ranks.broken:
                ranks = Ranks(resolved.degree)
                models = shard_all(model, resolved, ranks)
    return Mutation(len(trace), _planned(resolved, expected.calls, trace), tuple(unnoticed), tuple(idle))


def _noticed(
    models: Sequence[nn.Module],
    ranks: Ranks,
    arguments: Arguments,
    reference: object,
    expected: Outputs,
    slices: Mapping[str, Ranges],
) -> bool:
    with recorded(models[0]) as given:
        try:
            outputs = run_all(models, ranks, arguments)
        except Exception:  # noqa: BLE001  ranks that no longer meet have noticed, whatever they raise
            return True
    if max((relative_error(output, reference) for output in outputs), default=math.inf) > TOLERANCE:
        return True
    return any(difference.error > TOLERANCE for difference in differences(given, expected, slices))


def _norm_slices(resolved: ResolvedPlan) -> dict[str, Ranges]:
    """What the first rank has of the output of each norm: linear attention's normaliser would hide it later on."""
    return {
        name: resolved.shards[f"{name}.weight"].ranges[0]
        for name in resolved.norms
        if f"{name}.weight" in resolved.shards
    }


def _planned(
    resolved: ResolvedPlan, calls: Sequence[tuple[str, list[torch.Tensor]]], trace: Sequence[tuple[str, str]]
) -> int:
    """The collectives of the plan's modules; a held parameter's are as many as it is read."""
    families = resolved.together
    communicating = {
        name for name, style in resolved.styles.items() if style in ("rowwise", "gathered", "norm", "vocab")
    }
    held = {name.rpartition(".")[0] for name in (*resolved.held, *resolved.reduced)}
    count = sum(name in communicating and name not in families for name, _ in calls)
    met: set[str] = set()
    seen: set[str] = set()
    for name, tensors in calls:
        if name not in families:
            continue
        rows = tensors[0].numel() // max(1, tensors[0].shape[-1])
        if rows > MOST_ROWS or name in seen:  # it is gathered alone
            count += 1
        elif families[name] not in met:
            count += 1
            met.add(families[name])
        seen.add(name)
    return count + sum(name in held and name not in communicating for _, name in trace)
