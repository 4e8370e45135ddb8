"""Ranks meet at the start of every step and compare what they were given.

Each rank hashes the shapes, dtypes and scalars of its arguments, and the values of small tensors; the digests are
gathered, and where they differ the descriptions are, so that the error names argument and rank. Values of tensors on
an accelerator would cost a synchronisation, so they are hashed only at the first step and when a shape changes.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import env
from ..errors import DisagreementError
from .flight import FLIGHT

EVERY_STEP_BYTES = 4 * 1024
FIRST_STEP_BYTES = 64 * 1024


class Agreement:
    """Compares the inputs of one model over ``ranks``, through ``group``: a process group for tensors on the CPU."""

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int]) -> None:
        self.group = group if env.CHECK_INPUTS.read() else None
        self.ranks = tuple(ranks)
        self._structure: tuple[str, ...] = ()
        self._parameters: tuple[type, tuple[str, ...]] | None = None

    def check(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise `DisagreementError` on every rank unless all ranks were given equal arguments."""
        if self.group is None:
            return
        named = list(self._named(model, args, kwargs))
        structure = tuple(f"{name} = {text}" for name, text, _ in named)
        limit, everywhere = (EVERY_STEP_BYTES, False) if structure == self._structure else (FIRST_STEP_BYTES, True)
        self._structure = structure
        digest = hashlib.blake2b(digest_size=8)
        for line, (_, _, tensor) in zip(structure, named, strict=True):
            digest.update(line.encode())
            if tensor is not None and (value := _value(tensor, limit, everywhere)) is not None:
                digest.update(value)
        mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)
        FLIGHT.wait_in("comparison of inputs", model)
        every = torch.empty(len(self.ranks), dtype=torch.int64)
        dist.all_gather_single(every, mine, group=self.group)
        FLIGHT.land()
        if not bool((every == mine).all()):
            self._tell(named, everywhere, limit)

    def _named(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[str, str, torch.Tensor | None]]:
        if self._parameters is None or self._parameters[0] is not type(model):
            self._parameters = (type(model), tuple(inspect.signature(model.forward).parameters))
        names = self._parameters[1]
        for index, value in enumerate(args):
            yield from _flatten(names[index] if index < len(names) else f"argument {index}", value)
        for name in sorted(kwargs):
            yield from _flatten(name, kwargs[name])

    def _tell(self, named: Sequence[tuple[str, str, torch.Tensor | None]], everywhere: bool, limit: int) -> None:
        mine: dict[str, str] = {}
        for name, text, tensor in named:
            value = None if tensor is None else _value(tensor, limit, everywhere)
            mine[name] = (
                text if value is None else f"{text} (values {hashlib.blake2b(value, digest_size=4).hexdigest()})"
            )
        everyone: list[dict[str, str]] = [{} for _ in self.ranks]
        dist.all_gather_object(everyone, mine, group=self.group)
        differences = []
        for name in dict.fromkeys(name for one in everyone for name in one):
            texts = [one.get(name, "not given") for one in everyone]
            if len(set(texts)) > 1:
                by_text: dict[str, list[int]] = {}
                for rank, text in zip(self.ranks, texts, strict=True):
                    by_text.setdefault(text, []).append(rank)
                said = "; ".join(f"{text} on rank {', '.join(map(str, ranks))}" for text, ranks in by_text.items())
                differences.append(f"{name}: {said}")
        raise DisagreementError(
            f"step {FLIGHT.step}: the ranks were given different inputs. " + " | ".join(differences),
            hint="every rank must call the model with the same arguments: seed generators equally on all ranks "
            f"({env.CHECK_INPUTS.name}=off turns this comparison off)",
        )


def _flatten(name: str, value: Any) -> Iterator[tuple[str, str, torch.Tensor | None]]:
    if isinstance(value, torch.Tensor):
        yield name, f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}", value
    elif isinstance(value, Mapping):
        yield name, f"{len(value)} entries", None
        for key in value:
            yield from _flatten(f"{name}[{key!r}]", value[key])
    elif isinstance(value, (list, tuple)):
        yield name, f"{len(value)} items", None
        for index, item in enumerate(value):
            yield from _flatten(f"{name}[{index}]", item)
    elif value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device)):
        yield name, repr(value) if not isinstance(value, torch.device) else value.type, None
    else:
        yield name, type(value).__name__, None


def _value(tensor: torch.Tensor, limit: int, everywhere: bool) -> bytes | None:
    """The bytes of a tensor small enough to compare, else None."""
    if tensor.nbytes > limit or tensor.device.type == "meta" or not (everywhere or tensor.device.type == "cpu"):
        return None
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
