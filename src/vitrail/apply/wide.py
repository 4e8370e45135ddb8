"""Arithmetic in float64 throughout, for comparisons: casts to a narrower floating point are not made.

Uses ``TorchDispatchMode``, which is private to PyTorch (tested: 2.13.0). A model that computes its norms in float32
whatever comes in differs from its sharded self by float32's rounding, which would hide a small fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_CASTS = {torch.ops.aten._to_copy.default}


class Wide(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if func in _CASTS and args[0].dtype == torch.float64:
            dtype = kwargs.get("dtype")
            if dtype is not None and dtype.is_floating_point:
                kwargs = {**kwargs, "dtype": torch.float64}
        elif torch.float64 in _floats(args) and kwargs.get("dtype") in (torch.float32, torch.bfloat16, torch.float16):
            kwargs = {**kwargs, "dtype": torch.float64}
        elif not func._schema.is_mutable and len(_floats(args, kwargs)) > 1:
            args, kwargs = _widened(args), _widened(kwargs)
        return func(*args, **kwargs)


def _floats(*values: Any) -> set[torch.dtype]:
    """The floating-point dtypes among the tensors."""
    found: set[torch.dtype] = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            found |= {value.dtype} if value.is_floating_point() else set()
        elif isinstance(value, (tuple, list)):
            found |= _floats(*value)
        elif isinstance(value, dict):
            found |= _floats(*value.values())
    return found


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _widened(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_widened(item) for item in value)
    return value


@contextmanager
def dense_flex_attention() -> Iterator[None]:
    """Flex attention with a dense mask: its eager form does not run under a dispatch mode."""
    import torch.nn.attention.flex_attention as flex

    original = flex.flex_attention

    def attention(
        query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, **kwargs: Any
    ) -> Any:
        if score_mod is not None or kwargs.get("return_lse"):
            return original(query, key, value, score_mod, block_mask, **kwargs)
        mask = None
        if block_mask is not None:
            sizes = (query.shape[-2], key.shape[-2])
            mask = flex.create_mask(block_mask.mask_mod, block_mask.shape[0], block_mask.shape[1], *sizes, device="cpu")
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask, scale=kwargs.get("scale"), enable_gqa=kwargs.get("enable_gqa", False)
        )

    flex.flex_attention = attention  # type: ignore[assignment]
    try:
        yield
    finally:
        flex.flex_attention = original
