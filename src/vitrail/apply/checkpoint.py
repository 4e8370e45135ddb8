"""Reading parts of tensors out of safetensors files, and no byte more.

The file format is eight bytes of header length, a JSON header, and the tensors' bytes
(https://huggingface.co/docs/safetensors). The library's own slices map the file, and a slice of columns touches
whole pages of every row; here the bytes of a shard are read straight into the memory of the shard.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import CheckpointError
from ..layout import Shard

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
BUFFER_BYTES = 8 * 1024 * 1024
ADVISED_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its bytes start at ``offset`` of the file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


@dataclass
class Reading:
    """What was asked of the files, over a load."""

    requested: int = 0
    calls: int = 0


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors in ``file``. Raises `CheckpointError` for a file that is missing, truncated or of another format."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else size + 1
            if length > size - 8:
                raise CheckpointError(
                    f"{file} is truncated or no safetensors file: a header of {length} bytes, a file of {size}",
                    hint="download or copy it again",
                )
            header = json.loads(stream.read(length))
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} is missing", hint="the folder is incomplete: download or copy it again"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, UnicodeDecodeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} is not a safetensors file: its header is not JSON") from None
    entries = {}
    for name, value in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (start, stop) = DTYPES.get(value["dtype"]), tuple(value["shape"]), value["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{file}: the header's entry for tensor {name!r} is malformed") from None
        if dtype is None:
            raise CheckpointError(f"{file}: tensor {name!r} has dtype {value['dtype']}, which vitrail cannot read")
        if stop - start != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(f"{file}: tensor {name!r} of shape {shape} has {stop - start} bytes")
        if 8 + length + stop > size:
            raise CheckpointError(
                f"{file} is truncated: tensor {name!r} ends at byte {8 + length + stop}, the file at {size}",
                hint="download or copy it again",
            )
        entries[name] = Entry(file, dtype, shape, 8 + length + start)
    return entries


class Checkpoint:
    """The tensors of one or several files. A context manager, which keeps the files open."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = dict(entries)
        self.reading = Reading()
        self._files: dict[Path, int] = {}

    @classmethod
    def from_file(cls, file: Path) -> Checkpoint:
        return cls(read_header(file))

    @classmethod
    def from_index(cls, index: Path, locate: Callable[[str], Path] | None = None) -> Checkpoint:
        """From an ``*.index.json``; ``locate`` finds a file by its name, beside the index by default."""
        locate = locate or index.parent.joinpath
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            by_file: dict[str, list[str]] = {}
            for name, file in weight_map.items():
                by_file.setdefault(file, []).append(name)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{index} is not an index of safetensors files") from None
        entries: dict[str, Entry] = {}
        for file, names in by_file.items():
            path = locate(file)
            if not path.exists():
                raise CheckpointError(
                    f"{path} is missing: {index.name} says it holds tensor {names[0]!r}"
                    + (f" and {len(names) - 1} more" if len(names) > 1 else ""),
                    hint="the folder is incomplete: download or copy it again",
                )
            found = read_header(path)
            if absent := [name for name in names if name not in found]:
                raise CheckpointError(f"{path} lacks tensor {absent[0]!r}, which {index.name} says it holds")
            entries |= {name: found[name] for name in names}
        return cls(entries)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def read(self, name: str, shard: Shard, rank: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The rank's part of tensor ``name``, converted to ``dtype``: contiguous, in memory of its own."""
        entry = self.entries[name]
        return shard.pad(self._read_own(entry, name, shard, rank, dtype), rank)

    def _read_own(self, entry: Entry, name: str, shard: Shard, rank: int, dtype: torch.dtype | None) -> torch.Tensor:
        target = torch.empty(shard.own_shape(rank), dtype=dtype or entry.dtype)
        if not target.numel():
            return target
        file = self._open(entry, shard)
        spans = shard.spans(rank, entry.dtype.itemsize)
        if target.dtype == entry.dtype:
            memory = _bytes(target)
            position = 0
            for offset, length in spans:
                self._read(file, entry, name, offset, memory[position : position + length])
                position += length
            return target
        flat = target.reshape(-1)
        count = min(BUFFER_BYTES // entry.dtype.itemsize, flat.numel())
        buffer = torch.empty(count, dtype=entry.dtype)
        memory = _bytes(buffer)
        done = filled = 0
        for offset, length in _cut(spans, memory.nbytes):
            self._read(file, entry, name, offset, memory[filled : filled + length])
            filled += length
            if filled == memory.nbytes:
                flat[done : done + count] = buffer
                done, filled = done + count, 0
        if filled:
            flat[done:] = buffer[: filled // entry.dtype.itemsize]
        return target

    def _open(self, entry: Entry, shard: Shard) -> int:
        """The descriptor of the tensor's file; where only parts of rows will be read, the kernel is told of the rows.

        Left to itself it takes reads with gaps for random ones, and a cold disk then serves them one by one.
        """
        if entry.file not in self._files:
            self._files[entry.file] = os.open(entry.file, os.O_RDONLY)
        file = self._files[entry.file]
        if shard.dim and hasattr(os, "posix_fadvise"):
            stop = entry.offset + math.prod(entry.shape) * entry.dtype.itemsize
            for offset in range(entry.offset, stop, ADVISED_BYTES):
                os.posix_fadvise(file, offset, min(ADVISED_BYTES, stop - offset), os.POSIX_FADV_WILLNEED)
        return file

    def _read(self, file: int, entry: Entry, name: str, offset: int, memory: memoryview) -> None:
        position = entry.offset + offset
        self.reading.requested += memory.nbytes
        while memory.nbytes:
            self.reading.calls += 1
            count = os.preadv(file, [memory], position)
            if count == 0:
                raise CheckpointError(f"{entry.file} ended while tensor {name!r} was read: the file was changed")
            memory, position = memory[count:], position + count


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, to write to."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _cut(spans: Iterator[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """The same spans, cut so that they fill consecutive buffers of ``size`` bytes exactly."""
    room = size
    for offset, length in spans:
        while length:
            piece = min(length, room)
            yield offset, piece
            offset, length, room = offset + piece, length - piece, room - piece
            if room == 0:
                room = size
