"""What every module of a model gives in one run, so that two runs can be compared module by module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..apply.prove import relative_error
from ..layout import Ranges
from ..plan.derive.record import tensors_in


@dataclass
class Outputs:
    """Modules in the order in which they ended, with what they gave."""

    calls: list[tuple[str, list[torch.Tensor]]] = field(default_factory=list)


@contextmanager
def recorded(model: nn.Module) -> Iterator[Outputs]:
    """Keep a copy of what each module of ``model`` gives."""
    outputs = Outputs()
    handles = []
    for name, module in model.named_modules():

        def keep(_: nn.Module, __: Any, given: Any, name: str = name) -> None:
            outputs.calls.append((name, [tensor.detach().clone() for tensor in tensors_in(given)]))

        handles.append(module.register_forward_hook(keep))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Difference:
    """``module`` ran as the ``index``-th; ``error`` is relative to its largest value in the unsharded run."""

    module: str
    index: int
    error: float


def differences(sharded: Outputs, whole: Outputs, slices: Mapping[str, Ranges] | None = None) -> list[Difference]:
    """Of each module whose output is whole on every rank, how far it is off, in the order in which they ran.

    Modules whose output is a slice are compared where ``slices`` has the indices of its last dimension, and left out
    otherwise.
    """
    found = []
    for index, ((name, given), (other, expected)) in enumerate(zip(sharded.calls, whole.calls, strict=False)):
        if name != other:
            break
        if slices and name in slices:
            expected = [_slice(tensor, slices[name]) for tensor in expected]
        if [tensor.shape for tensor in given] == [tensor.shape for tensor in expected]:
            found.append(Difference(name, index, relative_error(given, expected)))
    return found


def _slice(tensor: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    return torch.cat([tensor[..., start:stop] for start, stop in ranges], -1)


def block_of(name: str, model: nn.Module) -> str:
    """The outermost element of a list that a module is in, or its first component."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        parent = model.get_submodule(".".join(parts[:count]))
        if isinstance(parent, nn.ModuleList):
            return ".".join(parts[: count + 1])
    return parts[0]
