"""What a plan comes to on one model and degree: a shard for every tensor it touches, checked before any is cut."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import PlanError
from ..layout import Formula, Ranges, Shard, share, split
from .document import Cut, Held, Plan, Rule, Style
from .norms import Norm, recognise
from .owned import Owned, beyond, lacking, most, owned, pairs, possible
from .sizes import Equation, Match, Sizes, attribute_holders, matches, split_attribute

LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class InputCut:
    """An argument of a module's forward, cut as it enters: ``path`` is its name, then indices or keys."""

    path: tuple[str, ...]
    dim: int
    whole: int
    ranges: tuple[Ranges, ...]
    zeros: tuple[Ranges, ...] = ()


@dataclass(frozen=True)
class ResolvedPlan:
    """``shards`` by tensor name; ``styles`` by module name; ``attributes`` by (module, attribute): one per rank.

    A tensor that is not in ``shards`` is whole on every rank. ``norms`` are the modules of that style; ``inputs`` by
    module; ``untraced`` modules must not run; ``held`` parameters are gathered at use, along a dim. ``skipped`` says
    which rules were left out as not worth it, and why. Gathered modules of one name in ``together`` share a collective;
    products of ``reduced`` parameters are added up.
    """

    plan: Plan
    degree: int
    shards: Mapping[str, Shard]
    styles: Mapping[str, Style]
    attributes: Mapping[tuple[str, str], tuple[int, ...]]
    norms: Mapping[str, Norm] = field(default_factory=dict)
    inputs: Mapping[str, tuple[InputCut, ...]] = field(default_factory=dict)
    untraced: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    together: Mapping[str, str] = field(default_factory=dict)
    reduced: tuple[str, ...] = ()

    @property
    def collectives(self) -> int:
        """Those of one step, when every module runs once and every held parameter is read once."""
        single = [name for name, style in self.styles.items() if style in ("rowwise", "gathered", "norm")]
        alone = sum(name not in self.together for name in single)
        return alone + len(set(self.together.values())) + len(self.held) + len(self.reduced)

    def parameter_numel(self, model: nn.Module, rank: int) -> int:
        """How many parameters of ``model``, still whole (or on meta), ``rank`` will hold."""
        whole = ((name, param.numel()) for name, param in model.named_parameters())
        return sum(self.shards[name].numel(rank) if name in self.shards else numel for name, numel in whole)


def resolve(plan: Plan, model: nn.Module, degree: int, pad: bool = False) -> ResolvedPlan:
    """Work the plan out for ``model`` (whole; meta tensors will do) over ``degree`` ranks. Nothing is changed.

    With ``pad`` every rank gets as many units as the largest share, of zeros where there are no more, so that all run
    the same shapes: for compilers that make one program for all ranks.

    Raises `PlanError` when the plan names a module, tensor or attribute the model lacks, when a size in the plan is
    not the model's, or when the degree cannot work: the message says which degrees would do.
    """
    return _Resolution(plan, model, pad).at(degree)


def valid_degrees(plan: Plan, model: nn.Module) -> list[int]:
    """The degrees ``plan`` can serve on ``model``, ascending; 1 is always among them."""
    return _Resolution(plan, model).degrees()


def degrees_beyond(plan: Plan, model: nn.Module) -> list[int]:
    """Small degrees at which axes within others are split (`Axis.within`), if the plan has any."""
    resolution = _Resolution(plan, model)
    return beyond(plan.axes, resolution.units()) if pairs(plan.axes) else []


@dataclass(frozen=True)
class _Tensor:
    """A tensor that is cut along ``dim``, and the parts of that dimension."""

    name: str
    shape: tuple[int, ...]
    dim: int
    parts: tuple[str | int, ...]
    key: str


class _Resolution:
    def __init__(self, plan: Plan, model: nn.Module, pad: bool = False) -> None:
        self.plan, self.model, self.padded = plan, model, pad
        self.where = f"the plan for {plan.model} ({plan.source})"
        if plan.model not in {cls.__name__ for cls in type(model).__mro__}:
            raise PlanError(f"{self.where} is not for {type(model).__name__}")
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self.owned = _tensors_of(model)
        self.tied = _tied(model)
        self.total = sum(parameter.numel() for parameter in model.parameters())
        self.skipped: dict[str, str] = {}
        self.norms: dict[str, Norm] = {}
        self.styles: dict[str, Style] = {}
        self.together: dict[str, str] = {}
        self.reduced: list[str] = []
        self.chunked: list[tuple[str, tuple[int, ...], int]] = []
        self.tensors: list[_Tensor] = []
        for match, module, rule in self._matches():
            self._module(match, module, rule)
        for pattern, cut in plan.tensors.items():
            self._tensor(pattern, cut)
        self.held: dict[str, int] = {}
        for pattern, held in plan.held.items():
            self._hold(pattern, held)
        if not self.tensors and not self.chunked:
            raise PlanError(f"{self.where} shards nothing of {type(model).__name__}")
        self.counted = list(self._counted())
        self.sizes = Sizes(plan, model, list(self._equations()))

    # -- what the plan's patterns match

    def _matches(self) -> Iterator[tuple[Match, nn.Module, Rule]]:
        for rule in self.plan.rules:
            found = matches(rule.module, list(self.modules))
            if not found and not rule.optional:
                raise PlanError(
                    f"{self.where} names module {rule.module!r}, which {type(self.model).__name__} does not have",
                    hint="check that the plan is for this class and configuration, or mark the rule optional",
                )
            for match in found:
                module = self.modules[match.name]
                self._check_type(match.name, module, rule)
                yield match, module, rule

    def _check_type(self, name: str, module: nn.Module, rule: Rule) -> None:
        if rule.style == "norm":
            return
        # A subclass may do more in its forward than multiply, and what that does to a shard is not known.
        known = (*LINEAR, nn.Embedding) if rule.style == "gathered" else LINEAR
        if type(module) not in known:
            raise PlanError(
                f"{self.where} shards {name!r}, which is a {type(module).__name__}; it can only shard Linear, "
                "convolutions and, gathered, embeddings",
                hint="unload adapters and quantisation before sharding" if isinstance(module, nn.Linear) else None,
            )
        # Layerwise casting and diffusers' hooks put a function of their own there.
        if "forward" in vars(module):
            raise PlanError(
                f"{self.where} shards {name!r}, whose forward was replaced: it would bypass the collective",
                hint="shard first, and add casting, hooks or caches afterwards",
            )

    def _module(self, match: Match, module: nn.Module, rule: Rule) -> None:
        name = match.name
        if name in self.styles:
            raise PlanError(f"{self.where}: two rules match module {name!r}")
        if rule.style == "norm":
            self._norm(match, module, rule)
            return
        weight = getattr(module, "weight", None)
        assert isinstance(weight, nn.Parameter)
        self._untied(f"{name}.weight")
        bias = getattr(module, "bias", None)
        shape = tuple(weight.shape)
        if rule.style == "gathered":
            if self._small(name, weight, rule.above):
                return
            self.styles[name] = rule.style
            if rule.together and type(module) is nn.Linear:
                self.together[name] = rule.together
            dim = 1 if isinstance(module, nn.Embedding) else 0
            self.chunked.append((f"{name}.weight", shape, dim))
            if isinstance(bias, nn.Parameter):
                self.chunked.append((f"{name}.bias", tuple(bias.shape), 0))
            return
        self.styles[name] = rule.style
        dim = 1 if rule.style == "rowwise" else 0
        self.tensors.append(_Tensor(f"{name}.weight", shape, dim, rule.parts, match.key))
        if isinstance(bias, nn.Parameter) and rule.style != "rowwise":
            self.tensors.append(_Tensor(f"{name}.bias", tuple(bias.shape), 0, rule.parts, match.key))

    def _small(self, name: str, tensor: torch.Tensor, above: float | None) -> bool:
        if above is None or tensor.numel() > above * self.total:
            return False
        self.skipped[name] = f"its {tensor.numel():,} elements are not worth a collective"
        return True

    def _hold(self, pattern: str, held: Held) -> None:
        found = matches(pattern, list(self.owned))
        if not found:
            raise PlanError(f"{self.where} holds tensor {pattern!r}, which {type(self.model).__name__} does not have")
        for match in found:
            tensor = self.owned[match.name]
            if held.dim >= tensor.dim():
                raise PlanError(
                    f"{self.where} cuts dim {held.dim} of {match.name!r}: its shape is {list(tensor.shape)}"
                )
            self._untied(match.name)
            if not self._small(match.name, tensor, held.above):
                self.held[match.name] = held.dim
                self.chunked.append((match.name, tuple(tensor.shape), held.dim))

    def _norm(self, match: Match, module: nn.Module, rule: Rule) -> None:
        vectors = {name: parameter for name, parameter in module.named_parameters() if parameter is not None}
        for name, parameter in vectors.items():
            self.tensors.append(_Tensor(f"{match.name}.{name}", tuple(parameter.shape), 0, rule.parts, match.key))
        self.styles[match.name] = "norm"

    def _tensor(self, pattern: str, cut: Cut) -> None:
        dim = cut.dim
        found = matches(pattern, list(self.owned))
        if not found:
            raise PlanError(f"{self.where} names tensor {pattern!r}, which {type(self.model).__name__} does not have")
        for match in found:
            shape = tuple(self.owned[match.name].shape)
            if dim >= len(shape):
                raise PlanError(f"{self.where} cuts dim {dim} of {match.name!r}, whose shape is {list(shape)}")
            self._untied(match.name)
            self.tensors.append(_Tensor(match.name, shape, dim, cut.parts, match.key))
            if cut.reduce:
                if "." not in match.name:
                    raise PlanError(f"{self.where} adds up products of {match.name!r}, which the model itself holds")
                self.reduced.append(match.name)

    def _untied(self, name: str) -> None:
        if name in self.tied:
            raise PlanError(f"{self.where}: {name} is tied to {self.tied[name]}, so it cannot be cut alone")

    def _counted(self) -> Iterator[tuple[Match, str, str, int]]:
        """Every attribute to rescale: the module, the attribute, its formula and value."""
        for pattern, text in self.plan.attributes.items():
            module_pattern, attribute = split_attribute(
                pattern, self.modules, lambda name: matches(name, list(self.modules))
            )
            found = False
            for match in matches(module_pattern, list(self.modules)):
                for holder, name, index in attribute_holders(self.modules[match.name], attribute):
                    found = True
                    value: Any = getattr(holder, name)
                    value = value[index] if index is not None else value
                    if isinstance(value, bool) or not isinstance(value, int):
                        raise PlanError(f"{self.where}: {match.name}.{attribute} is {value!r}, not an integer")
                    yield match, attribute, text, value
            optional = any(rule.optional for rule in self.plan.rules if rule.module.startswith(module_pattern + "."))
            if not found and not optional:
                raise PlanError(
                    f"{self.where} names attribute {pattern!r}, which {type(self.model).__name__} does not have"
                )

    # -- sizes

    def _equations(self) -> Iterator[Equation]:
        blank = Sizes(self.plan, self.model, [])
        for tensor in self.tensors:
            if isinstance(tensor.parts[0], str):
                formula = Formula.parse(" + ".join(map(str, tensor.parts)))
                yield Equation(blank.widen(formula), tensor.shape[tensor.dim], repr(tensor.name), tensor.key)
        for match, attribute, text, value in self.counted:
            if not self._wide(text):
                yield Equation(Formula.parse(text), value, f"{match.name}.{attribute}", match.key)

    def _wide(self, text: str) -> bool:
        """An axis by itself that has a width: the attribute may count units or elements."""
        return text in self.plan.axes and self.plan.axes[text].width is not None

    # -- degrees

    def units(self) -> dict[str, int]:
        """The units of every axis: the fewest of any block."""
        found = {name: self.sizes.values(name) for name in self.plan.axes}
        return {name: min(sizes.values()) for name, sizes in found.items() if sizes}

    def _blocks(self) -> dict[str, int]:
        """Parts given as proportions, which are cut evenly or not at all."""
        blocks = {}
        for tensor in self.tensors:
            shares = [part for part in tensor.parts if isinstance(part, int)]
            total = tensor.shape[tensor.dim]
            if shares and total % sum(shares):
                raise PlanError(
                    f"{self.where}: {tensor.name!r} is {total} wide, which proportions {shares} do not divide"
                )
            for index, part in enumerate(shares):
                blocks[f"block {index} of {tensor.name}"] = total // sum(shares) * part
        return blocks

    def degrees(self) -> list[int]:
        units, blocks = self.units(), self._blocks()
        # Without units or blocks everything is gathered: a rank should hold a column of each.
        columns = min((shape[dim] for _, shape, dim in self.chunked), default=1)
        limit = most(self.plan.axes, units)
        last = min([*([] if limit is None else [limit]), *blocks.values()], default=columns)
        even = [*units.values(), *blocks.values()] if blocks else []
        return [
            degree
            for degree in range(1, last + 1)
            if all(number % degree == 0 for number in even) and possible(self.plan.axes, units, degree)
        ]

    def _check_degree(self, degree: int) -> None:
        if degree < 1:
            raise PlanError(f"a degree of {degree} is not possible; it must be at least 1")
        blocks, units = self._blocks(), self.units()
        what = {name: f"{name} ({self.plan.axes[name].what or 'axis'})" for name in units}
        # Proportions know nothing of units: with them everything is cut evenly.
        problems = [
            f"{name} has {size} units, which {degree} does not divide"
            for name, size in {**{what[axis]: size for axis, size in units.items()}, **blocks}.items()
            if blocks and size % degree
        ]
        inner = pairs(self.plan.axes)
        for axis in lacking(self.plan.axes, units, degree):
            parts = f" of {units[inner[axis]]} parts" if inner.get(axis) in units else ""
            problems.append(f"{what[axis]} has {units[axis]} units{parts}, fewer than {degree}")
            if parts:
                problems[-1] = f"{what[axis]} has {units[axis]} units{parts}, which cannot be shared out over {degree}"
        if problems:
            would = self.degrees()
            listed = f"1 to {would[-1]}" if would == list(range(1, would[-1] + 1)) else ", ".join(map(str, would))
            raise PlanError(
                f"{type(self.model).__name__} cannot be sharded over {degree} ranks: {problems[0]}",
                hint=f"degrees that would do: {listed}",
            )

    # -- the result

    def at(self, degree: int) -> ResolvedPlan:
        self._check_degree(degree)
        shards: dict[str, Shard] = {}
        for tensor in self.tensors:
            ranges, zeros = self._ranges(tensor.parts, tensor.shape[tensor.dim], tensor.key, degree)
            if tensor.name in shards:
                raise PlanError(f"{self.where} cuts {tensor.name!r} twice")
            shards[tensor.name] = Shard(tensor.shape, tensor.dim, ranges, zeros)
        for name, shape, dim in self.chunked:
            # Chunks of one length, the last ones shorter: what is gathered is then whole as it lies, but for its end.
            chunk = -(-shape[dim] // degree)
            cuts = [(min(rank * chunk, shape[dim]), min((rank + 1) * chunk, shape[dim])) for rank in range(degree)]
            shards[name] = Shard(shape, dim, share([(shape[dim], cuts, 1)]))
        norms = {}
        for name, style in self.styles.items():
            if style == "norm":
                norms[name] = self._recognise(name)
                if self.padded and norms[name].kind == "layer" and self._uneven(name, degree):
                    raise PlanError(
                        f"{self.where}: {name} is a layer norm over a dimension that would be padded, and zeros are "
                        "values to it",
                        hint=f"leave padding out, or take a degree that divides: {', '.join(map(str, self._even()))}",
                    )
        return ResolvedPlan(
            self.plan,
            degree,
            shards,
            self.styles,
            self._attributes(degree),
            norms,
            self._inputs(degree),
            tuple(match.name for pattern in self.plan.untraced for match in matches(pattern, list(self.modules))),
            self.skipped,
            self.held,
            self.together,
            tuple(self.reduced),
        )

    def _norm_rule(self, name: str) -> tuple[Rule, str]:
        return next(
            (rule, match.key)
            for rule in self.plan.rules
            if rule.style == "norm"
            for match in matches(rule.module, [name])
        )

    def _uneven(self, name: str, degree: int) -> bool:
        rule, key = self._norm_rule(name)
        names = {part for text in rule.parts for part in Formula.parse(text).names()}
        everyone = self._owned(degree, key)
        return any(not _even(everyone, name) for name in names if name in everyone[0])

    def _recognise(self, name: str) -> Norm:
        rule, key = self._norm_rule(name)
        width = sum(self.sizes.part(str(part)).size(self.sizes.of(key)) for part in rule.parts)
        if (norm := recognise(self.modules[name], width)) is None:
            raise PlanError(
                f"{self.where} shards {name!r} as a norm, but a {type(self.modules[name]).__name__} computes something "
                "else than RMS or layer norm"
            )
        return norm

    def _owned(self, degree: int, key: str) -> list[Owned]:
        """Each rank's units of every axis."""
        sizes = {name: size for name, size in self.sizes.of(key).items() if name in self.plan.axes}
        return owned(self.plan.axes, sizes, degree)

    def _even(self) -> list[int]:
        """The degrees that divide every axis."""
        common = math.gcd(*(size for name, size in self.units().items() if not self.plan.axes[name].within))
        return [degree for degree in range(1, common + 1) if common % degree == 0]

    def _ranges(
        self, parts: Sequence[str | int], total: int, key: str, degree: int
    ) -> tuple[tuple[Ranges, ...], tuple[Ranges, ...]]:
        """Each rank's indices, and where zeros lie between them."""
        if isinstance(parts[0], int):
            blocks = [total // sum(int(part) for part in parts) * int(part) for part in parts]
            return share([(block, split(block, degree), 1) for block in blocks]), ()
        formula = Formula.parse(" + ".join(map(str, parts)))
        formula, sizes = self.sizes.widen(formula), self.sizes.of(key)
        everyone = self._owned(degree, key)
        if not self.padded or all(_even(everyone, name) for name in formula.names() if name in everyone[0]):
            return tuple(formula.ranges(sizes, own) for own in everyone), ()
        largest = _largest(everyone)
        both = [formula.padded(sizes, own, largest) for own in everyone]
        return tuple(ranges for ranges, _ in both), tuple(zeros for _, zeros in both)

    def _attributes(self, degree: int) -> dict[tuple[str, str], tuple[int, ...]]:
        local: dict[tuple[str, str], tuple[int, ...]] = {}
        for match, attribute, text, value in self.counted:
            formula = Formula.parse(text)
            sizes = self.sizes.of(match.key)
            if any(name not in sizes for name in formula.names()):
                raise PlanError(
                    f"{self.where}: attribute {match.name}.{attribute} counts axis {text!r}, which no module "
                    "is cut along"
                )
            if value != formula.size(sizes):
                formula = self.sizes.widen(formula)
            if value != formula.size(sizes):
                raise PlanError(
                    f"{self.where}: {match.name}.{attribute} is {value!r}, but {text!r} has {sizes.get(text)} units"
                    f" ({formula.size(sizes)} elements)"
                )
            everyone = self._owned(degree, match.key)
            local[match.name, attribute] = tuple(
                formula.size({**sizes, **(_largest(everyone) if self.padded else _counts(own))}) for own in everyone
            )
        return local

    def _inputs(self, degree: int) -> dict[str, tuple[InputCut, ...]]:
        cuts: dict[str, list[InputCut]] = {}
        for pattern, entries in self.plan.inputs.items():
            for match in matches(pattern, list(self.modules)):
                for path, own in entries.items():
                    for cut in own:
                        formula = self.sizes.widen(Formula.parse(" + ".join(map(str, cut.parts))))
                        whole = formula.size(self.sizes.of(match.key))
                        ranges, zeros = self._ranges(cut.parts, whole, match.key, degree)
                        entry = InputCut(tuple(path.split(".")), cut.dim, whole, ranges, zeros)
                        cuts.setdefault(match.name, []).append(entry)
        return {name: tuple(own) for name, own in cuts.items()}


def _counts(own: Owned) -> dict[str, int]:
    return {name: stop - start for name, (start, stop) in own.items()}


def _largest(everyone: Sequence[Owned]) -> dict[str, int]:
    """The most units of every axis that any rank has."""
    return {name: max(_counts(own)[name] for own in everyone) for name in everyone[0]}


def _even(everyone: Sequence[Owned], name: str) -> bool:
    return len({_counts(own)[name] for own in everyone}) == 1


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor the model's modules hold: parameters, buffers and plain attributes."""
    found: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                found[f"{path}.{name}" if path else name] = value
    return found


def _tied(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) in first:
            tied[name], tied[first[id(param)]] = first[id(param)], name
        else:
            first[id(param)] = name
    return tied
