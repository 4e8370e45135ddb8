"""Ranks compare what they were given, at the first step and whenever it changes.

It changes when a shape, dtype or scalar does, and when an argument that stayed the same tensor from step to step is
another one, as the text embedding of the next picture is. Then each rank hashes the structure of its arguments and the
values of tiny tensors; of larger ones it sends a sample of values, which may differ by what different processors round.
One small gather carries both; where something differs, the descriptions are gathered too, so that the error names
argument and rank. The gather has a process group of its own: a rank that does not come to it is then missing there,
rather than taken for another in a collective of the model's.
"""

from __future__ import annotations

import hashlib
import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import env
from ..errors import DisagreementError
from .flight import FLIGHT
from .groups import side_group

EXACT_BYTES = 256  # tensors up to this size are hashed whole
SAMPLE_VALUES = 64  # of all larger tensors together
TOLERANCE = 0.02  # of the sample's largest value

# An argument, or one inside a list or mapping: its name, what it is, and the tensor where it is one.
Leaf = tuple[str, Any, torch.Tensor | None]


class Agreement:
    """Compares the inputs of one model over ``ranks``."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.group: dist.ProcessGroup | None = None  # made at the first step: it takes threads, which loading can miss
        self._wanted = env.CHECK_INPUTS.read()
        self._structure: tuple[Any, ...] = ()
        self._parameters: tuple[type, tuple[str, ...]] | None = None
        self._seen: dict[str, tuple[weakref.ref[torch.Tensor] | None, bool]] = {}

    def check(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise `DisagreementError` on every rank unless all ranks were given equal arguments."""
        if not self._wanted:
            return
        leaves = self._leaves(model, args, kwargs)
        structure = tuple((name, what) for name, what, _ in leaves)
        renewed = self._renewed(leaves)
        if structure == self._structure and not renewed:
            return
        self._structure = structure
        digest = hashlib.blake2b(repr(structure).encode(), digest_size=8)
        tensors = [tensor for _, _, tensor in leaves if tensor is not None and not tensor.is_meta]
        larger = [tensor for tensor in tensors if tensor.nbytes > EXACT_BYTES]
        for tensor in tensors:
            if tensor.nbytes <= EXACT_BYTES:
                digest.update(_bytes(tensor))
        mine = torch.zeros(1 + SAMPLE_VALUES, dtype=torch.float64)
        mine[:1] = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64).view(torch.float64)
        for index, tensor in enumerate(larger):
            count = SAMPLE_VALUES // len(larger)
            sample = _sample(tensor, count)
            mine[1 + index * count : 1 + index * count + len(sample)] = sample
        every = torch.empty(len(self.ranks), len(mine), dtype=torch.float64)
        FLIGHT.wait_in("comparison of inputs", model)
        if self.group is None:
            self.group = side_group(self.ranks)
        dist.all_gather_single(every.view(-1), mine, group=self.group)
        FLIGHT.land()
        digests, samples = every[:, 0].contiguous().view(torch.int64), every[:, 1:]
        if len(set(digests.tolist())) > 1 or not _close(samples, samples[:1]):
            self._tell(leaves)

    def _renewed(self, leaves: Sequence[Leaf]) -> bool:
        """Whether a tensor that was the same one in the two steps before is now another, or all of them are."""
        seen: dict[str, tuple[weakref.ref[torch.Tensor] | None, bool]] = {}
        same = ended = False
        for name, _, tensor in leaves:
            if tensor is not None:
                before, constant = self._seen.get(name, (None, False))
                stayed = before is not None and before() is tensor
                same, ended = same or stayed, ended or (constant and not stayed)
                seen[name] = (weakref.ref(tensor), stayed)
        self._seen = seen
        return ended or not same

    def _leaves(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Leaf]:
        named = dict(kwargs)
        if args:
            if self._parameters is None or self._parameters[0] is not type(model):
                self._parameters = (type(model), tuple(inspect.signature(model.forward).parameters))
            names = self._parameters[1]
            for index, value in enumerate(args):
                named[names[index] if index < len(names) else f"argument {index}"] = value
        leaves: list[Leaf] = []
        for name in sorted(named):
            _flatten(name, named[name], leaves)
        return leaves

    def _tell(self, leaves: Sequence[Leaf]) -> None:
        mine: dict[str, tuple[str, torch.Tensor | None]] = {}
        tiny = {name for name, _, tensor in leaves if tensor is not None and tensor.nbytes <= EXACT_BYTES}
        for name, what, tensor in leaves:
            mine[name] = (repr(what), None)
            if tensor is not None:
                text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
                mine[name] = (text, None if tensor.is_meta else _sample(tensor, SAMPLE_VALUES))
        everyone: list[dict[str, tuple[str, torch.Tensor | None]]] = [{} for _ in self.ranks]
        dist.all_gather_object(everyone, mine, group=self.group)
        differences = []
        for name in dict.fromkeys(name for one in everyone for name in one):
            texts, samples = zip(*(one.get(name, ("not given", None)) for one in everyone), strict=True)
            tolerance = 0.0 if name in tiny else TOLERANCE
            if (
                len(set(texts)) == 1
                and samples[0] is not None
                and not _close(torch.stack(samples), samples[0], tolerance)
            ):
                texts = tuple(
                    f"{text} (values from {sample[0]:.4g}, {sample[1:].norm():.4g})"
                    for text, sample in zip(texts, samples, strict=True)
                )
            by_text: dict[str, list[str]] = {}
            for rank, text in zip(self.ranks, texts, strict=True):
                by_text.setdefault(text, []).append(str(rank))
            if len(by_text) > 1:
                said = "; ".join(f"{text} on rank {', '.join(ranks)}" for text, ranks in by_text.items())
                differences.append(f"{name}: {said}")
        raise DisagreementError(
            f"step {FLIGHT.step}: the ranks were given different inputs. "
            + (" | ".join(differences) or "They differ in values of small tensors."),
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


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _sample(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` values spread over ``tensor``, at most."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat[:: max(1, flat.numel() // max(1, count))][:count].to("cpu", torch.float64)


def _close(values: torch.Tensor, reference: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    """Equal but for rounding; what is not a number must be so everywhere."""
    scale = float(reference.nan_to_num(0, 0, 0).abs().max()) if reference.numel() else 0.0
    return torch.allclose(values, reference.expand_as(values), rtol=0, atol=tolerance * scale, equal_nan=True)
