"""Which modules are norms over their last dimension: told by what they compute, not by what they are called.

A norm whose dimension is sharded needs its statistics over the true width: the ranks' sums are added up. So the module
must be known to be ``x * rsqrt(mean(x^2) + eps) * weight`` or layer norm. It is run once, in float64 on random numbers,
and compared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

# Some classes compute their statistics in float32 whatever comes in.
_CLOSE = 2e-6


@dataclass(frozen=True)
class Norm:
    """``eps`` is None for the input dtype's own; ``weight`` and ``bias`` are attribute names.

    ``weight_offset`` is 1 for norms that scale by ``1 + weight``.
    """

    kind: Literal["rms", "layer"]
    eps: float | None
    width: int
    weight: str | None
    bias: str | None
    weight_offset: float = 0.0


_seen: dict[object, Norm | None] = {}


def recognise(module: nn.Module, width: int) -> Norm | None:
    """The norm that ``module`` computes over a last dimension of ``width`` elements, or None. Works on meta modules.

    Modules of one class with equal settings are tried once.
    """
    settings = {
        name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str, tuple))
    }
    key = (type(module), width, repr(sorted(settings.items())), tuple(name for name, _ in module.named_parameters()))
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return _try(module, width)
    if key not in _seen:
        _seen[key] = _try(module, width)
    return _seen[key]


def _try(module: nn.Module, width: int) -> Norm | None:
    if any(module.children()):
        return None
    parameters = {name: parameter for name, parameter in module.named_parameters() if parameter is not None}
    if any(tuple(parameter.shape) != (width,) for parameter in parameters.values()) or len(parameters) > 2:
        return None
    if any(True for _ in module.buffers()) or "forward" in vars(module):
        return None
    try:
        trial = _random_copy(module)
        # Rows of unlike size, so that eps matters in the last.
        source = torch.randn(3, 2, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.3
        source *= torch.tensor([3.0, 0.1, 2e-3], dtype=torch.float64)[:, None, None]
        with torch.no_grad():
            given = trial(source)
    except Exception:  # noqa: BLE001  a module that wants something else than one tensor is no norm
        return None
    if not isinstance(given, torch.Tensor) or given.shape != source.shape or width < 2:
        return None
    distances = {}
    for norm in _candidates(trial, width, parameters):
        expected = whole(norm, source, trial)
        error = (given - expected).abs().amax(-1) / expected.abs().amax(-1)
        distances[norm] = float(error.max()) if bool(error.isfinite().all()) else math.inf
    best = min(distances, key=lambda norm: distances[norm])
    return best if distances[best] <= _CLOSE else None


def _random_copy(module: nn.Module) -> nn.Module:
    memo = {
        id(parameter): nn.Parameter(torch.empty(parameter.shape, dtype=torch.float64), requires_grad=False)
        for parameter in module.parameters()
    }
    trial = copy.deepcopy(module, memo)
    trial._forward_hooks.clear()
    trial._forward_pre_hooks.clear()
    generator = torch.Generator().manual_seed(0)
    for parameter in trial.parameters():
        parameter.data.copy_(torch.rand(parameter.shape, dtype=torch.float64, generator=generator) + 0.5)
    return trial


def _candidates(module: nn.Module, width: int, parameters: dict[str, nn.Parameter]) -> Iterator[Norm]:
    floats = [float(value) for name, value in vars(module).items() if isinstance(value, float) and 0 < value < 0.1]
    choices: list[float | None] = [*floats, None, 1e-6, 1e-5, 1e-8, 1e-12, torch.finfo(torch.float32).eps, 0.0]
    names = list(parameters)
    orders: list[tuple[str | None, str | None]] = [(None, None)]
    if len(names) == 1:
        orders = [(names[0], None), (None, names[0])]
    elif len(names) == 2:
        orders = [(names[0], names[1]), (names[1], names[0])]
    for kind in ("rms", "layer"):
        for eps in dict.fromkeys(choices):
            for weight, bias in orders:
                for offset in (0.0, 1.0) if weight else (0.0,):
                    yield Norm(kind, eps, width, weight, bias, offset)


def whole(norm: Norm, source: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """What the norm gives for an input that is not sharded."""
    if norm.kind == "layer":
        source = source - source.mean(-1, keepdim=True)
    eps = torch.finfo(source.dtype).eps if norm.eps is None else norm.eps
    result = source * torch.rsqrt(source.square().mean(-1, keepdim=True) + eps)
    if norm.weight:
        result = result * (getattr(module, norm.weight) + norm.weight_offset)
    return result + getattr(module, norm.bias) if norm.bias else result
