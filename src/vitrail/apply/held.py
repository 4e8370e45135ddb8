"""Parameters kept in parts and gathered when they are used: for what no other style fits.

Reading such an attribute gives a `HeldSlice`, which knows the whole's shape and becomes the whole in an operation.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .collectives import Group, gather_dim

_T = torch.Tensor
_SAME = {
    _T.dtype.__get__, _T.device.__get__, _T.ndim.__get__, _T.is_meta.__get__, _T.layout.__get__,  # type: ignore[attr-defined]
    _T.requires_grad.__get__, _T.dim, _T.element_size, _T.is_floating_point, _T.is_complex,  # type: ignore[attr-defined]
}  # fmt: skip
_SHAPE = _T.shape.__get__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Gather:
    """How a held parameter becomes whole."""

    dim: int
    width: int
    degree: int
    group: Group


class HeldSlice(torch.Tensor):
    how: Gather
    module: nn.Module

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SAME:
            return func(plain(args[0]))
        if func == _SHAPE or (func is _T.size and len(args) == 1 and not kwargs):
            return whole_shape(args[0])
        if func is _T.size:
            return whole_shape(args[0])[args[1] if len(args) > 1 else kwargs["dim"]]
        if func is _T.numel:
            return whole_shape(args[0]).numel()
        return func(*_whole(args), **_whole(kwargs))


def plain(held: HeldSlice) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return held.as_subclass(torch.Tensor)


def whole_shape(held: HeldSlice) -> torch.Size:
    local = plain(held).shape
    return torch.Size((*local[: held.how.dim], held.how.width, *local[held.how.dim + 1 :]))


def _whole(value: Any) -> Any:
    if isinstance(value, HeldSlice):
        how = value.how
        return gather_dim(plain(value), how.dim, how.degree, how.width, how.group, value.module)
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_whole(item) for item in value)
    return value


def hold(module: nn.Module, name: str, dim: int, width: int, degree: int, group: Group) -> None:
    """Make the attribute ``name`` of ``module``, whose parameter is a slice, the whole whenever it is used."""
    held = dict(vars(module).get("held_parameters", {}))
    held[name] = Gather(dim, width, degree, group)
    vars(module)["held_parameters"] = held
    module.__class__ = _holding(type(module), name)  # type: ignore[arg-type]


@functools.cache
def _holding(base: type[Any], name: str) -> type[Any]:
    def held(self: Any) -> torch.Tensor:
        how: Gather = self.held_parameters[name]
        local = self._parameters[name]
        if torch.compiler.is_compiling():
            return gather_dim(local, how.dim, how.degree, how.width, how.group, self)
        made = local.as_subclass(HeldSlice)
        made.how, made.module = how, self
        return made  # type: ignore[no-any-return]

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), {**names, name: property(held)})
