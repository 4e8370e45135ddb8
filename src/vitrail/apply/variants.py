"""A call of a model at other sizes and with other values: what is right for one may be right by chance."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..plan.derive.record import tensors_in
from .prove import Arguments


def arguments_of(call: Mapping[str, Any]) -> Arguments:
    return lambda: converted(call, torch.float64)


def converted(value: Any, dtype: torch.dtype | None) -> Any:
    """Inputs on the CPU; floating-point ones in ``dtype`` if it is given. Meta tensors get random values."""
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            value = (
                torch.zeros(value.shape, dtype=value.dtype)
                if not value.is_floating_point()
                else torch.randn(value.shape, dtype=value.dtype, generator=torch.Generator().manual_seed(value.numel()))
            )
        value = value.detach().cpu()
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value.clone()
    if isinstance(value, Mapping):
        return {key: converted(item, dtype) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(converted(item, dtype) for item in value)
    return value


def mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` with every tensor in it changed, however deep; integers become plain ones."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[mapped(item, change) for item in value])
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(item, change) for item in value)
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def other_batches(call: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The call at two other batch sizes, where every tensor begins with the same one: a single sample, and one more.

    One sample hides what mixes samples; and with a batch that divides the heads, what belongs to a sample may pass for
    what belongs to a head.
    """
    batches = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors_in(call)}
    if len(batches) != 1 or batches == {0}:
        return []
    batch = batches.pop()

    def resized(tensor: torch.Tensor, size: int) -> torch.Tensor:
        more = tensor.flip(0)[:1] * 0.5 if tensor.is_floating_point() else tensor.flip(0)[:1]
        return torch.cat([tensor, *[more] * (size - batch)])[:size]

    sizes = (1, batch + 1) if batch > 1 else (2, 3)
    return [mapped(call, functools.partial(resized, size=size)) for size in sizes]


def varied(call: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The call with random numbers where it has the same everywhere: zeros hide what is done with them."""
    generator = torch.Generator().manual_seed(3)

    def is_flat(tensor: torch.Tensor) -> bool:
        if tensor.is_meta or not tensor.is_floating_point() or tensor.numel() < 2:
            return False
        return bool((tensor == tensor.flatten()[0]).all())

    def change(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator) if is_flat(tensor) else tensor

    changed: Mapping[str, Any] = mapped(call, change)
    return changed if any(map(is_flat, tensors_in(call))) else None


def longer(call: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The call with more tokens, and with larger images: where dims of one length stand, all of them grow."""
    tensors = list(tensors_in(call))
    lengths = {tensor.shape[1] for tensor in tensors if tensor.dim() == 3}
    variants = [
        mapped(call, functools.partial(_stretched, dim=1, length=length)) for length in sorted(lengths, reverse=True)
    ]
    if any(tensor.dim() >= 4 for tensor in tensors):
        variants.append(mapped(call, functools.partial(_stretched, dim=-1, length=None)))
    return variants


def _stretched(value: torch.Tensor, dim: int, length: int | None) -> torch.Tensor:
    """``value`` grown along ``dim``, if it has ``length`` there (or is an image, without one)."""
    if value.dim() < (2 if length is not None else 4):
        return value
    if length is not None and (value.shape[1] != length or value.dim() > 3):
        return value
    more = 2 * value.shape[dim] if length is None else value.shape[dim] // 2 + 2
    extra = torch.cat([value.flip(dim)] * (more // value.shape[dim] + 1), dim).narrow(dim, 0, more)
    return torch.cat([value, extra * 0.7 if value.is_floating_point() else extra], dim)
