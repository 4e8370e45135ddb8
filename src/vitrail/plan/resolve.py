"""What a plan comes to on one model and degree: a shard for every tensor it touches, checked before any is cut."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence

from torch import nn

from ..errors import PlanError
from ..layout import Formula, Ranges, Shard, share, split
from .document import Plan, Rule
from .matching import Matching
from .norms import Norm, recognise
from .owned import Owned, beyond, lacking, most, owned, pairs, possible
from .resolved import InputCut, ResolvedPlan
from .sizes import Equation, Sizes, matches


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


class _Resolution(Matching):
    """A plan on one model: the sizes of its axes, and what a rank has at a degree."""

    def __init__(self, plan: Plan, model: nn.Module, pad: bool = False) -> None:
        super().__init__(plan, model)
        self.padded = pad
        self.sizes = Sizes(plan, model, list(self._equations()))

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
            zeros = tuple(((stop - start, chunk),) if stop - start < chunk else () for start, stop in cuts)
            padded = self.padded and any(zeros)
            shards[name] = Shard(shape, dim, share([(shape[dim], cuts, 1)]), zeros if padded else ())
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

    def _check_argument(self, module: str, name: str) -> None:
        try:
            parameters = inspect.signature(type(self.modules[module]).forward).parameters
        except (TypeError, ValueError):  # a forward that is no Python function
            return
        kinds = {parameter.kind for parameter in parameters.values()}
        if name in parameters or name.isdecimal() or kinds & {inspect.Parameter.VAR_KEYWORD}:
            return
        raise PlanError(
            f"{self.where} cuts the input {name!r} of {module!r}, which its forward does not take; it takes "
            f"{', '.join(list(parameters)[1:]) or 'nothing'}"
        )

    def _inputs(self, degree: int) -> dict[str, tuple[InputCut, ...]]:
        cuts: dict[str, list[InputCut]] = {}
        for pattern, entries in self.plan.inputs.items():
            found = matches(pattern, list(self.modules))
            if not found:
                raise PlanError(
                    f"{self.where} cuts inputs of module {pattern!r}, which {type(self.model).__name__} does not have"
                )
            for match in found:
                for path, own in entries.items():
                    self._check_argument(match.name, path.split(".")[0])
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
