"""Rules of operations that pick or place elements by index, and of those that resample images."""

from __future__ import annotations

import torch

from .axes import block, equate, fresh
from .rules import Axes, Call, anew, rule


@rule("embedding")
def _embedding(call: Call) -> list[Axes]:
    table, indices = call.inputs[:2]
    block(call.axes(table)[0], "rows are looked up in it")
    return [[*call.axes(indices), call.axes(table)[1]]]


@rule("index_select")
def _index_select(call: Call) -> list[Axes]:
    axes, dim = list(call.axes(call.inputs[0])), call.dim(1)
    block(axes[dim], "elements are picked from it by index")
    axes[dim] = fresh(call.outputs[0].shape[dim], "elements are picked from it by index")
    return [axes]


def _span(indices: list[tuple[int, torch.Tensor]]) -> int:
    """How many dimensions the indices take up: a mask has as many as it has itself."""
    return sum(tensor.dim() if tensor.dtype == torch.bool else 1 for _, tensor in indices)


@rule("index", "_unsafe_index")
def _index(call: Call) -> list[Axes] | None:
    source, output = call.args[0], call.outputs[0]
    axes = call.axes(source)
    indices = [(position, tensor) for position, tensor in enumerate(call.args[1]) if tensor is not None]
    first, span = indices[0][0], _span(indices)
    if [position for position, _ in indices] != list(range(first, first + len(indices))):
        return None
    for axis in axes[first : first + span]:
        block(axis, "elements are picked from it by index")
    if len(indices) == 1 and indices[0][1].dtype != torch.bool:
        return [[*axes[:first], *call.axes(indices[0][1]), *axes[first + 1 :]]]
    tail = axes[first + span :]
    made = [fresh(size, "picked by index") for size in output.shape[first : output.dim() - len(tail)]]
    return [[*axes[:first], *made, *tail]]


@rule("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def _index_put(call: Call) -> list[Axes] | None:
    source, values = call.args[0], call.args[2]
    axes = call.axes(source)
    indices = [(position, tensor) for position, tensor in enumerate(call.args[1]) if tensor is not None]
    first, span = indices[0][0], _span(indices)
    if [position for position, _ in indices] != list(range(first, first + len(indices))):
        return None
    for axis in axes[: first + span]:
        block(axis, "elements are placed in it by index")
    tail, own = axes[first + span :], call.axes(values)
    for index in range(1, len(own) + 1):
        if index > len(tail):
            block(own[-index], "elements are placed by index")
        elif values.shape[-index] != 1:
            equate(tail[-index], own[-index], call.name)
    return [list(axes)]


@rule("gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")
def _gather(call: Call) -> list[Axes]:
    source, index = call.inputs[:2]
    axes, dim = list(call.axes(source)), call.dim(1)
    for tensor in call.inputs:
        if tensor.dim() != source.dim():
            continue
        for position, axis in enumerate(call.axes(tensor)):
            if position == dim or tensor.shape[position] != source.shape[position]:
                block(axis, f"{call.name} picks from it by index")
                block(axes[position], f"{call.name} picks from it by index")
            elif tensor.shape[position] != 1:
                axes[position] = equate(axes[position], axis, call.name)
    return [list(call.axes(index)) if call.name == "gather" else axes]


@rule("index_add", "index_add_", "index_copy", "index_copy_")
def _index_add(call: Call) -> list[Axes]:
    target, dim, source = call.args[0], call.args[1] % call.args[0].dim(), call.args[3]
    axes, own = list(call.axes(target)), call.axes(source)
    for position in range(len(axes)):
        if position == dim:
            block(axes[dim], f"{call.name} places in it by index")
            block(own[dim], f"{call.name} places by index")
        else:
            axes[position] = equate(axes[position], own[position], call.name)
    return [axes]


@rule(
    "replication_pad1d", "replication_pad2d", "replication_pad3d", "reflection_pad1d", "reflection_pad2d",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_bilinear2d", "upsample_linear1d",
    "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_bilinear2d_aa", "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "_adaptive_avg_pool2d", "max_pool2d_with_indices", "max_pool3d_with_indices", "pixel_shuffle", "pixel_unshuffle",
)  # fmt: skip
def _spatial(call: Call) -> list[Axes] | None:
    """Channels pass through; what lies behind them is resampled."""
    if call.name.startswith("pixel"):
        return None
    source = call.inputs[0]
    keep = source.dim() - {"1": 1, "2": 2, "3": 3}[next(char for char in call.name if char in "123")]
    for axis in call.axes(source)[keep:]:
        block(axis, f"{call.name} resamples it")
    return [[*call.axes(source)[:keep], *anew(output, f"{call.name} resamples it")[keep:]] for output in call.outputs]
