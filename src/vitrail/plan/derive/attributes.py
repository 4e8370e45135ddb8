"""Which integers of a model count something that is sharded, and what they become on a rank."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .axes import Axis, factors, find, leaves, local_size, multiply, terms
from .choose import Choice, touches
from .numbers import COMPARISONS, Attribute, Operation, Origin, Size, attributes_in, evaluate, sizes_in
from .record import Meeting, Recorder


@dataclass(frozen=True)
class Refusal:
    """Why the leaves cannot be sharded: the forward depends on a number that cannot be made right."""

    leaves: tuple[Axis, ...]
    why: str


def solve(recorder: Recorder, choice: Choice) -> tuple[dict[Attribute, Axis], list[Refusal]]:
    """For each attribute to rescale, the axis whose local length it becomes; and what cannot be sharded for it."""
    refusals: list[Refusal] = []
    chosen = choice.sharded
    # Two local lengths for each leaf, so that agreement is not by chance.
    trials = [{leaf: leaf.size // 2 + 1 for leaf in chosen}, {leaf: max(1, leaf.size // 3) for leaf in chosen}]
    trials = [
        trials[0],
        {leaf: size if size != trials[0][leaf] else max(1, size - 1) for leaf, size in trials[1].items()},
    ]
    meetings = [meeting for meeting in recorder.meetings if not meeting.call.startswith("?")]
    near = _near(recorder, chosen)
    loose = [meeting for meeting in recorder.meetings if meeting.call.startswith("?")]
    found: dict[Attribute, Axis] = {}
    pinned = {
        meeting.number
        for meeting in meetings
        if isinstance(meeting.number, Attribute) and not touches(meeting.axis, chosen)
    }

    def here(origin: Origin, own: dict[Axis, int]) -> int:
        def value(name: Attribute) -> int:
            return local_size(found[name], own) if name in found else recorder.attributes[name]

        return evaluate(origin, value, lambda size: local_size(size, own))

    def holds(origin: Origin, axis: Axis) -> bool:
        try:
            return all(here(origin, own) == local_size(axis, own) for own in trials)
        except ZeroDivisionError:
            return False

    for meeting in meetings:
        origin = meeting.number
        if isinstance(origin, Attribute) and touches(meeting.axis, chosen) and not holds(origin, meeting.axis):
            if origin in pinned or origin in found:
                other = "something whole" if origin in pinned else "another axis"
                refusals.append(_refusal(meeting, chosen, f"{origin} counts it, and also {other}"))
            else:
                found[origin] = meeting.axis
    for meeting in (*meetings, *loose):
        concerned = any(touches(axis, chosen) for axis in (meeting.axis, *sizes_in(meeting.number)))
        if not concerned and not any(name in found for name in attributes_in(meeting.number)):
            continue
        if holds(meeting.number, meeting.axis):
            continue
        is_loose = meeting.call.startswith("?")
        free = [
            name for name in dict.fromkeys(attributes_in(meeting.number)) if name not in found and name not in pinned
        ]
        if is_loose and not isinstance(meeting.number, Attribute):
            free = []
        holds_now = functools.partial(holds, meeting.number, meeting.axis)
        if not _repair(meeting, free, found, recorder, chosen, near, holds_now) and not is_loose:
            refusals.append(_refusal(meeting, chosen, _describe(meeting), found))
    single = dict.fromkeys(chosen, 1)
    for where, symbol, left, right in recorder.comparisons:
        if not isinstance(right, int):  # two lengths of the model: they follow each other, or the values will tell
            continue
        depends = [leaf for origin in (left, right) for leaf in _leaves_of(origin, found, chosen)]
        if not depends:
            continue
        whole = COMPARISONS[symbol](_whole(left, recorder), _whole(right, recorder))
        everything = [*trials, single]
        without = [{leaf: size for leaf, size in own.items() if leaf not in choice.within} for own in everything]
        if any(COMPARISONS[symbol](here(left, own), here(right, own)) != whole for own in without):
            concerned_leaves = tuple(depends)
        # Whether a key head has one query head is a shortcut; both cases are among the values that are compared.
        elif right != 1 and any(COMPARISONS[symbol](here(left, own), here(right, own)) != whole for own in everything):
            concerned_leaves = tuple(leaf for leaf in depends if leaf in choice.within)
        else:
            continue
        why = f"{_name(left)} {symbol} {_name(right)} in {where or 'the forward'} may be another on a rank"
        refusals.append(Refusal(concerned_leaves, why))
    for where, origin in recorder.escapes:
        for own in trials:
            if here(origin, own) != _whole(origin, recorder):
                touched = _leaves_of(origin, found, chosen)
                why = f"a number computed from {_name(origin)} in {where or 'the forward'} would be another on a rank"
                refusals.append(Refusal(tuple(leaf for leaf in touched if leaf in chosen), why))
                break
    return found, refusals


def _whole(origin: Origin, recorder: Recorder) -> int:
    """What an origin comes to in the whole model."""
    return evaluate(origin, lambda name: recorder.attributes[name], lambda size: find(size).size)


def _leaves_of(origin: Origin, found: Mapping[Attribute, Axis], chosen: set[Axis]) -> list[Axis]:
    """The sharded leaves that an origin depends on."""
    touched = [leaf for axis in sizes_in(origin) for leaf in leaves(axis) if leaf in chosen]
    return touched + [leaf for name in attributes_in(origin) if name in found for leaf in leaves(found[name])]


def _repair(
    meeting: Meeting,
    free: list[Attribute],
    found: dict[Attribute, Axis],
    recorder: Recorder,
    chosen: set[Axis],
    near: Mapping[str, list[Axis]],
    holds: Callable[[], bool],
) -> bool:
    """Rescale as few of the attributes in what met as make it hold: one, or several that change together."""
    options = {name: _related(meeting, recorder.attributes[name], chosen, near) for name in free}
    names = [name for name in free if options[name]]
    for count in range(1, min(len(names), 4) + 1):
        for subset in itertools.combinations(names, count):
            for axes in itertools.islice(itertools.product(*(options[name] for name in subset)), 32):
                found.update(zip(subset, axes, strict=True))
                if holds():
                    return True
                for name in subset:
                    del found[name]
    return False


def _near(recorder: Recorder, chosen: set[Axis]) -> dict[str, list[Axis]]:
    """The sharded axes of the weights in and below each module: what its integers may count."""
    near: dict[str, list[Axis]] = defaultdict(list)
    for name, source in recorder.sources.items():
        own = [axis for axis in source.axes if touches(axis, chosen)]
        path = name.rpartition(".")[0]
        while own and path:
            near[path] += own
            path = path.rpartition(".")[0]
    return near


def _related(meeting: Meeting, size: int, chosen: set[Axis], near: Mapping[str, list[Axis]]) -> list[Axis]:
    """The axes of ``size`` elements among the parts of what met, and of the module's weights."""
    candidates = [meeting.axis]
    for axis in (meeting.axis, *sizes_in(meeting.number), *near.get(meeting.module, ())):
        candidates += [axis, *terms(axis)]
        for term in terms(axis):
            candidates += factors(term)
            candidates += _runs(factors(term), size)
            for factor in factors(term):
                candidates += [part for inner in terms(factor) for part in (inner, *factors(inner))]
    unique = {find(axis): None for axis in candidates}
    return [axis for axis in unique if axis.size == size and touches(axis, chosen)]


def _runs(parts: list[Axis], size: int) -> list[Axis]:
    """Products of ``size`` of neighbouring factors: key heads and the query heads of each."""
    runs = (parts[first:last] for first in range(len(parts)) for last in range(first + 2, len(parts) + (first > 0)))
    return [multiply(run) for run in runs if math.prod(find(part).size for part in run) == size]


def _refusal(meeting: Meeting, chosen: set[Axis], why: str, found: Mapping[Attribute, Axis] | None = None) -> Refusal:
    axes = [meeting.axis, *sizes_in(meeting.number)]
    axes += [found[name] for name in attributes_in(meeting.number) if found and name in found]
    touched = [leaf for axis in axes for leaf in leaves(axis) if leaf in chosen]
    return Refusal(tuple(touched), why)


def _describe(meeting: Meeting) -> str:
    return (
        f"{meeting.call} in {meeting.module or 'the forward'} asks for {_name(meeting.number)}, which cannot follow it"
    )


def _name(origin: Origin) -> str:
    if isinstance(origin, Attribute):
        return str(origin)
    if isinstance(origin, Size):
        return "a tensor's length"
    if isinstance(origin, Operation):
        return f"({_name(origin.left)} {origin.symbol} {_name(origin.right)})"
    return f"the constant {origin}"
