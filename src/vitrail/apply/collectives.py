"""The collectives a sharded forward runs.

Uses the ``_c10d_functional`` operators, which are private to PyTorch (tested: 2.13.0): they take a group by name and
plain tensors, compile into one graph, and are asynchronous until ``wait_tensor``. The public wrappers return a tensor
subclass in eager mode. Nothing here closes over a module, so that repeated blocks stay one compiled graph.

Shapes: B batch and sequence dimensions, C the sharded width of one rank, N the ranks of the axis.
"""

from __future__ import annotations

import torch
from torch import nn

from ..errors import UnsupportedError
from .flight import FLIGHT

_ops = torch.ops._c10d_functional


def _refuse_gradients(tensor: torch.Tensor) -> None:
    if tensor.requires_grad:
        raise UnsupportedError(
            "a sharded model computes no gradients: its collectives have no backward",
            hint="run it under torch.no_grad() or torch.inference_mode(), as pipelines do",
        )


def reduce_sum(partial: torch.Tensor, group: str, module: nn.Module) -> torch.Tensor:
    """The sum of every rank's ``partial`` (B, C), in place where it lies contiguous. ``module`` is for the watchdog."""
    if torch.compiler.is_compiling():
        return _ops.wait_tensor(_ops.all_reduce(partial, "sum", group))  # type: ignore[no-any-return]
    _refuse_gradients(partial)
    partial = partial.contiguous()
    FLIGHT.take_off("all_reduce", module, partial)
    result = _ops.wait_tensor(_ops.all_reduce_(partial, "sum", group))
    FLIGHT.land()
    return result  # type: ignore[no-any-return]


def gather_columns(local: torch.Tensor, degree: int, width: int, group: str, module: nn.Module) -> torch.Tensor:
    """The whole output (B, width) from every rank's columns (B, C).

    Every rank but the last ones holds ``ceil(width / degree)`` columns; shorter ones are padded for the transfer.
    """
    chunk = -(-width // degree)
    if local.shape[-1] != chunk:
        local = nn.functional.pad(local, (0, chunk - local.shape[-1]))
    local = local.contiguous()
    if torch.compiler.is_compiling():
        stacked = _ops.wait_tensor(_ops.all_gather_into_tensor(local, degree, group))
    else:
        _refuse_gradients(local)
        FLIGHT.take_off("all_gather", module, local)
        stacked = _ops.wait_tensor(_ops.all_gather_into_tensor(local, degree, group))
        FLIGHT.land()
    whole = stacked.view(degree, *local.shape).movedim(0, -2).flatten(-2)
    return whole.narrow(-1, 0, width) if whole.shape[-1] != width else whole  # type: ignore[no-any-return]
