"""What a shard is: index ranges per dimension, and the exact arithmetic on them. Pure: no process group."""

from .formula import Formula, join
from .mesh import AXIS, BACKENDS, MeshAxis
from .ranges import Range, Ranges, normalise, share, split
from .shard import Shard, assemble, insert_zeros, take

__all__ = [
    "AXIS",
    "BACKENDS",
    "Formula",
    "MeshAxis",
    "Range",
    "Ranges",
    "Shard",
    "assemble",
    "insert_zeros",
    "join",
    "normalise",
    "share",
    "split",
    "take",
]
