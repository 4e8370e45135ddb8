"""What a plan means for a model, in numbers and in words."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from .document import WORTH
from .resolved import ResolvedPlan

# Ragged heads and norms aside: what may be left over a fair share.
_WORDS = {
    "colwise": "its output features are shared out, and its output stays so. No collective.",
    "rowwise": "its input is shared out; the ranks' partial sums are added up by one all-reduce, then the bias.",
    "vocab": "each rank looks up the rows that it has; one all-reduce puts the vectors together.",
    "gathered": "each rank makes some of its output columns, and one all-gather makes the output whole.",
    "norm": "it normalises over a dimension that is shared out; the ranks' statistics are combined, not the values.",
    "depthwise": "each rank convolves its own channels. No collective.",
}


@dataclass(frozen=True)
class Leftover:
    """A weight that stays whole on every rank, and why. ``share`` is its part of the model's parameters."""

    name: str
    share: float
    why: str


@dataclass(frozen=True)
class Summary:
    """``rank_bytes`` are the largest rank's, ``ideal_bytes`` the total over the degree."""

    model: str
    source: str
    degree: int
    parameters: int
    total_bytes: int
    rank_bytes: int
    rank_parameters: tuple[int, ...]
    ideal_bytes: float
    styles: dict[str, int]
    held: int
    collectives: int
    degrees: tuple[int, ...]
    leftovers: tuple[Leftover, ...]
    verified: dict[str, Any]

    @property
    def ratio(self) -> float:
        return self.rank_bytes / self.ideal_bytes

    @property
    def full(self) -> bool:
        """Whether every parameter of two or more dimensions above 0.1 % of the total is sharded."""
        return not any(leftover.share > WORTH for leftover in self.leftovers)

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": round(self.ratio, 4), "full": self.full}


def summarise(resolved: ResolvedPlan, model: nn.Module, degrees: list[int], dtype: torch.dtype) -> Summary:
    """The numbers of a plan on ``model``, whose parameters may be on meta."""
    total = sum(parameter.numel() for parameter in model.parameters())
    ranks = tuple(resolved.parameter_numel(model, rank) for rank in range(resolved.degree))
    styles = Counter(resolved.styles.values())
    leftovers = tuple(
        Leftover(name, parameter.numel() / total, why_whole(resolved, name))
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and name not in resolved.shards
    )
    return Summary(
        model=type(model).__name__,
        source=resolved.plan.source,
        degree=resolved.degree,
        parameters=total,
        total_bytes=total * dtype.itemsize,
        rank_bytes=max(ranks) * dtype.itemsize,
        rank_parameters=ranks,
        ideal_bytes=total * dtype.itemsize / resolved.degree,
        styles={str(style): count for style, count in styles.items()},
        held=len(resolved.held),
        collectives=resolved.collectives,
        degrees=tuple(degrees),
        leftovers=leftovers,
        verified=dict(resolved.plan.verified),
    )


def why_whole(resolved: ResolvedPlan, tensor: str) -> str:
    from .sizes import matches

    module = tensor.rpartition(".")[0]
    if tensor in resolved.skipped or module in resolved.skipped:
        return resolved.skipped.get(tensor) or resolved.skipped[module]
    for pattern, why in resolved.plan.whole.items():
        if matches(pattern, [tensor]) or matches(pattern, [module]):
            return why
    return "the plan does not name it"


def explain(resolved: ResolvedPlan, model: nn.Module, name: str) -> list[str]:
    """In words, how a module of ``model`` is sharded, and why. Raises ``KeyError`` for a module there is not."""
    module = dict(model.named_modules())[name]
    lines = [f"{name or type(model).__name__} is a {type(module).__name__}."]
    style = resolved.styles.get(name)
    rule = _rule(resolved, name)
    if style is not None:
        parts = f" ({' + '.join(map(str, rule.parts))})" if rule is not None and rule.parts else ""
        lines.append(f"It is {style}{parts}: {_WORDS[style]}")
        axes = {part for text in (rule.parts if rule else ()) for part in str(text).replace("*", " ").split()}
        for axis in resolved.plan.axes:
            if axis in axes:
                lines.append(f"The axis {axis} is {resolved.plan.axes[axis].what}.")
                lines += _partners(resolved, axis)
        if name in resolved.together:
            others = sum(family == resolved.together[name] for family in resolved.together.values()) - 1
            more = f"{others} other modules" if others > 1 else "another module"
            lines.append(f"It is given the same input as {more}, and gathered with {'them' if others > 1 else 'it'}.")
        if rule is not None and rule.why:
            lines.append(rule.why[0].upper() + rule.why[1:] + ".")
    for tensor, parameter in module.named_parameters(recurse=False):
        own = f"{name}.{tensor}" if name else tensor
        shape = list(parameter.shape)
        if own in resolved.held:
            lines.append(f"{tensor} {shape} is held in parts, and gathered whenever it is used: no other style fits.")
        elif own in resolved.reduced:
            local = list(resolved.shards[own].local_shape(0))
            lines.append(f"{tensor} {shape}: {local} on the first rank; every product it is in is added up.")
        elif own in resolved.shards:
            shard = resolved.shards[own]
            locals_ = [list(shard.local_shape(rank)) for rank in range(resolved.degree)]
            same = all(local == locals_[0] for local in locals_)
            lines.append(f"{tensor} {shape}: {f'{locals_[0]} on each rank' if same else f'the ranks hold {locals_}'}.")
        elif parameter.dim() > 1:
            lines.append(f"{tensor} {shape} is whole on every rank: {why_whole(resolved, own)}.")
        else:
            lines.append(f"{tensor} {shape} is whole on every rank.")
    for (owner, attribute), values in resolved.attributes.items():
        if owner == name:
            lines.append(f"Its attribute {attribute} becomes {', '.join(map(str, values))} on the ranks.")
    for cut in resolved.inputs.get(name, ()):
        lines.append(f"Its input {'.'.join(cut.path)} is cut along dim {cut.dim} as it enters.")
    if name in resolved.untraced:
        lines.append("No probe reached it: it raises if it runs.")
    children = sum(path.startswith(f"{name}.") for path in resolved.styles) if name else len(resolved.styles)
    if children:
        lines.append(f"{children} modules inside it are sharded.")
    if len(lines) == 1:
        lines.append("It holds no weights, and computes with whatever it is given.")
    return lines


def _rule(resolved: ResolvedPlan, name: str) -> Any:
    from .sizes import matches

    return next((rule for rule in resolved.plan.rules if matches(rule.module, [name])), None)


def _partners(resolved: ResolvedPlan, axis: str) -> list[str]:
    """What makes an axis and what contracts it."""

    def having(style: str) -> list[str]:
        return [
            rule.module
            for rule in resolved.plan.rules
            if rule.style == style
            and axis in {part for text in rule.parts for part in str(text).replace("*", " ").split()}
        ]

    made, contracted = having("colwise"), having("rowwise")
    lines = []
    if made:
        lines.append(f"It is made by {', '.join(made)}.")
    if contracted:
        lines.append(f"It is contracted, and the partial sums added up, in {', '.join(contracted)}.")
    return lines
