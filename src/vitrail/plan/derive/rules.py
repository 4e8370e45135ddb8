"""What each operation does to axes: the table, and the operations that only move or make elements.

A rule takes a `Call` and gives, for each output tensor, its axes; None blocks every axis of the inputs and outputs, as
does an operation without a rule. Rules assume nothing about values, which are compared afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from .axes import ONE, Axis, block, concatenate, equate, find, fresh, multiply, reshape, segment, split_minor

if TYPE_CHECKING:
    from .record import Recorder

Axes: TypeAlias = list[Axis]


@dataclass
class Call:
    """One operation as the dispatcher saw it: ``inputs`` and ``outputs`` are its tensors, in order."""

    recorder: Recorder
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    tags: Sequence[Any] = field(default=())

    def axes(self, tensor: torch.Tensor) -> Axes:
        return self.recorder.axes(tensor)

    def argument(self, position: int, name: str, default: Any) -> Any:
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[position] if len(self.args) > position else default

    def dim(self, position: int, default: int = 0, of: torch.Tensor | None = None) -> int:
        """A dimension argument, counted from the front."""
        count = (self.inputs[0] if of is None else of).dim()
        return int(self.argument(position, "dim", default)) % max(count, 1)


Rule: TypeAlias = Callable[[Call], "list[Axes] | None"]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, f"two rules for {name}"
            RULES[name] = function
        return function

    return register


def anew(tensor: torch.Tensor, why: str | None = None) -> Axes:
    """Axes that have nothing to do with any other tensor's."""
    return [fresh(size, why) for size in tensor.shape]


def _or_one(axis: Axis) -> Axis:
    return axis if find(axis).size > 1 else ONE


@rule(
    "alias", "clone", "contiguous", "detach", "_to_copy", "to", "zeros_like", "ones_like", "empty_like", "full_like",
    "fill_", "zero_", "resolve_conj", "resolve_neg", "_conj", "_neg_view", "lift_fresh", "lift_fresh_copy", "view_of",
    "_conj_physical", "fill",
)  # fmt: skip
def _same(call: Call) -> list[Axes]:
    return [list(call.axes(call.inputs[0]))]


@rule(
    "zeros", "ones", "full", "empty", "scalar_tensor", "new_zeros", "new_ones", "new_full", "new_empty",
    "new_empty_strided", "empty_strided", "empty_permuted",
)  # fmt: skip
def _uniform(call: Call) -> list[Axes]:
    """Every element is the same, so a rank's own length is as good as a part."""
    return [anew(output) for output in call.outputs]


@rule(
    "arange", "linspace", "logspace", "eye", "tril_indices", "triu_indices", "rand", "randn", "randint", "randperm",
    "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_", "uniform_", "normal_", "normal",
    "exponential_", "hann_window", "_efficientzerotensor",
)  # fmt: skip
def _by_position(call: Call) -> list[Axes]:
    return [anew(output, f"its values are made in the forward, by {call.name}") for output in call.outputs]


@rule("view", "_unsafe_view", "reshape", "_reshape_alias")
def _view(call: Call) -> list[Axes] | None:
    output = call.outputs[0]
    if isinstance(call.args[1], torch.dtype):
        return None
    if output.numel() == 0:
        return [anew(output, "it is empty")]
    return [reshape(call.axes(call.inputs[0]), output.shape)]


@rule("t")
def _t(call: Call) -> list[Axes]:
    return [list(reversed(call.axes(call.inputs[0])))]


@rule("transpose", "transpose_", "swapaxes")
def _transpose(call: Call) -> list[Axes]:
    axes = list(call.axes(call.inputs[0]))
    if axes:
        first, second = call.args[1] % len(axes), call.args[2] % len(axes)
        axes[first], axes[second] = axes[second], axes[first]
    return [axes]


@rule("permute")
def _permute(call: Call) -> list[Axes]:
    axes = call.axes(call.inputs[0])
    return [[axes[dim % len(axes)] for dim in call.args[1]]]


@rule("unsqueeze", "unsqueeze_")
def _unsqueeze(call: Call) -> list[Axes]:
    axes = list(call.axes(call.inputs[0]))
    axes.insert(call.args[1] % (len(axes) + 1), ONE)
    return [axes]


@rule("squeeze", "squeeze_")
def _squeeze(call: Call) -> list[Axes]:
    source = call.inputs[0]
    asked = call.argument(1, "dim", range(source.dim()))
    dims = {dim % max(source.dim(), 1) for dim in ([asked] if isinstance(asked, int) else asked)}
    axes = call.axes(source)
    return [[axis for dim, axis in enumerate(axes) if not (dim in dims and source.shape[dim] == 1)]]


@rule("expand")
def _expand(call: Call) -> list[Axes]:
    source, output = call.inputs[0], call.outputs[0]
    new = output.dim() - source.dim()
    return [
        [
            call.axes(source)[dim - new]
            if dim >= new and source.shape[dim - new] == output.shape[dim]
            else fresh(output.shape[dim])
            for dim in range(output.dim())
        ]
    ]


@rule("repeat")
def _repeat(call: Call) -> list[Axes]:
    axes = call.axes(call.inputs[0])
    times = call.args[1]
    padded = [ONE] * (len(times) - len(axes)) + axes
    return [[axis if count == 1 else multiply([fresh(count), axis]) for count, axis in zip(times, padded, strict=True)]]


@rule("select")
def _select(call: Call) -> list[Axes]:
    axes = list(call.axes(call.inputs[0]))
    block(axes.pop(call.args[1] % len(axes)), "one element is selected from it")
    return [axes]


@rule("unbind")
def _unbind(call: Call) -> list[Axes]:
    axes = list(call.axes(call.inputs[0]))
    block(axes.pop(call.dim(1)), "it is taken apart element by element")
    return [list(axes) for _ in call.outputs]


@rule("slice")
def _slice(call: Call) -> list[Axes]:
    source, output = call.inputs[0], call.outputs[0]
    axes, dim = list(call.axes(source)), call.dim(1)
    size, step = source.shape[dim], call.argument(4, "step", 1)
    start = call.argument(2, "start", None) or 0
    stop = call.argument(3, "end", None)
    start = min(max(start + size if start < 0 else start, 0), size)
    stop = size if stop is None else min(max(stop + size if stop < 0 else stop, 0), size)
    if output.shape[dim] == 0:
        axes[dim] = Axis(0, "it is empty")
    elif step == 1:
        if (start, stop) != (0, size):
            axes[dim] = _or_one(segment(axes[dim], start, stop))
    elif size % step == 0 and stop == size and start < step:
        major, minor = split_minor(axes[dim], step)
        block(minor, "it is cut with a stride")
        axes[dim] = _or_one(major)
    else:
        block(axes[dim], "it is cut with a stride")
        axes[dim] = fresh(output.shape[dim], "it is cut with a stride")
    return [axes]


@rule("narrow")
def _narrow(call: Call) -> list[Axes]:
    axes, dim = list(call.axes(call.inputs[0])), call.dim(1)
    length = call.outputs[0].shape[dim]
    axes[dim] = _or_one(segment(axes[dim], call.args[2], call.args[2] + length))
    return [axes]


@rule("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk", "tensor_split")
def _split(call: Call) -> list[Axes]:
    dim, start, result = call.dim(2), 0, []
    for output in call.outputs:
        axes = list(call.axes(call.inputs[0]))
        size = output.shape[dim]
        axes[dim] = _or_one(segment(axes[dim], start, start + size)) if size else Axis(0, "it is empty")
        start += size
        result.append(axes)
    return result


@rule("cat", "concat", "concatenate")
def _cat(call: Call) -> list[Axes]:
    tensors = [tensor for tensor in call.args[0] if not (tensor.dim() == 1 and tensor.numel() == 0)]
    if not tensors:
        return [anew(call.outputs[0])]
    dim = call.dim(1, of=call.outputs[0])
    axes = []
    for index in range(call.outputs[0].dim()):
        own = [call.axes(tensor)[index] for tensor in tensors]
        if index == dim:
            parts = [axis for axis in own if find(axis).size]
            axes.append(concatenate([axis if find(axis).size > 1 else Axis(1, "one element") for axis in parts]))
            continue
        for other in own[1:]:
            own[0] = equate(own[0], other, "cat")
        axes.append(own[0])
    return [axes]


@rule("stack")
def _stack(call: Call) -> list[Axes]:
    tensors = call.args[0]
    axes = list(call.axes(tensors[0]))
    for tensor in tensors[1:]:
        axes = [equate(first, second, "stack") for first, second in zip(axes, call.axes(tensor), strict=True)]
    axes.insert(call.argument(1, "dim", 0) % call.outputs[0].dim(), fresh(len(tensors), "it is stacked"))
    return [axes]


@rule("constant_pad_nd", "pad")
def _pad(call: Call) -> list[Axes]:
    axes, pads = list(call.axes(call.inputs[0])), call.args[1]
    for index in range(len(pads) // 2):
        if pads[2 * index] or pads[2 * index + 1]:
            block(axes[-1 - index], "it is padded")
            axes[-1 - index] = fresh(call.outputs[0].shape[-1 - index], "it is padded")
    return [axes]


@rule("flip", "roll", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "argsort", "_fft_c2c")
def _ordered(call: Call) -> list[Axes]:
    """Elements along these dims depend on their neighbours or their order."""
    source = call.inputs[0]
    position = 2 if call.name == "roll" else 1
    asked = call.argument(position, "dims" if call.name in ("flip", "roll") else "dim", None)
    if call.name in ("sort", "argsort") and (asked is None or isinstance(asked, bool)):
        asked = call.kwargs.get("dim", -1)
    dims = range(source.dim()) if asked is None or asked == [] else [asked] if isinstance(asked, int) else asked
    for dim in dims:
        if source.dim():
            block(call.axes(source)[dim], f"{call.name} depends on its order")
    return [list(call.axes(source)) for _ in call.outputs]


@rule("tril", "triu", "tril_", "triu_")
def _triangle(call: Call) -> list[Axes]:
    axes = call.axes(call.inputs[0])
    for axis in axes[-2:]:
        block(axis, f"{call.name} depends on its order")
    return [list(axes)]


@rule("view_as_complex")
def _complex(call: Call) -> list[Axes]:
    axes = call.axes(call.inputs[0])
    block(axes[-1], "real and imaginary parts")
    return [list(axes[:-1])]


@rule("view_as_real")
def _real(call: Call) -> list[Axes]:
    return [[*call.axes(call.inputs[0]), fresh(2, "real and imaginary parts")]]
