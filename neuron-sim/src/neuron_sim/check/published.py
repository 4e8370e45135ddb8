"""How long compiling takes: an estimate, scaled from the few compile times that have been published.

The points, and the instructions that this package estimates for their graphs, are data (`published.json`). Between two
points seconds follow a straight line in logarithms; beyond the ends they are proportional to the instructions, from the
nearest point.
"""

import itertools
import json
import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Point:
    """A published compile time, in seconds, and the estimated instructions of its graph."""

    pixels: int
    seconds: float
    instructions: int


@cache
def points() -> tuple[Point, ...]:
    """The published points, by size."""
    data = json.loads(files("neuron_sim").joinpath("check", "published.json").read_text("utf-8"))
    return tuple(Point(**point) for point in data["points"])


@cache
def basis() -> str:
    """What the points are of, and where they come from."""
    data = json.loads(files("neuron_sim").joinpath("check", "published.json").read_text("utf-8"))
    return str(data["basis"])


def compile_seconds(instructions: int) -> float:
    """An estimate of a graph's compile time."""
    known = points()
    if instructions <= known[0].instructions:
        return known[0].seconds * instructions / known[0].instructions
    for low, high in itertools.pairwise(known):
        if instructions <= high.instructions:
            share = math.log(instructions / low.instructions) / math.log(high.instructions / low.instructions)
            return float(low.seconds * (high.seconds / low.seconds) ** share)
    return known[-1].seconds * instructions / known[-1].instructions
