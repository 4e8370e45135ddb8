"""Checkpoints of slices: one file a rank, and an index that says which part of which tensor each has.

Ranks reload their own slices from them, at the same degree or another, without anybody holding a whole tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..layout import Ranges, Shard
from .checkpoint import Checkpoint, Entry, read_header

INDEX = "vitrail_shards.json"
FORMAT = 1


def file_of(rank: int, degree: int) -> str:
    """The name of a rank's file."""
    return f"vitrail_shard-{rank + 1:05}-of-{degree:05}.safetensors"


def write_index(folder: Path, tensors: Mapping[str, torch.Tensor], shards: Mapping[str, Shard], degree: int) -> None:
    """Write the index: for every tensor its shape, and the ranges of one dimension that each rank's file has."""
    described: dict[str, Any] = {}
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        shard = shards.get(name)
        cut = shard is not None and shard.dim is not None
        described[name] = {"shape": list(shard.shape if shard is not None else tensor.shape)}
        if cut:
            assert shard is not None
            described[name] |= {"dim": shard.dim, "ranges": shard.ranges}
            if any(shard.zeros):
                described[name]["zeros"] = shard.zeros
        if (other := first.setdefault(id(tensor), name)) != name:
            described[name]["same_as"] = other
    document = {"vitrail_shards": FORMAT, "degree": degree, "tensors": described}
    (folder / INDEX).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _Stored:
    """A tensor in pieces: the whole shape, and each file's entry with what it has of ``dim``."""

    shape: tuple[int, ...]
    dim: int | None
    pieces: tuple[tuple[Entry, Ranges, Ranges], ...]


class ShardCheckpoint(Checkpoint):
    """The tensors of a folder of slices, as if they were whole."""

    def __init__(self, folder: Path) -> None:
        index = folder / INDEX
        try:
            document = json.loads(index.read_text(encoding="utf-8"))
            if document["vitrail_shards"] != FORMAT:
                raise CheckpointError(f"{index} has format {document['vitrail_shards']!r}; this vitrail reads {FORMAT}")
            degree = int(document["degree"])
            files = [read_header(folder / file_of(rank, degree)) for rank in range(degree)]
            self._stored = {name: _stored(one, name, files) for name, one in document["tensors"].items()}
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{index} cannot be read: {type(error).__name__}: {error}") from None
        super().__init__(
            {
                name: Entry(one.pieces[0][0].file, one.pieces[0][0].dtype, one.shape, -1)
                for name, one in self._stored.items()
            }
        )

    def read(self, name: str, shard: Shard, rank: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The rank's part of tensor ``name``, put together from the files that have it."""
        stored = self._stored[name]
        if stored.dim is None:
            return shard.pad(self._read_own(stored.pieces[0][0], name, shard, rank, dtype), rank)
        if shard.dim is None or shard.dim == stored.dim:
            wanted: Ranges = ((0, stored.shape[stored.dim]),) if shard.dim is None else shard.ranges[rank]
            return shard.pad(self._gather(name, stored, wanted, dtype), rank)
        # Cut along another dimension than the files: the whole goes through memory.
        whole = self._gather(name, stored, ((0, stored.shape[stored.dim]),), dtype)
        pieces = [whole.narrow(shard.dim, start, stop - start) for start, stop in shard.ranges[rank]]
        return shard.pad(torch.cat(pieces, shard.dim) if pieces else whole.narrow(shard.dim, 0, 0).clone(), rank)

    def _gather(self, name: str, stored: _Stored, wanted: Ranges, dtype: torch.dtype | None) -> torch.Tensor:
        assert stored.dim is not None
        kind = dtype or stored.pieces[0][0].dtype
        size = sum(stop - start for start, stop in wanted)
        target = torch.empty(*stored.shape[: stored.dim], size, *stored.shape[stored.dim + 1 :], dtype=kind)
        done = 0
        for start, stop in wanted:
            position = start
            while position < stop:
                entry, at, end = _find(stored, position)
                count = min(stop, end) - position
                piece = self._piece(entry, name, stored.dim, at, count, dtype)
                target.narrow(stored.dim, done, count).copy_(piece)
                done, position = done + count, position + count
        return target

    def _piece(self, entry: Entry, name: str, dim: int, at: int, count: int, dtype: torch.dtype | None) -> torch.Tensor:
        """``count`` indices of a file's tensor from ``at`` on."""
        whole = entry.shape[dim]
        part = Shard(entry.shape, dim, (((at, at + count),), ((0, whole),)))
        return self._read_own(entry, name, part, 0, dtype)


def _find(stored: _Stored, position: int) -> tuple[Entry, int, int]:
    """The file that has index ``position``: its entry, where it lies in the file, and where its range ends."""
    for entry, ranges, zeros in stored.pieces:
        local = 0
        for start, stop in ranges:
            if start <= position < stop:
                return entry, _past(local + position - start, zeros), _end(position, start, stop, local, zeros)
            local += stop - start
    raise AssertionError(f"index {position} is in no file")


def _past(own: int, zeros: Ranges) -> int:
    """The index in the padded tensor of the ``own``-th element that is no padding."""
    for start, stop in zeros:
        if start <= own:
            own += stop - start
    return own


def _end(position: int, start: int, stop: int, local: int, zeros: Ranges) -> int:
    """Where the run of elements that lie side by side in the file ends."""
    if not zeros:
        return stop
    end = position + 1
    while end < stop and _past(local + end - start, zeros) == _past(local + position - start, zeros) + end - position:
        end += 1
    return end


def _stored(described: dict[str, Any], name: str, files: list[dict[str, Entry]]) -> _Stored:
    inside = described.get("same_as", name)
    shape = tuple(described["shape"])
    if "dim" not in described:
        return _Stored(shape, None, ((files[0][inside], (), ()),))
    none: list[list[list[int]]] = [[] for _ in files]
    pieces = tuple(
        (file[inside], _ranges(ranges), _ranges(zeros))
        for file, ranges, zeros in zip(files, described["ranges"], described.get("zeros") or none, strict=True)
    )
    return _Stored(shape, int(described["dim"]), pieces)


def _ranges(pairs: list[list[int]]) -> Ranges:
    return tuple((int(start), int(stop)) for start, stop in pairs)
