"""Writing what was chosen as a plan: names instead of numbers, one rule for all blocks that are alike."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from torch import nn

from ...layout import Formula, join
from ..document import WORTH, Cut, Held, Plan, Rule, Style
from ..document import Axis as PlanAxis
from .axes import Axis, factors, find, leaves, terms
from .choose import Choice, is_exact, touches
from .numbers import Attribute
from .record import Recorder

_GENERIC = {"linear", "proj", "net", "weight", "bias", "linear_1", "linear_2", "fc1", "fc2", "w", "w1", "w2", "w3", "*"}


class Patterns:
    """Names with ``*`` for the elements of lists whose elements are alike."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.lists = {
            name
            for name, module in modules.items()
            if isinstance(module, (nn.ModuleList, nn.ModuleDict))
            and len({type(child) for child in module.children()}) == 1
        }
        self.literal: set[str] = set()

    def of(self, name: str) -> str:
        parts, result = name.split("."), []
        for index, part in enumerate(parts):
            result.append("*" if ".".join(parts[:index]) in self.lists and index else part)
        pattern = ".".join(result)
        return name if pattern in self.literal or name in self.literal else pattern


class _Names:
    """What the sharded leaves and the whole factors are called."""

    def __init__(self, recorder: Recorder, choice: Choice, patterns: Patterns) -> None:
        self.recorder, self.choice, self.patterns = recorder, choice, patterns
        self.chosen = choice.sharded
        self.axis_of: dict[Axis, str] = {}
        self.members: dict[str, list[Axis]] = {}
        self.what: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self.widths = self._widths()
        ratios = dict.fromkeys(
            find(event.heads).size // find(event.shared).size
            for event in recorder.attention
            if find(event.shared).size < find(event.heads).size
            and not any(leaf in choice.within for leaf in leaves(event.heads))
        )
        self.groups = {size: "group" + (f"_{index + 1}" if index else "") for index, size in enumerate(ratios)}
        self._name_axes()

    def _widths(self) -> dict[int, str]:
        widths: dict[int, str] = {}
        for event in self.recorder.attention:
            if touches(event.heads, self.chosen) and event.width not in widths:
                widths[event.width] = "head_dim" if not widths else f"head_dim_{len(widths) + 1}"
        return widths

    def _name_axes(self) -> None:
        """Leaves at the same place of tensors with the same pattern are one axis."""
        places: dict[tuple[str, int, int], list[Axis]] = defaultdict(list)
        for name, dim in self.choice.dims.items():
            own = [leaf for leaf in leaves(self.recorder.sources[name].axes[dim]) if leaf in self.chosen]
            for position, leaf in enumerate(own):
                places[self.patterns.of(name), dim, position].append(leaf)
        parent: dict[Axis, Axis] = {leaf: leaf for leaf in self.chosen}

        def root(leaf: Axis) -> Axis:
            while parent[leaf] is not leaf:
                leaf = parent[leaf]
            return leaf

        for members in places.values():
            for other in members[1:]:
                parent[root(other)] = root(members[0])
        classes: dict[Axis, list[Axis]] = defaultdict(list)
        for leaf in self.chosen:
            classes[root(leaf)].append(leaf)
        first: dict[Axis, tuple[int, int]] = {}
        for index, name in enumerate(self.recorder.sources):
            if name in self.choice.dims:
                for position, leaf in enumerate(leaves(self.recorder.sources[name].axes[self.choice.dims[name]])):
                    first.setdefault(leaf, (index, position))
        order = sorted(classes.values(), key=lambda members: min(first[leaf] for leaf in members))
        for members in order:
            name = self._unique(self._describe(members))
            self.members[name] = members
            for leaf in members:
                self.axis_of[leaf] = name
            sizes = {leaf.size for leaf in members}
            if len(sizes) == 1:
                self.sizes[name] = sizes.pop()

    def _describe(self, members: list[Axis]) -> tuple[str, str]:
        own = set(members)
        within, outer = set(self.choice.within), set(self.choice.within.values())
        for event in self.recorder.attention:
            shared = own & set(leaves(event.shared))
            if own & within and own & set(leaves(event.heads)):
                return "group", "query heads that share a head of keys"
            if shared:
                grouped = find(event.shared).size < find(event.heads).size or own & outer
                return ("kv_heads", "heads of keys and values") if grouped else ("heads", "attention heads")
            if own & set(leaves(event.heads)):
                return "heads", "attention heads that share a key head"
        names = [
            name
            for name, source in self.recorder.sources.items()
            if name in self.choice.dims and own & set(leaves(source.axes[self.choice.dims[name]]))
        ]
        pattern = self.patterns.of(names[0])
        block, _, inside = pattern.rpartition("*.")
        parts = [part for part in inside.split(".") if part not in _GENERIC and not part.isdecimal()]
        parts = [part for part in parts if "attn" not in part] or parts or block.split(".")
        label = re.sub(r"\W", "_", (parts[0] if block else parts[-1]) or "columns")
        return label, f"columns of {pattern.rpartition('.')[0]}"

    def _unique(self, wanted: tuple[str, str]) -> str:
        name, what = wanted
        candidate, count = name, 1
        while candidate in {*self.what, *self.widths.values(), *self.groups.values()}:
            count += 1
            candidate = f"{name}_{count}"
        self.what[candidate] = what
        return candidate

    def outer(self, name: str) -> str:
        """The axis that another is within, if it is."""
        return next(
            (self.axis_of[self.choice.within[leaf]] for leaf in self.members[name] if leaf in self.choice.within), ""
        )

    def formula(self, axis: Axis) -> Formula:
        """The axis in names. What is whole becomes as few factors and terms as can be."""
        axis = find(axis)
        if not touches(axis, self.chosen):
            return self._whole(axis.size)
        if axis.kind is None:
            return Formula("name", self.axis_of[axis])
        if axis.kind == "prod":
            parts: list[Formula] = []
            pending = 1
            for factor in factors(axis):
                if touches(factor, self.chosen):
                    if pending > 1:
                        parts.append(self._whole(pending))
                    pending = 1
                    parts.append(self.formula(factor))
                else:
                    pending *= find(factor).size
            if pending > 1:
                parts.append(self._whole(pending))
            return join("prod", parts)
        sums: list[Formula] = []
        pending = 0
        for term in terms(axis):
            if touches(term, self.chosen):
                if pending:
                    sums.append(self._whole(pending))
                pending = 0
                sums.append(self.formula(term))
            else:
                pending += find(term).size
        if pending:
            sums.append(self._whole(pending))
        return join("cat", sums)

    def _whole(self, size: int) -> Formula:
        if size in self.widths:
            return Formula("name", self.widths[size])
        for width, name in self.widths.items():
            if size % width == 0:
                return join("prod", [self._count(size // width), Formula("name", name)])
        return self._count(size)

    def _count(self, count: int) -> Formula:
        if count in self.groups:
            return Formula("name", self.groups[count])
        return Formula("number", number=count)


def write(
    recorder: Recorder, choice: Choice, attributes: Mapping[Attribute, Axis], source: str = "derived"
) -> tuple[Plan, dict[str, tuple[Axis, ...]]]:
    """The plan for ``recorder.model``'s class. Names that are alike but sharded unlike get rules of their own.

    Also gives the leaves of each axis.
    """
    patterns = Patterns(recorder.modules)
    model = recorder.model
    _separate(recorder, choice, patterns)
    names = _Names(recorder, choice, patterns)
    rules: dict[str, Rule] = {}
    tensors: dict[str, Cut] = {}

    def add(pattern: str, rule: Rule) -> None:
        rules.setdefault(pattern, rule)

    by_module: dict[str, list[str]] = defaultdict(list)
    for name in recorder.sources:
        if name in choice.dims:
            by_module[name.rpartition(".")[0]].append(name)
    for path, module in recorder.modules.items():
        pattern = patterns.of(path)
        if path in choice.norms:
            axes = recorder.norm_inputs[path]
            add(pattern, Rule(pattern, "norm", _parts(names.formula(axes[-1]))))
            continue
        weight = f"{path}.weight"
        if weight in choice.dims and is_exact(module):
            dim = choice.dims[weight]
            style: Style = "rowwise" if dim == 1 else "depthwise" if path in recorder.depthwise_modules else "colwise"
            add(pattern, Rule(pattern, style, _parts(names.formula(recorder.sources[weight].axes[dim]))))
            continue
        if path in choice.gathered:
            number = choice.together.get(path)
            together = "" if number is None else "common input" + (f" {number + 1}" if number else "")
            add(
                pattern, Rule(pattern, "gathered", above=WORTH, together=together, why=_refusal(recorder, choice, path))
            )
        if path in choice.vocab:
            add(pattern, Rule(pattern, "vocab", above=WORTH))
        for name in by_module[path]:
            dim = choice.dims[name]
            parts = _parts(names.formula(recorder.sources[name].axes[dim]))
            tensors.setdefault(patterns.of(name), Cut(dim, parts, name in choice.bare))
    inputs: dict[str, dict[str, tuple[Cut, ...]]] = defaultdict(dict)
    own_inputs: dict[str, dict[str, tuple[Cut, ...]]] = defaultdict(dict)
    for crossing in choice.cuts:
        own_inputs[crossing.module][".".join(map(str, crossing.path))] = tuple(
            Cut(dim, _parts(_repeatable(names.formula(inner))))
            for dim, (outer, inner) in enumerate(zip(crossing.outer, crossing.inner, strict=True))
            if touches(inner, names.chosen) and not touches(outer, names.chosen)
        )
    for pattern, entries in _alike(own_inputs, patterns, lambda path: path in recorder.ran, recorder.modules).items():
        inputs[pattern] = entries
    own_counts: dict[str, dict[str, str]] = defaultdict(dict)
    for attribute, axis in attributes.items():
        index = "" if attribute.index is None else f"[{attribute.index}]"
        own_counts[attribute.module][attribute.name + index] = str(names.formula(axis))
    counted = {
        f"{pattern}.{attribute}" if pattern else attribute: text
        for pattern, texts in _alike(own_counts, patterns, lambda _: True, recorder.modules).items()
        for attribute, text in texts.items()
    }
    untraced = [
        path
        for path, module in recorder.modules.items()
        if path not in recorder.ran
        and any(True for _ in module.parameters(recurse=False))
        and not any(f"{path}.{name}" in recorder.users for name, _ in module.named_parameters(recurse=False))
    ]
    dims = {name: size for size, name in names.widths.items()}
    mentioned = {name for part in _all_parts(rules.values(), tensors.values()) for name in Formula.parse(part).names()}
    mentioned |= {name for text in counted.values() for name in Formula.parse(text).names()}
    dims |= {name: size for size, name in names.groups.items() if name in mentioned}
    members: dict[str, tuple[Axis, ...]] = {}
    for leaf, name in names.axis_of.items():
        members[name] = (*members.get(name, ()), leaf)
    plan = Plan(
        model=type(model).__name__,
        axes={
            name: PlanAxis(size=names.sizes.get(name), within=names.outer(name), what=what)
            for name, what in names.what.items()
        },
        dims=dims,
        rules=tuple(rules.values()),
        tensors=tensors,
        inputs=dict(inputs),
        attributes=counted,
        held={
            pattern: Held(dim, WORTH) for name, dim in choice.held.items() if (pattern := patterns.of(name)) is not None
        },
        whole=_whole_reasons(recorder, choice, patterns),
        untraced=tuple(dict.fromkeys(patterns.of(path) for path in untraced)),
        source=source,
    )
    return plan, members


T = TypeVar("T")


def _alike(
    entries: Mapping[str, dict[str, T]],
    patterns: Patterns,
    counts: Callable[[str], bool],
    modules: Mapping[str, nn.Module],
) -> dict[str, dict[str, T]]:
    """Entries by pattern where every module of the pattern (that ``counts``) has the same, else by module."""
    members: dict[str, list[str]] = defaultdict(list)
    for path in modules:
        if counts(path):
            members[patterns.of(path)].append(path)
    result: dict[str, dict[str, T]] = {}
    for path, entry in entries.items():
        pattern = patterns.of(path)
        alike = all(entries.get(other) == entry for other in members[pattern])
        result[pattern if alike else path] = entry
    return result


def _parts(formula: Formula) -> tuple[str | int, ...]:
    return tuple(str(term) for term in formula.terms())


def _repeatable(formula: Formula) -> Formula:
    """An input's dimension without a leading whole factor, which may be the batch: it is repeated at run time."""
    if formula.kind == "prod" and formula.parts[0].kind == "number":
        return join("prod", formula.parts[1:])
    return formula


def _all_parts(rules: Iterable[Rule], tensors: Iterable[Cut]) -> list[str]:
    parts = [part for rule in rules for part in rule.parts] + [part for cut in tensors for part in cut.parts]
    return [str(part) for part in parts]


def _structure(axis: Axis, chosen: set[Axis]) -> object:
    """The shape of an axis' expression, with the sizes of what is whole; those of what is sharded may differ."""
    axis = find(axis)
    if not touches(axis, chosen):
        return axis.size
    if axis.kind is None:
        return "axis"
    flat = (factors if axis.kind == "prod" else terms)(axis)
    merged: list[object] = []
    for part in flat:
        item = _structure(part, chosen)
        if isinstance(item, int) and merged and isinstance(merged[-1], int):
            merged[-1] = merged[-1] * item if axis.kind == "prod" else merged[-1] + item
            continue
        merged.append(item)
    return (axis.kind, *merged)


def _separate(recorder: Recorder, choice: Choice, patterns: Patterns) -> None:
    """Where modules of one pattern are not sharded alike, they get rules by their own names."""
    chosen = choice.sharded
    kinds: dict[str, set[object]] = defaultdict(set)
    for name in recorder.sources:
        path = name.rpartition(".")[0]
        dim = choice.dims.get(name)
        kind: object = "norm" if path in choice.norms else "whole"
        if name in choice.held:
            kind = "held"
        elif path in choice.gathered:
            kind = ("gathered", choice.together.get(path))
        elif path in choice.vocab:
            kind = "vocab"
        if dim is not None:
            kind = (dim, kind, name in choice.bare, _structure(recorder.sources[name].axes[dim], chosen))
        kinds[patterns.of(name)].add(kind)
    unlike = {pattern for pattern, found in kinds.items() if len(found) > 1}
    for pattern in unlike:
        patterns.literal |= {pattern, pattern.rpartition(".")[0]}
    unlike_modules = {pattern.rpartition(".")[0] for pattern in unlike}
    for name in recorder.sources:
        if patterns.of(name).rpartition(".")[0] in unlike_modules:
            patterns.literal.add(patterns.of(name))


def _refusal(recorder: Recorder, choice: Choice, path: str) -> str:
    """Why units that a module makes or takes, such as heads, are not sharded though shapes alone would allow it."""
    weight = recorder.sources.get(f"{path}.weight")
    found = []
    contracted = {leaf for contraction in recorder.contractions for leaf in leaves(contraction.axis)}
    for term in (term for axis in (weight.axes if weight else ()) for term in terms(axis)):
        units = {leaf for factor in factors(term)[:-1] for leaf in leaves(factor)} & contracted
        for leaf in leaves(term):
            found.append(choice.refused.get(leaf) or (choice.reasons.get(leaf) if leaf in units else None))
    return "; ".join(dict.fromkeys(why for why in found if why))


def _whole_reasons(recorder: Recorder, choice: Choice, patterns: Patterns) -> dict[str, str]:
    """Why each weight of two or more dimensions that is not sharded is whole."""
    whole: dict[str, str] = {}
    for name, source in recorder.sources.items():
        if source.kind != "parameter" or source.tensor.dim() < 2 or name in choice.dims:
            continue
        if name.rpartition(".")[0] in {*choice.gathered, *choice.vocab} or name in choice.held:
            continue
        reasons = [choice.reasons[leaf] for axis in source.axes for leaf in leaves(axis) if choice.reasons.get(leaf)]
        why = "; ".join(dict.fromkeys(reasons)) or "nothing contracts what it makes"
        whole.setdefault(patterns.of(name), why)
    return whole
