"""Which cores can form a group: the wiring of an instance, as rules about core numbers. Pure; data in `instances.json`.

Sources: field reports on trn1 (degrees) and on trn2.48xlarge, whose 16 chips are a 4 by 4 torus. A group over several
of its chips can be routed only if it takes the same cores of each chip, and the chips are an adjacent pair, a full row
or column, or a rectangle; edges wrap around. trn3 is switched, and exempt.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class Degrees:
    """Sizes a group may have: those listed, and the multiples of `multiple`."""

    sizes: tuple[int, ...]
    multiple: int

    def problem(self, size: int) -> str | None:
        """Why there can be no group of so many cores, or None."""
        if size in self.sizes or size % self.multiple == 0:
            return None
        listed = ", ".join(map(str, self.sizes))
        return f"a group has {listed} cores, or a multiple of {self.multiple}; this one has {size}"


@dataclass(frozen=True)
class Torus:
    """Chips wired as a grid whose edges wrap around, numbered row by row."""

    rows: int
    columns: int

    def problem(self, cores: Iterable[int], cores_per_chip: int) -> str | None:
        """Why these cores cannot be routed as a group, or None."""
        offsets: dict[int, set[int]] = defaultdict(set)
        for core in cores:
            offsets[core // cores_per_chip].add(core % cores_per_chip)
        if len(offsets) <= 1:
            return None
        first, *others = sorted(offsets)
        for chip in others:
            if offsets[chip] != offsets[first]:
                return (
                    f"it takes cores {_listed(offsets[first])} of chip {first} but {_listed(offsets[chip])} of chip "
                    f"{chip}; a group takes the same cores of each of its chips"
                )
        if self.is_routable(offsets):
            return None
        return (
            f"its chips {_listed(offsets)} are neither an adjacent pair, a full row or column, nor a rectangle of the "
            f"{self.rows} by {self.columns} torus"
        )

    def is_routable(self, chips: Collection[int]) -> bool:
        """Whether the chips are one, an adjacent pair, a full row or column, or a rectangle two or more chips wide."""
        places = {divmod(chip, self.columns) for chip in chips}
        rows, columns = {row for row, _ in places}, {column for _, column in places}
        if places != set(product(rows, columns)):
            return False
        if not (_is_stretch(rows, self.rows) and _is_stretch(columns, self.columns)):
            return False
        height, width = len(rows), len(columns)
        if height == 1:
            return width <= 2 or width == self.columns
        if width == 1:
            return height <= 2 or height == self.rows
        return True


def _is_stretch(numbers: Collection[int], around: int) -> bool:
    """Whether the numbers lie side by side on a circle of `around`."""
    starts = [number for number in numbers if (number - 1) % around not in numbers]
    return len(starts) <= 1


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
