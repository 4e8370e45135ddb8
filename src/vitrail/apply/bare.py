"""Parameters that a forward multiplies with by itself (``x @ self.w``), contracted over a sharded dimension.

Reading such an attribute gives the rank's slice as a `RowwiseSlice`: a tensor whose products are added up over the
ranks as they are made. What is not known to be a product or a view of it is refused.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedError
from .collectives import Group, reduce_sum

_T = torch.Tensor
_PRODUCTS = {
    torch.matmul, torch.mm, torch.bmm, torch.einsum, torch.tensordot, torch.functional.einsum, _T.matmul, _T.mm,
    _T.bmm, _T.__matmul__, _T.__rmatmul__, torch.mv, _T.mv, torch.functional.tensordot,
}  # fmt: skip
_VIEWS = {
    _T.t, _T.transpose, _T.permute, _T.view, _T.reshape, _T.unsqueeze, _T.squeeze, _T.contiguous, _T.to, _T.detach,
    _T.flatten, _T.unflatten, _T.expand, _T.float, _T.type_as, _T.movedim, _T.swapaxes, _T.T.__get__,  # type: ignore[attr-defined]
    _T.mT.__get__, torch.transpose, torch.t, torch.permute, torch.reshape, torch.flatten, torch.movedim,  # type: ignore[attr-defined]
}  # fmt: skip
_FACTS = {
    _T.shape.__get__, _T.dtype.__get__, _T.device.__get__, _T.ndim.__get__, _T.requires_grad.__get__,  # type: ignore[attr-defined]
    _T.is_meta.__get__, _T.layout.__get__, _T.size, _T.dim, _T.numel, _T.element_size, _T.is_floating_point,  # type: ignore[attr-defined]
    _T.is_contiguous, _T.stride, _T.__repr__,
}  # fmt: skip


class RowwiseSlice(torch.Tensor):
    group: Group
    module: nn.Module

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        own = _first((*args, *kwargs.values()))
        assert own is not None
        args, kwargs = _plain(args), _plain(kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear and len(args) + len(kwargs) > 2:
                source, weight, bias = (*args, *kwargs.values())[:3]
                total = reduce_sum(nn.functional.linear(source, weight), own.group, own.module)
                return total if bias is None else total + bias
            if func in _PRODUCTS or func is nn.functional.linear:
                return reduce_sum(func(*args, **kwargs), own.group, own.module)
            if func in _FACTS:
                return func(*args, **kwargs)
            if func in _VIEWS:
                return sliced(func(*args, **kwargs), own.group, own.module)
        raise UnsupportedError(
            f"{type(own.module).__name__} uses a row-parallel parameter in {getattr(func, '__name__', func)}, which is "
            "neither a product nor a view of it",
            hint="leave that parameter out of the plan's 'tensors'",
        )


def _first(values: Any) -> RowwiseSlice | None:
    for value in values:
        if isinstance(value, RowwiseSlice):
            return value
        if isinstance(value, (tuple, list)) and (found := _first(value)) is not None:
            return found
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, RowwiseSlice):
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(torch.Tensor)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_plain(item) for item in value)
    return value


def sliced(tensor: torch.Tensor, group: Group, module: nn.Module) -> RowwiseSlice:
    made = tensor.as_subclass(RowwiseSlice)
    made.group, made.module = group, module
    return made


def add_up(module: nn.Module, name: str, group: Group) -> None:
    """Make products with the parameter ``name`` of ``module``, a slice, add up over the ranks of ``group``."""
    vars(module)["reduced_group"] = group
    module.__class__ = _adding(type(module), name)  # type: ignore[arg-type]


@functools.cache
def _adding(base: type[Any], name: str) -> type[Any]:
    def product_of(self: Any) -> torch.Tensor:
        return sliced(self._parameters[name], self.reduced_group, self)

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), {**names, name: property(product_of)})
