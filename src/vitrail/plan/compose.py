"""A plan for a model that only holds others: theirs, each under its own name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from torch import nn

from ..layout import Formula, join
from .document import Cut, Plan, Rule

T = TypeVar("T")


def held_models(model: nn.Module) -> dict[str, nn.Module]:
    """The models in the one list that ``model`` consists of; empty if it has anything else."""
    if any(True for _ in model.parameters(recurse=False)):
        return {}
    lists = [name for name, child in model.named_children() if isinstance(child, nn.ModuleList)]
    if len(lists) != 1 or len(list(model.named_children())) != 1:
        return {}
    return {f"{lists[0]}.{index}": child for index, child in enumerate(model.get_submodule(lists[0]).children())}


def compose(model: nn.Module, plans: Mapping[str, Plan], source: str) -> Plan:
    """The plans of the parts, by their names in ``model``, as one."""
    parts = [_under(plan, name) for name, plan in plans.items()]
    worst = max((plan.verified.get("error", 0.0) for plan in plans.values()), default=0.0)
    degrees = sorted(set.intersection(*(set(plan.verified.get("degrees", ())) for plan in plans.values())))
    return Plan(
        model=type(model).__name__,
        axes=_joined(part.axes for part in parts),
        rules=tuple(rule for part in parts for rule in part.rules),
        attributes=_joined(part.attributes for part in parts),
        whole=_joined(part.whole for part in parts),
        source=source,
        dims=_joined(part.dims for part in parts),
        tensors=_joined(part.tensors for part in parts),
        held=_joined(part.held for part in parts),
        inputs=_joined(part.inputs for part in parts),
        untraced=tuple(name for part in parts for name in part.untraced),
        verified={"degrees": degrees, "error": worst} if degrees else {},
    )


def _joined(mappings: object) -> dict[str, T]:
    result: dict[str, T] = {}
    for mapping in mappings:  # type: ignore[attr-defined]
        result |= mapping
    return result


def _under(plan: Plan, name: str) -> Plan:
    """``plan`` with every name it has moved below ``name``, and axes of its own."""
    tag = "_" + re.sub(r"\W", "_", name)

    def text(formula: str | int) -> str | int:
        return formula if isinstance(formula, int) else str(_renamed(Formula.parse(formula), tag))

    def parts(given: tuple[str | int, ...]) -> tuple[str | int, ...]:
        return tuple(text(part) for part in given)

    def cut(given: Cut) -> Cut:
        return replace(given, parts=parts(given.parts))

    def placed(size: int | str | None) -> int | str | None:
        if not isinstance(size, str):
            return size
        return f"{name}.{size}" if "." in size or ":" in size else f"{name}:{size}"

    return replace(
        plan,
        axes={axis + tag: replace(entry, size=placed(entry.size)) for axis, entry in plan.axes.items()},
        dims={dim + tag: placed(size) for dim, size in plan.dims.items()},
        rules=tuple(_moved(rule, name, parts(rule.parts), tag) for rule in plan.rules),
        tensors={f"{name}.{tensor}": cut(entry) for tensor, entry in plan.tensors.items()},
        held={f"{name}.{tensor}": entry for tensor, entry in plan.held.items()},
        inputs={
            f"{name}.{module}": {path: tuple(cut(item) for item in cuts) for path, cuts in entries.items()}
            for module, entries in plan.inputs.items()
        },
        attributes={f"{name}.{attribute}": str(text(counts)) for attribute, counts in plan.attributes.items()},
        whole={f"{name}.{tensor}": why for tensor, why in plan.whole.items()},
        untraced=tuple(f"{name}.{module}" for module in plan.untraced),
    )


def _moved(rule: Rule, name: str, parts: tuple[str | int, ...], tag: str) -> Rule:
    together = rule.together and rule.together + tag
    return replace(rule, module=f"{name}.{rule.module}", parts=parts, together=together)


def _renamed(formula: Formula, tag: str) -> Formula:
    if formula.kind == "name":
        return replace(formula, name=formula.name + tag)
    if formula.parts:
        assert formula.kind in ("cat", "prod")
        return join(formula.kind, [_renamed(part, tag) for part in formula.parts])
    return formula
