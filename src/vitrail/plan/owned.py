"""Which units of every axis a rank owns at a degree.

An axis is split as evenly as can be. One *within* another (the query heads that share a head of keys and values) is
whole as long as the other has units for every rank; where it has fewer, both are split, or the other one is replicated.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..layout import Range, split
from .document import Axis

Owned = dict[str, Range]


def pairs(axes: Mapping[str, Axis]) -> dict[str, str]:
    """The axes that have another within them, with its name."""
    return {axis.within: name for name, axis in axes.items() if axis.within}


def possible(axes: Mapping[str, Axis], sizes: Mapping[str, int], degree: int) -> bool:
    """Whether every rank gets a unit of what it computes with."""
    return not lacking(axes, sizes, degree)


def lacking(axes: Mapping[str, Axis], sizes: Mapping[str, int], degree: int) -> list[str]:
    """The axes that have too few units."""
    inner = pairs(axes)
    return [
        name
        for name, axis in axes.items()
        if name in sizes and not axis.within and _pair(sizes[name], sizes.get(inner.get(name, ""), 1), degree) is None
    ]


def most(axes: Mapping[str, Axis], sizes: Mapping[str, int]) -> int | None:
    """No degree above this is possible; None without axes."""
    inner = pairs(axes)
    limits = [
        size * sizes.get(inner.get(name, ""), 1)
        for name, size in sizes.items()
        if name in axes and not axes[name].within
    ]
    return min(limits, default=None)


def owned(axes: Mapping[str, Axis], sizes: Mapping[str, int], degree: int) -> list[Owned]:
    """Each rank's units of every axis that has a size."""
    inner = pairs(axes)
    ranks: list[Owned] = [{} for _ in range(degree)]
    for name, axis in axes.items():
        if name not in sizes or axis.within:
            continue
        minor = inner.get(name, "")
        pair = _pair(sizes[name], sizes.get(minor, 1), degree)
        assert pair is not None, "the degree was checked"
        for rank, (major_range, minor_range) in enumerate(pair):
            ranks[rank][name] = major_range
            if minor in sizes:
                ranks[rank][minor] = minor_range
    return ranks


def beyond(axes: Mapping[str, Axis], sizes: Mapping[str, int], limit: int = 12) -> list[int]:
    """A degree of every kind at which an axis within another is split, none above ``limit``."""
    found = set()
    for outer, inner in pairs(axes).items():
        units, parts = sizes.get(outer, 0), sizes.get(inner, 0)
        if not units or parts < 2:
            continue
        found |= {2 * units, units * parts, *([units + 1] if parts > units else ())}
    return sorted(degree for degree in found if degree <= limit and possible(axes, sizes, degree))


def _pair(units: int, parts: int, degree: int) -> list[tuple[Range, Range]] | None:
    """Each rank's range of ``units`` and of the ``parts`` of one unit; None if some rank would have nothing."""
    if units >= degree:
        return [(own, (0, parts)) for own in split(units, degree)]
    together, rest = divmod(degree, units)
    if rest == 0 and parts >= together:
        cuts = split(parts, together)
        return [((rank // together, rank // together + 1), cuts[rank % together]) for rank in range(degree)]
    if parts >= degree:
        return [((0, units), own) for own in split(parts, degree)]
    return None
