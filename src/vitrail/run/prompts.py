"""Encoders that remember: a prompt is encoded once, whatever the number of seeds, and they can go before denoising.

Works for any pipeline, because it sits at the encoder's call: the same inputs give the remembered outputs.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..apply.modules import sharded_class
from ..errors import UsageError

FEW = 4


class Memory:
    """The last outputs of one encoder, by a digest of its inputs; all of them while ``limit`` is None."""

    def __init__(self, limit: int | None = FEW) -> None:
        self.limit = limit
        self.outputs: OrderedDict[str, Any] = OrderedDict()
        self.freed = False

    def keep(self, key: str, output: Any) -> None:
        self.outputs[key] = output
        while self.limit is not None and len(self.outputs) > self.limit:
            self.outputs.popitem(last=False)


class Remembering(nn.Module):
    """In front of an encoder's class."""

    vitrail_memory: Memory

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        key = _digest(args, kwargs)
        if key not in self.vitrail_memory.outputs:
            if self.vitrail_memory.freed:
                raise UsageError(
                    f"{type(self).__name__} was freed, and is asked for something that it did not encode before",
                    hint="leave --free-text-encoder out: this pipeline uses its encoder while it denoises",
                )
            self.vitrail_memory.keep(key, super().__call__(*args, **kwargs))
        return self.vitrail_memory.outputs[key]


def remember(pipeline: Any, limit: int | None = FEW) -> list[nn.Module]:
    """Have the pipeline's encoders remember; which those are."""
    found = []
    for name, module in pipeline.components.items():
        if isinstance(module, nn.Module) and "encoder" in name:
            vars(module)["vitrail_memory"] = Memory(limit)
            if not isinstance(module, Remembering):
                module.__class__ = sharded_class(type(module), Remembering)
            found.append(module)
    return found


class _Encoded(Exception):
    """The denoiser is about to run: everything is encoded."""


def encode_only(pipeline: Any, call: Callable[[], Any]) -> None:
    """Run ``call``, which calls the pipeline, up to the first step of its denoiser."""

    def stop(*_: Any) -> None:
        raise _Encoded

    denoisers = [
        part for name, part in pipeline.components.items() if name.startswith(("transformer", "unet")) and part
    ]
    handles = [model.register_forward_pre_hook(stop) for model in denoisers]
    try:
        call()
    except _Encoded:
        pass
    finally:
        for handle in handles:
            handle.remove()


def free(modules: list[nn.Module]) -> int:
    """Give back the memory of encoders that have encoded everything; how many bytes that was."""
    total = 0
    for module in modules:
        vars(module)["vitrail_memory"].freed = True
        seen: set[int] = set()
        for tensor in (*module.parameters(), *module.buffers()):
            total += 0 if id(tensor) in seen else tensor.nbytes
            seen.add(id(tensor))
            tensor.data = tensor.new_empty(0)
    return total


def _digest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in _spelled((args, sorted(kwargs.items()))):
        digest.update(text)
    return digest.hexdigest()


def _spelled(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield f"{tuple(value.shape)} {value.dtype} {value.device}".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, (tuple, list)):
        yield f"{type(value).__name__} {len(value)}".encode()
        for item in value:
            yield from _spelled(item)
    elif isinstance(value, dict):
        yield from _spelled(sorted(value.items()))
    else:
        yield repr(value).encode()
