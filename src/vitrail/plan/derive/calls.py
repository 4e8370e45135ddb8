"""What Python code asks of tensors while it is recorded: shapes, attention, and the integers in its calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .axes import Axis, Conflict, find, segment, split_minor
from .numbers import Number, Size, origin_of
from .record import Recorder, tensors_in
from .rules import Call
from .rules_math import attention as attention_rule

_SHAPES = {"view", "reshape", "expand", "new_zeros", "new_ones", "new_empty", "new_full", "broadcast_to", "view_as"}
_SHAPE = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_FACTORIES = {"zeros", "ones", "full", "empty"}
# Calls in which an integer is a value, and not a length: it would be another on a rank.
_VALUES = {
    "add", "clamp", "clamp_", "div", "div_", "divide", "eq", "fill_", "floor_divide", "floordiv", "fmod", "full_like",
    "ge", "gt", "le", "lt", "mod", "mul", "mul_", "multiply", "ne", "pow", "remainder", "sub", "true_divide", "truediv",
}  # fmt: skip


class Calls(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return self.attention(*args, **kwargs)
        if func == _SHAPE or (func is torch.Tensor.size and len(args) == 1 and not kwargs):
            return self._shape(args[0])
        if func is torch.Tensor.size:
            dim = args[1] if len(args) > 1 else kwargs["dim"]
            return self._shape(args[0])[dim]
        result = func(*args, **kwargs)
        if isinstance(result, (torch.Tensor, tuple, list)):
            name = getattr(func, "__name__", "")
            plain = name.strip("_") if name.startswith("__") else name
            self._numbers(plain, args, kwargs, result)
        return result

    def _shape(self, tensor: torch.Tensor) -> Any:
        axes = self.recorder.axes(tensor)
        return torch.Size([Number.of(size, Size(axis)) for size, axis in zip(tensor.shape, axes, strict=True)])

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        """One operation, whatever kernel would serve it: the meta device has only the decomposition."""
        inputs = [query, key, value, *([] if attn_mask is None else [attn_mask])]
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        self.recorder.apply(Call(self.recorder, "attention", (), {}, inputs, [output]), attention_rule)
        return output

    def _numbers(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not any(True for _ in _integers((args, list(kwargs.values())))):
            return
        outputs = list(tensors_in(result))
        if not outputs:
            return
        axes = self.recorder.axes(outputs[0])
        if name in _SHAPES or name in _FACTORIES:
            given = kwargs.get("size", args[1:] if name in _SHAPES else args)
            sizes = _flat(given)[: len(axes)]
            self._meet(name, sizes, axes)
        elif name == "unflatten":
            sizes = _flat(kwargs.get("sizes", args[2] if len(args) > 2 else ()))
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % args[0].dim()
            self._meet(name, sizes, axes[dim : dim + len(sizes)])
        elif name == "repeat_interleave":
            self._repeat(outputs[0], *args[1:], **kwargs)
        elif name == "getitem":
            self._getitem(args[0], args[1])
        elif name == "narrow":
            dim, start, length = (*args[1:], *kwargs.values())[:3]
            self._cut(args[0], int(dim), start, start + length)
        elif name in ("split", "split_with_sizes", "chunk"):
            sizes = _flat(args[1] if len(args) > 1 else next(iter(kwargs.values())))
            dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
            if name != "chunk":
                own = [self.recorder.axes(output)[int(dim)] for output in outputs]
                self._meet(name, sizes if len(sizes) == len(own) else sizes * len(own[:-1]), own)
        elif name in _VALUES or (name[:1] in ("r", "i") and name[1:] in _VALUES):
            for item in (*args, *kwargs.values()):
                if isinstance(item, Number):
                    self.recorder.escapes.append((self.recorder.where, item.origin))
        else:
            for number in _integers((args, list(kwargs.values()))):
                if isinstance(number, Number) and int(number) > 1:
                    for tensor in (*outputs, *tensors_in(args)):
                        for axis in self.recorder.axes(tensor):
                            if find(axis).size == int(number):
                                self.recorder.meeting(f"?{name}", number.origin, axis)

    def _meet(self, name: str, sizes: Sequence[Any], axes: Sequence[Axis]) -> None:
        for size, axis in zip(sizes, axes, strict=False):
            if isinstance(size, int) and int(size) > 1 and find(axis).size == int(size):
                self.recorder.meeting(name, origin_of(size), axis)

    def _repeat(self, output: torch.Tensor, repeats: Any, dim: Any = None, **_: Any) -> None:
        """Each element ``repeats`` times: they are the minor part of what comes out."""
        if isinstance(repeats, int) and int(repeats) > 1 and dim is not None:
            with suppress(Conflict):
                minor = split_minor(self.recorder.axes(output)[int(dim)], int(repeats))[1]
                self.recorder.meeting("repeat_interleave", origin_of(repeats), minor)

    def _cut(self, tensor: torch.Tensor, dim: int, start: Any, stop: Any) -> None:
        """A slice's ends are sums of what lies before them."""
        with suppress(Conflict):
            self._ends(self.recorder.axes(tensor)[dim], tensor.shape[dim], (start, stop))

    def _ends(self, axis: Axis, size: int, ends: Sequence[Any]) -> None:
        for end in ends:
            if isinstance(end, int) and 0 < int(end) < size:
                self.recorder.meeting("slice", origin_of(end), segment(axis, 0, int(end)))
            elif isinstance(end, Number) and int(end) == size:
                self.recorder.meeting("slice", end.origin, axis)
            elif isinstance(end, Number) and int(end) > size:  # it cuts nothing here, and might on a rank
                self.recorder.escapes.append((self.recorder.where, end.origin))
            elif isinstance(end, int) and -size < int(end) < 0:
                origin = origin_of(-end)
                self.recorder.meeting("slice", origin, segment(axis, size + int(end), size))

    def _getitem(self, tensor: torch.Tensor, key: Any) -> None:
        keys = list(key) if isinstance(key, tuple) else [key]
        if any(isinstance(item, torch.Tensor) for item in keys):
            return
        used = sum(item is not None and item is not Ellipsis for item in keys)
        dim = 0
        for item in keys:
            if item is Ellipsis:
                dim += tensor.dim() - used
            elif item is not None:
                if isinstance(item, slice) and item.step in (None, 1):
                    self._cut(tensor, dim, item.start, item.stop)
                dim += 1


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _integers(item)
    elif isinstance(value, slice):
        yield from _integers((value.start, value.stop))


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [item for part in value for item in _flat(part)]
    return [value]


@contextmanager
def module_scopes(recorder: Recorder) -> Iterator[None]:
    """Tell the recorder which module runs."""
    handles = []
    try:
        for path, module in recorder.modules.items():

            def before(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
                recorder.enter(path, module, args, kwargs)

            def after(*_: Any, path: str = path) -> None:
                recorder.leave(path)

            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
