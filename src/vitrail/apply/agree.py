"""Ranks meet at the start of every step and compare what they were given.

Each rank hashes the shapes, dtypes and scalars of its arguments, and the values of small tensors; the digests are
gathered, and where they differ the descriptions are, so that the error names argument and rank. Values of tensors on
an accelerator would cost a synchronisation, so they are hashed only at the first step and when a shape changes.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import env
from ..errors import DisagreementError
from .flight import FLIGHT

EVERY_STEP_BYTES = 256
FIRST_STEP_BYTES = 64 * 1024

# An argument, or one inside a list or mapping: its name, what it is, and the tensor where it is one.
Leaf = tuple[str, Any, torch.Tensor | None]


class Agreement:
    """Compares the inputs of one model over ``ranks``, through ``group``: a process group for tensors on the CPU."""

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int]) -> None:
        self.group = group if env.CHECK_INPUTS.read() else None
        self.ranks = tuple(ranks)
        self._structure: tuple[Any, ...] = ()
        self._structure_bytes = b""
        self._parameters: tuple[type, tuple[str, ...]] | None = None

    def check(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise `DisagreementError` on every rank unless all ranks were given equal arguments."""
        if self.group is None:
            return
        leaves = self._leaves(model, args, kwargs)
        structure = tuple((name, what) for name, what, _ in leaves)
        limit, everywhere = EVERY_STEP_BYTES, False
        if structure != self._structure:
            limit, everywhere = FIRST_STEP_BYTES, True
            self._structure, self._structure_bytes = structure, repr(structure).encode()
        digest = hashlib.blake2b(self._structure_bytes, digest_size=8)
        for _, _, tensor in leaves:
            if tensor is not None and (value := _value(tensor, limit, everywhere)) is not None:
                digest.update(value)
        mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)
        every = torch.empty(len(self.ranks), dtype=torch.int64)
        FLIGHT.wait_in("comparison of inputs", model)
        dist.all_gather_single(every, mine, group=self.group)
        FLIGHT.land()
        if len(set(every.tolist())) > 1:
            self._tell(leaves, limit, everywhere)

    def _leaves(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Leaf]:
        leaves: list[Leaf] = []
        if args:
            if self._parameters is None or self._parameters[0] is not type(model):
                self._parameters = (type(model), tuple(inspect.signature(model.forward).parameters))
            names = self._parameters[1]
            for index, value in enumerate(args):
                _flatten(names[index] if index < len(names) else f"argument {index}", value, leaves)
        for name in sorted(kwargs):
            _flatten(name, kwargs[name], leaves)
        return leaves

    def _tell(self, leaves: Sequence[Leaf], limit: int, everywhere: bool) -> None:
        mine: dict[str, str] = {}
        for name, what, tensor in leaves:
            mine[name] = repr(what)
            if tensor is not None:
                mine[name] = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
                if (value := _value(tensor, limit, everywhere)) is not None:
                    mine[name] += f" (values {hashlib.blake2b(value, digest_size=4).hexdigest()})"
        everyone: list[dict[str, str]] = [{} for _ in self.ranks]
        dist.all_gather_object(everyone, mine, group=self.group)
        differences = []
        for name in dict.fromkeys(name for one in everyone for name in one):
            by_text: dict[str, list[str]] = {}
            for rank, one in zip(self.ranks, everyone, strict=True):
                by_text.setdefault(one.get(name, "not given"), []).append(str(rank))
            if len(by_text) > 1:
                said = "; ".join(f"{text} on rank {', '.join(ranks)}" for text, ranks in by_text.items())
                differences.append(f"{name}: {said}")
        raise DisagreementError(
            f"step {FLIGHT.step}: the ranks were given different inputs. " + " | ".join(differences),
            hint="every rank must call the model with the same arguments: seed generators equally on all ranks "
            f"({env.CHECK_INPUTS.name}=off turns this comparison off)",
        )


def _flatten(name: str, value: Any, leaves: list[Leaf]) -> None:
    if isinstance(value, torch.Tensor):
        leaves.append((name, (value.dtype, tuple(value.shape)), value))
    elif value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype)):
        leaves.append((name, value, None))
    elif isinstance(value, Mapping):
        leaves.append((name, f"{len(value)} entries", None))
        for key in value:
            _flatten(f"{name}[{key!r}]", value[key], leaves)
    elif isinstance(value, (list, tuple)):
        leaves.append((name, f"{len(value)} items", None))
        for index, item in enumerate(value):
            _flatten(f"{name}[{index}]", item, leaves)
    else:  # a device's index differs between ranks, and an object's text may hold its address: the type is compared
        leaves.append((name, type(value).__name__, None))


def _value(tensor: torch.Tensor, limit: int, everywhere: bool) -> bytes | None:
    """The bytes of a tensor small enough to compare, else None."""
    if tensor.nbytes > limit or tensor.is_meta or not (everywhere or tensor.is_cpu):
        return None
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
