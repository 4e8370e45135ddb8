"""What a plan comes to on one model and degree: a shard for every parameter it touches, checked before any is cut."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import PlanError
from ..layout import Range, Ranges, Shard, share, split
from .document import Plan, Rule, Style


@dataclass(frozen=True)
class ResolvedPlan:
    """``shards`` by parameter name; ``styles`` by module name; ``attributes`` by (module, attribute): one per rank.

    A parameter that is not in ``shards`` is whole on every rank.
    """

    plan: Plan
    degree: int
    shards: Mapping[str, Shard]
    styles: Mapping[str, Style]
    attributes: Mapping[tuple[str, str], tuple[int, ...]]

    def parameter_numel(self, model: nn.Module, rank: int) -> int:
        """How many parameters of ``model``, still whole (or on meta), ``rank`` will hold."""
        whole = ((name, param.numel()) for name, param in model.named_parameters())
        return sum(self.shards[name].numel(rank) if name in self.shards else numel for name, numel in whole)


@dataclass(frozen=True)
class _Size:
    units: int
    width: int
    seen_in: str


def resolve(plan: Plan, model: nn.Module, degree: int) -> ResolvedPlan:
    """Work the plan out for ``model`` (whole; meta tensors will do) over ``degree`` ranks. Nothing is changed.

    Raises `PlanError` when the plan names a module or attribute the model lacks, when a width in the plan is not the
    model's, or when the degree does not divide what it must: the message says which degrees would do.
    """
    classes = {cls.__name__ for cls in type(model).__mro__}
    if plan.model not in classes:
        raise PlanError(f"{_where(plan)} is not for {type(model).__name__}")
    matches = list(_matches(plan, model))
    if not matches:
        raise PlanError(f"{_where(plan)} shards nothing of {type(model).__name__}")
    sizes = _sizes(plan, model, matches)
    _check_degree(plan, model, degree, matches, sizes)
    tied = _tied(model)
    shards: dict[str, Shard] = {}
    styles: dict[str, Style] = {}
    for name, module, rule in matches:
        if name in styles:
            raise PlanError(f"{_where(plan)}: two rules match module {name!r}")
        if f"{name}.weight" in tied:
            raise PlanError(
                f"{_where(plan)}: {name}.weight is tied to {tied[f'{name}.weight']}, so it cannot be cut alone"
            )
        styles[name] = rule.style
        weight = tuple(module.weight.shape)
        ranges = _ranges(rule, weight, degree, sizes)
        shards[f"{name}.weight"] = Shard(weight, 1 if rule.style == "rowwise" else 0, ranges)
        if module.bias is not None and rule.style != "rowwise":
            shards[f"{name}.bias"] = Shard(tuple(module.bias.shape), 0, ranges)
    return ResolvedPlan(plan, degree, shards, styles, _attributes(plan, model, degree, sizes))


def valid_degrees(plan: Plan, model: nn.Module) -> list[int]:
    """The degrees ``plan`` can serve on ``model``, ascending; 1 is always among them."""
    matches = list(_matches(plan, model))
    common = math.gcd(*_divisible(plan, matches, _sizes(plan, model, matches)).values())
    if common == 0:
        return [1]
    return [degree for degree in range(1, common + 1) if common % degree == 0]


def _where(plan: Plan) -> str:
    return f"the plan for {plan.model} ({plan.source})"


def expand(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that ``pattern`` matches: ``*`` stands for one component."""
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    return [name for name in names if expression.fullmatch(name)]


def _matches(plan: Plan, model: nn.Module) -> Iterator[tuple[str, nn.Linear, Rule]]:
    modules = dict(model.named_modules())
    for rule in plan.rules:
        names = expand(rule.module, list(modules))
        if not names and not rule.optional:
            raise PlanError(
                f"{_where(plan)} names module {rule.module!r}, which {type(model).__name__} does not have",
                hint="check that the plan is for this class and configuration, or mark the rule optional",
            )
        for name in names:
            module = modules[name]
            # A subclass may do more in its forward than multiply, and what that does to a shard is not known.
            if type(module) is not nn.Linear:
                raise PlanError(
                    f"{_where(plan)} shards {name!r}, which is a {type(module).__name__}; it can only shard Linear",
                    hint="unload adapters and quantisation before sharding" if isinstance(module, nn.Linear) else None,
                )
            # Layerwise casting and diffusers' hooks put a function of their own there.
            if "forward" in vars(module):
                raise PlanError(
                    f"{_where(plan)} shards {name!r}, whose forward was replaced: it would bypass the collective",
                    hint="shard first, and add casting, hooks or caches afterwards",
                )
            yield name, module, rule


def _tied(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) in first:
            tied[name], tied[first[id(param)]] = first[id(param)], name
        else:
            first[id(param)] = name
    return tied


def _sharded_size(rule: Rule, weight: tuple[int, ...]) -> int:
    return weight[1] if rule.style == "rowwise" else weight[0]


def _number(plan: Plan, model: nn.Module, axis: str, value: int | str) -> int:
    if isinstance(value, int):
        return value
    config: Any = getattr(model, "config", {})
    number = config.get(value) if hasattr(config, "get") else None
    if isinstance(number, bool) or not isinstance(number, int):
        raise PlanError(
            f"{_where(plan)}: axis {axis!r} is sized by {value!r}, which {type(model).__name__}'s configuration "
            f"gives as {number!r}; an integer is needed"
        )
    return number


def _sizes(plan: Plan, model: nn.Module, matches: Sequence[tuple[str, nn.Linear, Rule]]) -> dict[str, _Size]:
    """Every axis' units and width: declared ones first, then what the shapes leave no choice about."""
    units = {
        name: None if axis.size is None else _number(plan, model, name, axis.size) for name, axis in plan.axes.items()
    }
    sizes: dict[str, _Size] = {}
    for name, axis in plan.axes.items():
        if (count := units[name]) is not None and axis.width is not None:
            sizes[name] = _Size(count, _number(plan, model, name, axis.width), "its declaration")
    pending = [(name, rule, _sharded_size(rule, tuple(module.weight.shape))) for name, module, rule in matches]
    pending = [item for item in pending if item[1].parts and isinstance(item[1].parts[0], str)]
    while pending:
        waiting = []
        for name, rule, total in pending:
            parts = [str(part) for part in rule.parts]
            unknown = sorted({part for part in parts if part not in sizes})
            known = sum(sizes[part].units * sizes[part].width for part in parts if part in sizes)
            if len(unknown) > 1:
                waiting.append((name, rule, total))
                continue
            if not unknown and known != total:
                sources = ", ".join(
                    f"{part} = {sizes[part].units} x {sizes[part].width}" for part in dict.fromkeys(parts)
                )
                raise PlanError(
                    f"{_where(plan)}: {name!r} is {total} wide, but its parts {parts} come to {known} ({sources}; "
                    f"{parts[0]} from {sizes[parts[0]].seen_in})"
                )
            if unknown:
                elements, rest = divmod(total - known, parts.count(unknown[0]))
                count = units[unknown[0]] or elements
                if rest or elements <= 0 or elements % count:
                    raise PlanError(
                        f"{_where(plan)}: {name!r} is {total} wide, which leaves no whole size for axis "
                        f"{unknown[0]!r} in its parts {parts}"
                    )
                sizes[unknown[0]] = _Size(count, elements // count, repr(name))
        if len(waiting) == len(pending):
            raise PlanError(
                f"{_where(plan)}: the parts of {waiting[0][0]!r} have more than one axis of unknown size",
                hint="declare size and width of all axes but one",
            )
        pending = waiting
    return sizes


def _divisible(
    plan: Plan, matches: Sequence[tuple[str, nn.Linear, Rule]], sizes: Mapping[str, _Size]
) -> dict[str, int]:
    """What the degree has to divide, by what it is."""
    numbers = {f"{axis} ({plan.axes[axis].what or 'axis'})": size.units for axis, size in sizes.items()}
    for name, module, rule in matches:
        blocks = _proportional(plan, name, rule, _sharded_size(rule, tuple(module.weight.shape)))
        numbers |= {f"block {index} of {name}": block for index, block in enumerate(blocks)}
    return numbers


def _check_degree(
    plan: Plan,
    model: nn.Module,
    degree: int,
    matches: Sequence[tuple[str, nn.Linear, Rule]],
    sizes: Mapping[str, _Size],
) -> None:
    if degree < 1:
        raise PlanError(f"a degree of {degree} is not possible; it must be at least 1")
    numbers = _divisible(plan, matches, sizes)
    for what, number in numbers.items():
        if number % degree:
            common = math.gcd(*numbers.values())
            would = [str(other) for other in range(1, common + 1) if common % other == 0]
            raise PlanError(
                f"{type(model).__name__} cannot be sharded over {degree} ranks: {what} has {number} units, which "
                f"{degree} does not divide",
                hint=f"degrees that would do: {', '.join(would)}",
            )


def _proportional(plan: Plan, name: str, rule: Rule, total: int) -> list[int]:
    shares = [part for part in rule.parts if isinstance(part, int)]
    if shares and total % sum(shares):
        raise PlanError(f"{_where(plan)}: {name!r} is {total} wide, which proportions {shares} do not divide")
    return [total // sum(shares) * part for part in shares]


def _ranges(rule: Rule, weight: tuple[int, ...], degree: int, sizes: Mapping[str, _Size]) -> tuple[Ranges, ...]:
    total = _sharded_size(rule, weight)
    if rule.style == "gathered":
        # Chunks of one length, the last ones shorter: what is gathered is then whole as it lies, but for its end.
        chunk = -(-total // degree)
        cuts = [(min(rank * chunk, total), min((rank + 1) * chunk, total)) for rank in range(degree)]
        return share([(total, cuts, 1)])
    parts: list[tuple[int, Sequence[Range], int]] = []
    proportions = sum(part for part in rule.parts if isinstance(part, int))
    for part in rule.parts:
        if isinstance(part, int):
            size = total // proportions * part
            parts.append((size, split(size, degree), 1))
        else:
            axis = sizes[part]
            parts.append((axis.units * axis.width, split(axis.units, degree), axis.width))
    return share(parts)


def _attributes(
    plan: Plan, model: nn.Module, degree: int, sizes: Mapping[str, _Size]
) -> dict[tuple[str, str], tuple[int, ...]]:
    modules = dict(model.named_modules())
    local: dict[tuple[str, str], tuple[int, ...]] = {}
    for pattern, axis in plan.attributes.items():
        module_pattern, _, attribute = pattern.rpartition(".")
        names = [name for name in expand(module_pattern, list(modules)) if hasattr(modules[name], attribute)]
        optional = any(rule.optional for rule in plan.rules if rule.module.startswith(module_pattern + "."))
        if not names and not optional:
            raise PlanError(f"{_where(plan)} names attribute {pattern!r}, which {type(model).__name__} does not have")
        if not names:
            continue
        if axis not in sizes:
            raise PlanError(f"{_where(plan)}: attribute {pattern!r} counts axis {axis!r}, which no module is cut along")
        size = sizes[axis]
        units = [stop - start for start, stop in split(size.units, degree)]
        for name in names:
            value = getattr(modules[name], attribute)
            if isinstance(value, bool) or value not in (size.units, size.units * size.width):
                raise PlanError(
                    f"{_where(plan)}: {name}.{attribute} is {value!r}, but axis {axis!r} has {size.units} units of "
                    f"width {size.width}"
                )
            scale = 1 if value == size.units else size.width
            local[name, attribute] = tuple(unit * scale for unit in units)
    return local
