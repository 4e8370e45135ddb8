"""The sizes of a plan's axes on one model: declared, counted by its attributes, or left no choice by its weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import PlanError
from ..layout import Formula, join
from .configuration import configuration
from .document import Plan


@dataclass(frozen=True)
class Match:
    """A name in a model that a pattern of the plan matches; ``key`` is what its first ``*`` stands for."""

    name: str
    key: str


@dataclass(frozen=True)
class Equation:
    """``formula`` comes to ``total`` in ``seen_in``."""

    formula: Formula
    total: int
    seen_in: str
    key: str


def expand(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that ``pattern`` matches: ``*`` stands for one component."""
    return [match.name for match in matches(pattern, names)]


def matches(pattern: str, names: Sequence[str]) -> list[Match]:
    if "*" not in pattern:
        return [Match(pattern, "")] if pattern in names else []
    expression = re.compile(re.escape(pattern).replace(r"\*", r"([^.]+)"))
    found = ((name, expression.fullmatch(name)) for name in names)
    return [Match(name, match.group(1)) for name, match in found if match]


class Sizes:
    """What every name in the plan's formulas stands for, in the blocks that a pattern's ``*`` counts."""

    def __init__(self, plan: Plan, model: nn.Module, equations: Sequence[Equation]) -> None:
        self.plan, self.model = plan, model
        self.where = f"the plan for {plan.model} ({plan.source})"
        self._scoped = _scoped_names(plan)
        self._known: dict[tuple[str, str], int] = {}
        self._seen: dict[tuple[str, str], str] = {}
        keys = sorted({equation.key for equation in equations} | {""})
        for name, axis in plan.axes.items():
            if axis.size is not None:
                self._declare(name, axis.size, keys, f"axis {name!r}")
            if axis.width is not None and not isinstance(axis.width, int):
                self._declare(f"{name} width", axis.width, keys, f"the width of axis {name!r}")
        for name, size in plan.dims.items():
            if size is not None:
                self._declare(name, size, keys, f"dim {name!r}")
        self._solve(equations)

    def _at(self, name: str, key: str) -> tuple[str, str]:
        return name, key if name in self._scoped else ""

    def of(self, key: str) -> Mapping[str, int]:
        """The sizes by name, as formulas of a match with this key need them."""
        return {name: size for (name, own), size in self._known.items() if own == (key if name in self._scoped else "")}

    def values(self, name: str) -> dict[str, int]:
        """The sizes of one name, by block."""
        return {key: size for (other, key), size in self._known.items() if other == name}

    def part(self, text: str) -> Formula:
        """A part as a formula, in which axes with a width are written out."""
        return self.widen(Formula.parse(text))

    def widen(self, formula: Formula) -> Formula:
        if formula.kind == "name" and (axis := self.plan.axes.get(formula.name)) is not None:
            if axis.width is None:
                return formula
            width = (
                Formula.parse(axis.width) if isinstance(axis.width, int) else Formula("name", f"{formula.name} width")
            )
            return formula if width == Formula.parse(1) else join("prod", [formula, width])
        if formula.parts:
            assert formula.kind in ("cat", "prod")
            return join(formula.kind, [self.widen(part) for part in formula.parts])
        return formula

    def _declare(self, name: str, value: int | str, keys: Sequence[str], what: str) -> None:
        for key in keys if name in self._scoped else [""]:
            number = value if isinstance(value, int) else self._read(value, key, what)
            if number is not None:
                self._known[self._at(name, key)] = number
                self._seen[self._at(name, key)] = "its declaration"

    def _read(self, text: str, key: str, what: str) -> int | None:
        """A key of the configuration (``part:key`` for a part's own), or an attribute of a module.

        Of the modules that a pattern matches, the first that has the attribute serves.
        """
        value: Any = None
        owner, colon, text = text.rpartition(":")
        if "." in text:
            pattern, _, attribute = text.rpartition(".")
            if key and "*" in pattern:
                pattern = pattern.replace("*", key, 1)
            for match in matches(pattern, [name for name, _ in self.model.named_modules()]):
                value = getattr(self.model.get_submodule(match.name), attribute, None)
                if value is not None:
                    break
            if value is None:
                return None
        else:
            value = configuration(self.model.get_submodule(owner) if colon else self.model).get(text)
        if isinstance(value, bool) or not isinstance(value, int):
            raise PlanError(
                f"{self.where}: {what} is sized by {text!r}, which {type(self.model).__name__}'s configuration "
                f"gives as {value!r}; an integer is needed"
            )
        return value

    def _solve(self, equations: Sequence[Equation]) -> None:
        pending = list(equations)
        while pending:
            waiting = []
            for equation in pending:
                unknown = {name for name in equation.formula.names() if self._at(name, equation.key) not in self._known}
                if len(unknown) > 1:
                    waiting.append(equation)
                elif unknown:
                    self._work_out(equation, unknown.pop())
                else:
                    self._check(equation)
            if len(waiting) == len(pending):
                self._stuck(waiting[0])
            pending = waiting

    def _work_out(self, equation: Equation, name: str) -> None:
        known = self.of(equation.key)
        constant = equation.formula.size({**known, name: 0})
        slope = equation.formula.size({**known, name: 1}) - constant
        size, rest = divmod(equation.total - constant, slope)
        if rest or size < 1:
            raise PlanError(
                f"{self.where}: {equation.seen_in} is {equation.total}, which leaves no whole size for axis {name!r} "
                f"in {str(equation.formula)!r}"
            )
        self._known[self._at(name, equation.key)] = size
        self._seen[self._at(name, equation.key)] = equation.seen_in

    def _check(self, equation: Equation) -> None:
        known = self.of(equation.key)
        if (size := equation.formula.size(known)) != equation.total:
            names = list(dict.fromkeys(equation.formula.names()))
            sources = ", ".join(
                f"{name} = {known[name]} from {self._seen[self._at(name, equation.key)]}" for name in names
            )
            raise PlanError(
                f"{self.where}: {equation.seen_in} is {equation.total}, but {str(equation.formula)!r} comes to {size} "
                f"({sources})"
            )

    def _stuck(self, equation: Equation) -> None:
        raise PlanError(
            f"{self.where}: the parts of {equation.seen_in} have more than one axis of unknown size: "
            f"{str(equation.formula)!r}",
            hint="declare the sizes of all axes but one",
        )


def _scoped_names(plan: Plan) -> set[str]:
    """Names that only occur in the blocks of one list, where each block may have its own size."""
    prefixes: dict[str, set[str]] = {}

    def note(pattern: str, texts: Sequence[str | int]) -> None:
        prefix = pattern.partition("*")[0] if "*" in pattern else ""
        for text in texts:
            for name in Formula.parse(text).names():
                prefixes.setdefault(name, set()).add(prefix)
                prefixes.setdefault(f"{name} width", set()).add("")

    for rule in plan.rules:
        note(rule.module, rule.parts)
    for name, cut in plan.tensors.items():
        note(name, cut.parts)
    for module, entries in plan.inputs.items():
        for cuts in entries.values():
            for cut in cuts:
                note(module, cut.parts)
    for attribute, text in plan.attributes.items():
        note(attribute, (text,))
    return {name for name, found in prefixes.items() if len(found) == 1 and found != {""}}


def attribute_holders(module: nn.Module, name: str) -> Iterator[tuple[Any, str, int | None]]:
    """The object that holds a (dotted) attribute, its own name there, and the index into it, if there is one."""
    name, _, index = name.partition("[")
    holder: Any = module
    *path, last = name.split(".")
    for part in path:
        if not hasattr(holder, part):
            return
        holder = getattr(holder, part)
    if hasattr(holder, last):
        yield holder, last, int(index.rstrip("]")) if index else None


def split_attribute(
    pattern: str, modules: Mapping[str, nn.Module], found: Callable[[str], list[Match]]
) -> tuple[str, str]:
    """An attribute's pattern as the module's pattern and the attribute: the longest module there is."""
    parts = pattern.split(".")
    for count in range(len(parts) - 1, -1, -1):
        module = ".".join(parts[:count])
        if found(module) or (count == 0 and "" in modules):
            return module, ".".join(parts[count:])
    return ".".join(parts[:-1]), parts[-1]
