"""A shard of a tensor: which index ranges of one dimension each rank owns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .ranges import Ranges, length, normalise


@dataclass(frozen=True)
class Shard:
    """How a tensor of ``shape`` lies over ``len(ranges)`` ranks of one mesh axis.

    ``dim`` is the sharded dimension, or None for a tensor that every rank holds whole. ``ranges[rank]`` are the
    indices of ``dim`` that the rank owns, ascending. Together the ranks own every index at least once; indices that
    several ranks own (key and value heads fewer than ranks) hold the same values on each.

    With ``zeros`` every rank's part is padded to one length: ``zeros[rank]`` are the indices of the local dimension
    that hold zeros, between the rank's own. They are on no disk and in no whole tensor.

    Raises ``ValueError`` for a dimension the shape has not, ranges outside it, or an index nobody owns.
    """

    shape: tuple[int, ...]
    dim: int | None
    ranges: tuple[Ranges, ...]
    zeros: tuple[Ranges, ...] = ()

    def __post_init__(self) -> None:
        if not self.ranges:
            raise ValueError("a shard needs at least one rank")
        if self.dim is None:
            return
        if not 0 <= self.dim < len(self.shape):
            raise ValueError(f"dim {self.dim} is not a dimension of shape {self.shape}")
        size = self.shape[self.dim]
        for rank, ranges in enumerate(self.ranges):
            if ranges != normalise(ranges):
                raise ValueError(f"rank {rank}'s ranges {ranges} are not in canonical form")
            if ranges and ranges[-1][1] > size:
                raise ValueError(f"rank {rank}'s ranges {ranges} exceed the {size} indices of dim {self.dim}")
        covered = 0
        for start, stop in sorted(item for ranges in self.ranges for item in ranges):
            if start > covered:
                break
            covered = max(covered, stop)
        if covered < size:
            raise ValueError(f"nobody owns index {covered} of dim {self.dim} (size {size})")

    @classmethod
    def whole(cls, shape: Sequence[int], degree: int) -> Shard:
        """Every rank holds the whole tensor."""
        return cls(tuple(shape), None, ((),) * degree)

    @property
    def degree(self) -> int:
        return len(self.ranges)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of what the rank holds, padding included."""
        return self._with(rank, length(self.zeros[rank]) if self.zeros else 0)

    def own_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the rank's part of the whole tensor."""
        return self._with(rank, 0)

    def _with(self, rank: int, padding: int) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], length(self.ranges[rank]) + padding, *self.shape[self.dim + 1 :])

    def pad(self, own: torch.Tensor, rank: int) -> torch.Tensor:
        """The rank's own part with its zeros in place; itself where there are none."""
        if self.dim is None or not self.zeros or not self.zeros[rank]:
            return own
        return insert_zeros(own, self.dim, self.zeros[rank])

    def numel(self, rank: int) -> int:
        return math.prod(self.local_shape(rank))

    def spans(self, rank: int, itemsize: int) -> Iterator[tuple[int, int]]:
        """The rank's bytes in the whole tensor, row-major: ``(offset, length)``, ascending and never adjacent.

        Concatenated they are exactly the local tensor's bytes, so a shard is read from disk without reading more.
        """
        if self.dim is None or self.shape[self.dim] == length(self.ranges[rank]):
            if size := math.prod(self.shape) * itemsize:
                yield 0, size
            return
        inner = math.prod(self.shape[self.dim + 1 :]) * itemsize
        row = self.shape[self.dim] * inner
        pieces = [(start * inner, (stop - start) * inner) for start, stop in self.ranges[rank]]
        if not inner:
            return
        offset = size = 0  # a piece that ends a row and one that starts the next are one span
        for outer in range(math.prod(self.shape[: self.dim])):
            for start, piece in pieces:
                if outer * row + start == offset + size:
                    size += piece
                else:
                    if size:
                        yield offset, size
                    offset, size = outer * row + start, piece
        if size:
            yield offset, size


def take(tensor: torch.Tensor, shard: Shard, rank: int) -> torch.Tensor:
    """The rank's part of a whole tensor: contiguous, with a storage of its own."""
    if tuple(tensor.shape) != shard.shape:
        raise ValueError(f"a shard of shape {shard.shape} cannot be taken from a tensor of shape {tuple(tensor.shape)}")
    local = torch.empty(shard.own_shape(rank), dtype=tensor.dtype, device=tensor.device)
    if shard.dim is None:
        return local.copy_(tensor)
    offset = 0
    for start, stop in shard.ranges[rank]:
        local.narrow(shard.dim, offset, stop - start).copy_(tensor.narrow(shard.dim, start, stop - start))
        offset += stop - start
    return shard.pad(local, rank)


def insert_zeros(own: torch.Tensor, dim: int, zeros: Ranges) -> torch.Tensor:
    """``own`` with zeros at the indices ``zeros`` of the result's ``dim``."""
    pieces, taken, position = list[torch.Tensor](), 0, 0
    for start, stop in zeros:
        pieces.append(own.narrow(dim, taken, start - position))
        pieces.append(own.new_zeros(*own.shape[:dim], stop - start, *own.shape[dim + 1 :]))
        taken, position = taken + start - position, stop
    pieces.append(own.narrow(dim, taken, own.shape[dim] - taken))
    return torch.cat(pieces, dim)


def assemble(locals_: Sequence[torch.Tensor], shard: Shard) -> torch.Tensor:
    """The exact inverse of `take`: the whole tensor from every rank's part, in rank order."""
    if len(locals_) != shard.degree:
        raise ValueError(f"{shard.degree} parts are needed, {len(locals_)} were given")
    for rank, local in enumerate(locals_):
        if tuple(local.shape) != shard.local_shape(rank):
            raise ValueError(f"rank {rank}'s part has shape {tuple(local.shape)}, not {shard.local_shape(rank)}")
    if shard.dim is None:
        return locals_[0].clone()
    whole = torch.empty(shard.shape, dtype=locals_[0].dtype, device=locals_[0].device)
    for rank, (local, ranges) in enumerate(zip(locals_, shard.ranges, strict=True)):
        offset = 0
        if shard.zeros:
            local = _without(local, shard.dim, shard.zeros[rank])
        for start, stop in ranges:
            whole.narrow(shard.dim, start, stop - start).copy_(local.narrow(shard.dim, offset, stop - start))
            offset += stop - start
    return whole


def _without(local: torch.Tensor, dim: int, zeros: Ranges) -> torch.Tensor:
    kept = [index for index in range(local.shape[dim]) if not any(start <= index < stop for start, stop in zeros)]
    return local.index_select(dim, torch.tensor(kept, dtype=torch.long, device=local.device))
