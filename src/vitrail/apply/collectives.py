"""The collectives a sharded forward runs.

Uses the ``_c10d_functional`` operators, which are private to PyTorch (tested: 2.13.0): they take a group by name and
plain tensors, compile into one graph, and are asynchronous until ``wait_tensor``. The public wrappers return a tensor
subclass in eager mode. Nothing here closes over a module, so that repeated blocks stay one compiled graph.

Shapes: B batch and sequence dimensions, C the sharded width of one rank, N the ranks of the axis.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import torch
from torch import nn

from ..errors import UnsupportedError
from .flight import FLIGHT

_ops = torch.ops._c10d_functional


class SimulatedGroup(Protocol):
    """A group whose ranks are threads of this process (`.simulate`)."""

    def all_reduce(self, partial: torch.Tensor, module: nn.Module) -> torch.Tensor: ...

    def all_gather(self, local: torch.Tensor, module: nn.Module) -> torch.Tensor: ...


Group: TypeAlias = "str | SimulatedGroup"


def _refuse_gradients(tensor: torch.Tensor) -> None:
    if tensor.requires_grad:
        raise UnsupportedError(
            "a sharded model computes no gradients: its collectives have no backward",
            hint="run it under torch.no_grad() or torch.inference_mode(), as pipelines do",
        )


def reduce_sum(partial: torch.Tensor, group: Group, module: nn.Module) -> torch.Tensor:
    """The sum of every rank's ``partial`` (B, C), in place where it lies contiguous. ``module`` is for the watchdog."""
    if torch.compiler.is_compiling():
        return _ops.wait_tensor(_ops.all_reduce(partial, "sum", group))  # type: ignore[no-any-return]
    _refuse_gradients(partial)
    partial = partial.contiguous()
    if not isinstance(group, str):
        return group.all_reduce(partial, module)
    FLIGHT.take_off("all_reduce", module, partial)
    result = _ops.wait_tensor(_ops.all_reduce_(partial, "sum", group))
    FLIGHT.land()
    return result  # type: ignore[no-any-return]


def gather_columns(local: torch.Tensor, degree: int, width: int, group: Group, module: nn.Module) -> torch.Tensor:
    """The whole output (B, width) from every rank's columns (B, C).

    Every rank but the last ones holds ``ceil(width / degree)`` columns; shorter ones are padded for the transfer.
    """
    return gather_dim(local, -1, degree, width, group, module)


def gather_dim(local: torch.Tensor, dim: int, degree: int, width: int, group: Group, module: nn.Module) -> torch.Tensor:
    """The same along any dimension."""
    dim %= local.dim()
    chunk = -(-width // degree)
    if local.shape[dim] != chunk:
        local = nn.functional.pad(local, (*[0, 0] * (local.dim() - 1 - dim), 0, chunk - local.shape[dim]))
    local = local.contiguous()
    if torch.compiler.is_compiling():
        stacked = _ops.wait_tensor(_ops.all_gather_into_tensor(local, degree, group))
    else:
        _refuse_gradients(local)
        if isinstance(group, str):
            FLIGHT.take_off("all_gather", module, local)
            stacked = _ops.wait_tensor(_ops.all_gather_into_tensor(local, degree, group))
            FLIGHT.land()
        else:
            stacked = group.all_gather(local, module)
    whole = stacked.view(degree, *local.shape).movedim(0, dim).flatten(dim, dim + 1)
    # Contiguous, as what the whole module gives: its forward may view it.
    return whole.narrow(dim, 0, width).contiguous() if whole.shape[dim] != width else whole  # type: ignore[no-any-return]
