"""Half-open index ranges along one dimension."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

Range: TypeAlias = tuple[int, int]
Ranges: TypeAlias = tuple[Range, ...]


def normalise(ranges: Iterable[Range]) -> Ranges:
    """The canonical form: ascending, disjoint, none empty, neighbours merged.

    Raises ``ValueError`` for a range that runs backwards, starts below 0, or overlaps or precedes the one before it:
    the order of a shard's elements is the order of the whole, so ranges out of order would be a permutation.
    """
    merged: list[Range] = []
    for start, stop in ranges:
        if start < 0 or stop < start:
            raise ValueError(f"range {start}:{stop} is not a range")
        if start == stop:
            continue
        if merged and start < merged[-1][1]:
            raise ValueError(f"range {start}:{stop} overlaps or precedes {merged[-1][0]}:{merged[-1][1]}")
        if merged and start == merged[-1][1]:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def split(size: int, degree: int) -> tuple[Range, ...]:
    """``size`` indices over ``degree`` ranks, as even as can be, the larger shares first: 38 on 4 is 10, 10, 9, 9."""
    if degree < 1 or size < 0:
        raise ValueError(f"cannot split {size} over {degree} ranks")
    small, larger = divmod(size, degree)
    starts = [rank * small + min(rank, larger) for rank in range(degree + 1)]
    return tuple((starts[rank], starts[rank + 1]) for rank in range(degree))


def share(parts: Sequence[tuple[int, Sequence[Range], int]]) -> tuple[Ranges, ...]:
    """The ranges every rank owns of a dimension made of consecutive parts.

    Each part is ``(size, units, width)``: it spans ``size`` elements, and rank *r* owns its units ``units[r]``, each
    ``width`` elements wide. A fused ``q ‖ k ‖ v`` projection of 8 heads of 24 is three parts
    ``(192, split(8, degree), 24)``. Ranges of neighbouring parts merge.
    """
    degrees = {len(units) for _, units, _ in parts}
    if len(degrees) != 1:
        raise ValueError(f"parts are split over different numbers of ranks: {sorted(degrees)}")
    owned: list[list[Range]] = [[] for _ in range(degrees.pop())]
    offset = 0
    for size, units, width in parts:
        for rank, (start, stop) in enumerate(units):
            if stop * width > size:
                raise ValueError(f"units {start}:{stop} of width {width} exceed a part of {size}")
            owned[rank].append((offset + start * width, offset + stop * width))
        offset += size
    return tuple(normalise(ranges) for ranges in owned)
