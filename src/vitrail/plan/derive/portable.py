"""A plan without the sizes of the model it was derived on, so that it serves every model of the same structure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from ...errors import PlanError
from ..configuration import configuration
from ..document import Plan
from ..resolve import resolve
from .write import Patterns


def portable(plan: Plan, model: nn.Module) -> Plan:
    """``plan``, derived on ``model``, with sizes that follow from the weights, attributes or configuration.

    Sizes that follow from nothing stay as numbers.
    """
    expected = resolve(plan, model, 2).shards
    axes = {name: replace(axis, size=None) for name, axis in plan.axes.items()}
    bare = replace(plan, axes=axes, dims=dict.fromkeys(plan.dims))

    def works(candidate: Plan) -> bool:
        try:
            return resolve(candidate, model, 2).shards == expected
        except PlanError:
            return False

    if works(bare):
        return bare
    # Whole sizes first: with the width of a head, the number of heads follows from a weight.
    numbers: dict[str, int] = {name: size for name, size in plan.dims.items() if isinstance(size, int)}
    sized = {name: axis.size for name, axis in plan.axes.items() if isinstance(axis.size, int)}
    current = bare
    for name, number in numbers.items():
        found: int | str = next(_evidence(model, number), number)
        current = replace(current, dims={**current.dims, name: found})
        if works(current):
            return current
    for name, number in sized.items():
        found = next(_evidence(model, number), number)
        current = replace(current, axes={**current.axes, name: replace(current.axes[name], size=found)})
        if works(current):
            return current
    return plan


def _evidence(model: nn.Module, number: int) -> Iterator[str]:
    """Keys of the configuration and attributes of modules that have the value ``number``."""
    config = configuration(model)
    for key in ("attention_head_dim", "num_attention_heads", *config):
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value == number:
            yield key
    modules = dict(model.named_modules())
    patterns = Patterns(modules)
    found = [
        f"{patterns.of(path)}.{name}"
        for path, module in modules.items()
        for name, value in vars(module).items()
        if path and not name.startswith("_") and type(value) is int and value == number
    ]
    # A small model has few numbers, and a patch may be as wide as a head: what speaks of heads comes first.
    yield from sorted(found, key=lambda text: "head" not in text.rpartition(".")[2])
