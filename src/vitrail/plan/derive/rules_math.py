"""Rules of arithmetic: element by element, contractions, reductions, norms, convolutions, attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .axes import ONE, Axis, block, equate, find, fresh, split_at, split_minor
from .rules import Axes, Call, anew, rule


def broadcast(call: Call, tensors: Sequence[torch.Tensor], shape: Sequence[int]) -> Axes:
    result = []
    for dim, size in enumerate(shape):
        axis: Axis | None = None
        for tensor in tensors:
            own = dim - (len(shape) - tensor.dim())
            if own < 0 or tensor.shape[own] == 1:
                continue
            other = call.axes(tensor)[own]
            axis = other if axis is None else equate(axis, other, call.name)
        result.append(fresh(size) if axis is None else axis)
    return result


@rule(
    "masked_fill", "masked_fill_", "lerp", "lerp_", "polar", "complex", "addcmul", "addcdiv", "where", "bitwise_not",
    "isnan", "isfinite", "nan_to_num", "native_dropout", "dropout", "_fused_dropout", "bucketize", "floor_divide",
    "floor_divide_",
)  # fmt: skip
def pointwise(call: Call) -> list[Axes]:
    tensors = call.inputs[:1] if call.name == "bucketize" else call.inputs
    return [broadcast(call, tensors, output.shape) for output in call.outputs]


@rule("copy_", "copy")
def _copy(call: Call) -> list[Axes]:
    return [broadcast(call, call.inputs[:2], call.inputs[0].shape)]


@rule("glu")
def _glu(call: Call) -> list[Axes]:
    axes, dim = list(call.axes(call.inputs[0])), call.dim(1, -1)
    first, second = split_at(axes[dim], find(axes[dim]).size // 2)
    axes[dim] = equate(first, second, "glu")
    return [axes]


@rule("outer", "ger")
def _outer(call: Call) -> list[Axes]:
    return [[call.axes(call.inputs[0])[0], call.axes(call.inputs[1])[0]]]


@rule("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "mv", "addmv", "dot")
def _matmul(call: Call) -> list[Axes] | None:
    plain = call.name in ("mm", "bmm", "mv", "dot")
    left, right = call.args[:2] if plain else call.args[1:3]
    left_axes, right_axes = call.axes(left), call.axes(right)
    contracted = equate(left_axes[-1], right_axes[-2 if right.dim() > 1 else 0], call.name)
    result = [*left_axes[:-1], *(right_axes[-1:] if right.dim() > 1 else [])]
    if right.dim() == 3:
        result[0] = equate(left_axes[0], right_axes[0], call.name)
    call.recorder.contraction(call, contracted, (left, right), result)
    if not plain:
        bias = call.args[0]
        for index in range(1, bias.dim() + 1):
            if bias.shape[-index] != 1:
                equate(result[-index], call.axes(bias)[-index], "bias")
    return [result]


@rule("linear")
def _linear(call: Call) -> list[Axes]:
    source, weight = call.inputs[:2]
    contracted = equate(call.axes(source)[-1], call.axes(weight)[-1], "linear")
    result = [*call.axes(source)[:-1], *call.axes(weight)[:-1]]
    call.recorder.contraction(call, contracted, (source, weight), result)
    if len(call.inputs) > 2:
        equate(result[-1], call.axes(call.inputs[2])[0], "bias")
    return [result]


@rule("convolution", "_convolution", "conv1d", "conv2d", "conv3d")
def _convolution(call: Call) -> list[Axes] | None:
    if call.argument(6, "transposed", False):
        return None
    source, weight, bias = call.args[:3]
    groups = call.argument(8, "groups", 1)
    source_axes, weight_axes, output = call.axes(source), call.axes(weight), call.outputs[0]
    for axis in (*source_axes[2:], *weight_axes[2:]):
        block(axis, "a convolution slides over it")
    out = weight_axes[0]
    space = [fresh(size, "a convolution slides over it") for size in output.shape[2:]]
    if groups == 1:
        contracted = equate(source_axes[1], weight_axes[1], "convolution")
        call.recorder.contraction(call, contracted, (source, weight), [source_axes[0], out, *space])
    elif groups == source.shape[1] == weight.shape[0]:
        out = equate(source_axes[1], weight_axes[0], "depthwise convolution")
        call.recorder.depthwise()
    else:
        for axis in (source_axes[1], weight_axes[0], weight_axes[1]):
            block(axis, "a convolution in groups")
    if bias is not None:
        equate(out, call.axes(bias)[0], "bias")
    return [[source_axes[0], out, *space]]


@rule("native_layer_norm", "_fused_rms_norm", "layer_norm", "rms_norm")
def _norm(call: Call) -> list[Axes]:
    source = call.inputs[0]
    axes, count = call.axes(source), len(call.args[1])
    normalised = axes[len(axes) - count :]
    call.recorder.reduction(call.name, normalised)
    for weight in call.args[2:4]:
        if isinstance(weight, torch.Tensor):
            for first, second in zip(normalised, call.axes(weight), strict=True):
                equate(first, second, call.name)
    kept = axes[: len(axes) - count]
    return [list(axes), *([*kept, *[ONE] * (output.dim() - len(kept))] for output in call.outputs[1:])]


@rule("native_group_norm", "group_norm", "native_batch_norm", "_native_batch_norm_legit", "instance_norm")
def _group_norm(call: Call) -> list[Axes]:
    for tensor in call.inputs:
        for axis in call.axes(tensor)[1 if tensor is call.inputs[0] else 0 :]:
            block(axis, f"{call.name} normalises over it")
    first = call.axes(call.inputs[0])[0]
    outputs = [anew(output, f"{call.name} normalises over it") for output in call.outputs]
    return [[first, *axes[1:]] if index == 0 else axes for index, axes in enumerate(outputs)]


@rule(
    "mean", "sum", "var", "std", "amax", "amin", "any", "all", "linalg_vector_norm", "norm", "prod", "max", "min",
    "argmax", "argmin", "logsumexp", "var_mean", "std_mean", "nansum", "count_nonzero", "median",
)  # fmt: skip
def _reduce(call: Call) -> list[Axes] | None:
    source = call.inputs[0]
    if call.name in ("max", "min") and len(call.inputs) == 2:
        return pointwise(call)
    axes = call.axes(source)
    asked = call.argument(2 if call.name in ("linalg_vector_norm", "norm") else 1, "dim", None)
    if asked is None or isinstance(asked, bool):
        asked = []
    dims = [asked] if isinstance(asked, int) else list(asked) or list(range(len(axes)))
    dims = [dim % max(len(axes), 1) for dim in dims]
    if axes:
        call.recorder.reduction(call.name, [axes[dim] for dim in dims])
    gone = [axis for dim, axis in enumerate(axes) if dim not in dims]
    kept = [ONE if dim in dims else axis for dim, axis in enumerate(axes)]
    return [list(kept) if output.dim() == len(axes) else list(gone) for output in call.outputs]


@rule("_softmax", "softmax", "_log_softmax", "log_softmax", "_safe_softmax", "topk")
def _along(call: Call) -> list[Axes]:
    source = call.inputs[0]
    if not source.dim():
        return [anew(output) for output in call.outputs]
    dim = call.dim(2, -1) if call.name == "topk" else call.dim(1, -1)
    block(call.axes(source)[dim], f"{call.name} runs along it")
    return [
        [
            axis if output.shape[index] == source.shape[index] else fresh(output.shape[index], call.name)
            for index, axis in enumerate(call.axes(source))
        ]
        for output in call.outputs
    ]


def attention(call: Call) -> list[Axes] | None:
    """Scaled dot-product attention as one operation: (..., H, S, D). It is parallel over the leading dims and heads.

    ``H`` of the query is kv heads x group when keys have fewer heads.
    """
    query, key, value = call.inputs[:3]
    output = call.outputs[0]
    q_axes, k_axes, v_axes = (call.axes(tensor) for tensor in (query, key, value))
    count = query.dim()
    if not count == key.dim() == value.dim() or count < 3:
        return None
    for axis in (q_axes[-2], k_axes[-2]):
        block(axis, "attention runs over it")
    equate(k_axes[-2], v_axes[-2], "attention")
    block(equate(q_axes[-1], k_axes[-1], "attention"), "the width of a head")
    block(v_axes[-1], "the width of a head")
    lead = [
        equate(equate(first, second, "attention"), third, "attention")
        for first, second, third in zip(q_axes[:-3], k_axes[:-3], v_axes[:-3], strict=True)
    ]
    heads = q_axes[-3]
    shared = equate(k_axes[-3], v_axes[-3], "attention")
    if query.shape[-3] == key.shape[-3]:
        heads = equate(heads, shared, "attention")
    elif key.shape[-3] > 1:
        equate(split_minor(heads, query.shape[-3] // key.shape[-3])[0], shared, "attention")
    for mask in call.inputs[3:]:
        axes = call.axes(mask)
        if mask.dim() >= 3 and mask.shape[-3] != 1:
            equate(axes[-3], heads, "attention mask")
        for own, axis in zip(reversed(axes[:-3]), reversed(lead), strict=False):
            if find(own).size != 1:
                equate(own, axis, "attention mask")
    call.recorder.heads(heads, shared, value.shape[-1])
    return [
        [*lead, heads, q_axes[-2], v_axes[-1]],
        *(anew(extra, "attention") for extra in call.outputs[1:] if extra is not output),
    ]
