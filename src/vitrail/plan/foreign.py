"""Plans in diffusers' own form: a flat dict of module globs to styles (``Model._tp_plan``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..errors import PlanError
from .configuration import configuration
from .document import Axis, Plan, Rule, Style

_STYLES: dict[str, Style] = {"colwise": "colwise", "rowwise": "rowwise"}
_PACKED: dict[str, tuple[Style, str]] = {
    "PackedColwiseParallel": ("colwise", "_tp_packed_col_blocks"),
    "PackedRowwiseParallel": ("rowwise", "_tp_packed_row_blocks"),
}


def from_diffusers(flat: Mapping[str, Any], model: nn.Module) -> Plan:
    """Turn ``flat`` (``{"blocks.*.attn.to_q": "colwise", ...}``) into a `Plan` for ``model``.

    The styles are ``"colwise"``, ``"rowwise"`` and diffusers' ``PackedColwiseParallel`` and ``PackedRowwiseParallel``,
    whose blocks come from the style or from the Linear. A key holds at most one ``*``, over a ``ModuleList``.

    Such a plan says nothing of integers that count heads. A module whose projections are cut colwise and which has an
    integer attribute ``heads`` gets it rescaled: processors that divide a width by it would otherwise compute with
    another head width, without any error.
    """
    rules: list[Rule] = []
    axes: dict[str, Axis] = {}
    attributes: dict[str, str] = {}
    for pattern, style in flat.items():
        for name, module in _expand(pattern, model):
            kind, blocks = _style(style, name, module)
            rules.append(Rule(name, kind, blocks))
            parent = name.rpartition(".")[0]
            heads = getattr(model.get_submodule(parent), "heads", None)
            if kind == "colwise" and isinstance(heads, int) and not isinstance(heads, bool) and parent:
                axes[f"heads{heads}"] = Axis(size=heads, width=1, what="attention heads")
                attributes[f"{parent}.heads"] = f"heads{heads}"
    heads = configuration(model).get("num_attention_heads")
    if isinstance(heads, int):
        axes[f"heads{heads}"] = Axis(size=heads, width=1, what="attention heads")
    return Plan(type(model).__name__, axes, tuple(rules), attributes, source="diffusers' form")


def _expand(pattern: str, model: nn.Module) -> list[tuple[str, nn.Module]]:
    where = f"the plan for {type(model).__name__} (diffusers' form)"
    if pattern.count("*") > 1:
        raise PlanError(f"{where}: {pattern!r} has more than one '*'")
    names = [pattern]
    if "*" in pattern:
        prefix, _, suffix = pattern.partition("*")
        prefix = prefix.strip(".")
        container = _submodule(model, prefix, pattern, where)
        if not isinstance(container, nn.ModuleList):
            raise PlanError(
                f"{where}: the '*' of {pattern!r} must stand for the elements of a ModuleList, but {prefix!r} is a "
                f"{type(container).__name__}"
            )
        names = [f"{prefix}.{index}{suffix}" for index in range(len(container))]
    return [(name, _submodule(model, name, pattern, where)) for name in names]


def _submodule(model: nn.Module, name: str, pattern: str, where: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise PlanError(f"{where} names module {pattern!r}, but the model has no {name!r}") from None


def _style(style: Any, name: str, module: nn.Module) -> tuple[Style, tuple[int, ...]]:
    if isinstance(style, str) and style in _STYLES:
        return _STYLES[style], (1,)
    kind = type(style).__name__
    if kind not in _PACKED:
        raise PlanError(
            f"the style of {name!r} is {style!r}; known: 'colwise', 'rowwise', PackedColwiseParallel, "
            "PackedRowwiseParallel"
        )
    direction, attribute = _PACKED[kind]
    blocks = style.blocks or getattr(module, attribute, None)
    if not blocks:
        raise PlanError(f"{name!r} has style {kind} without blocks: pass them to it, or set {attribute} on the Linear")
    return direction, tuple(blocks)
