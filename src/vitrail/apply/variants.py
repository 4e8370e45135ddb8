"""A call of a model at other sizes and with other values: what is right for one may be right by chance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

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


def other_batches(call: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The call at two other batch sizes, where every tensor begins with the same one: a single sample, and one more.

    One sample hides what mixes samples; and with a batch that divides the heads, what belongs to a sample may pass for
    what belongs to a head.
    """
    batches = {value.shape[0] if value.dim() else 0 for value in call.values() if isinstance(value, torch.Tensor)}
    if len(batches) != 1 or batches == {0}:
        return []
    batch = batches.pop()

    def resized(value: Any, size: int) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        more = value.flip(0)[:1] * 0.5 if value.is_floating_point() else value.flip(0)[:1]
        return torch.cat([value, *[more] * (size - batch)])[:size]

    sizes = (1, batch + 1) if batch > 1 else (2, 3)
    return [{name: resized(value, size) for name, value in call.items()} for size in sizes]


def varied(call: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The call with random numbers where it has the same everywhere: zeros hide what is done with them."""
    generator = torch.Generator().manual_seed(3)

    def flat(value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and not value.is_meta
            and (value.numel() > 1 and bool((value == value.flatten()[0]).all()))
        )

    if not any(flat(value) for value in call.values()):
        return None
    return {
        name: torch.randn(value.shape, dtype=value.dtype, generator=generator) if flat(value) else value
        for name, value in call.items()
    }


def longer(call: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The call with more tokens, and with larger images: where dims of one length stand, all of them grow."""
    tensors = [value for value in call.values() if isinstance(value, torch.Tensor)]
    lengths = {value.shape[1] for value in tensors if value.dim() == 3}
    variants = [
        {name: _stretched(value, 1, length) for name, value in call.items()} for length in sorted(lengths, reverse=True)
    ]
    if any(value.dim() >= 4 for value in tensors):
        variants.append({name: _stretched(value, -1, None) for name, value in call.items()})
    return list(variants)


def _stretched(value: Any, dim: int, length: int | None) -> Any:
    """``value`` grown along ``dim``, if it has ``length`` there (or is an image, without one)."""
    if not isinstance(value, torch.Tensor) or value.dim() < (2 if length is not None else 4):
        return value
    if length is not None and (value.shape[1] != length or value.dim() > 3):
        return value
    more = 2 * value.shape[dim] if length is None else value.shape[dim] // 2 + 2
    extra = torch.cat([value.flip(dim)] * (more // value.shape[dim] + 1), dim).narrow(dim, 0, more)
    return torch.cat([value, extra * 0.7 if value.is_floating_point() else extra], dim)
