"""Writing safetensors files tensor by tensor: the header needs shapes alone, so no file is ever whole in memory."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch

from ..errors import CheckpointError
from .checkpoint import DTYPES

_CODES = {dtype: code for code, dtype in DTYPES.items()}
ALIGNMENT = 8


class Writer:
    """One file of tensors, which are to be given in the order of `names`. A context manager."""

    def __init__(self, file: Path, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> None:
        self.file = file
        # As the safetensors library lays files out: wide elements first, so that all lie aligned.
        self.names = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        self._sizes: dict[str, int] = {}
        for name in self.names:
            dtype, shape = tensors[name]
            if dtype not in _CODES:
                raise CheckpointError(f"{name} is of {dtype}, which a safetensors file cannot hold")
            size = dtype.itemsize * torch.Size(shape).numel()
            header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
            self._sizes[name] = size
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        self._header = text + b" " * (-len(text) % ALIGNMENT)
        self._next = 0
        self._stream: BinaryIO | None = None

    def __enter__(self) -> Writer:
        self._stream = self.file.open("wb")
        self._stream.write(struct.pack("<Q", len(self._header)) + self._header)
        return self

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor, on the CPU. Raises OSError when the disk refuses it."""
        assert self._stream is not None
        assert name == self.names[self._next], "tensors are written in the order of the header"
        plain = tensor.contiguous()
        assert plain.nbytes == self._sizes[name]
        if plain.nbytes:
            self._stream.write(memoryview(plain.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
        self._next += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._stream is not None
        try:
            if kind is None:
                self._stream.flush()
                os.fsync(self._stream.fileno())
        finally:
            self._stream.close()
