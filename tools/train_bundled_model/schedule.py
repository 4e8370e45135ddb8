"""What all trained stages share: Muon for matrices, AdamW for the rest, one learning-rate schedule, fast attention."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.attention import SDPBackend, sdpa_kernel


class Optimizer:
    """One step of both optimisers; `scale` multiplies both learning rates.

    `torch.optim.Muon` takes two-dimensional weights only and treats each as one matrix. Convolutions are given to it
    flattened, and with `rows` a fused weight (queries, keys, values and feed-forward in one) as the separate matrices
    it is made of. Both are aliases of the model's own memory, so what Muon updates in place is the model.
    """

    def __init__(
        self,
        matrices: Iterable[Parameter],
        others: Iterable[Parameter],
        *,
        matrix_rate: float,
        other_rate: float,
        weight_decay: float = 0.0,
        rows: int | None = None,
    ) -> None:
        self._others = list(others)
        self._aliases = [(weight, [Parameter(part) for part in _split(weight.detach(), rows)]) for weight in matrices]
        parts = [part for _, aliases in self._aliases for part in aliases]
        muon = torch.optim.Muon(parts, lr=matrix_rate, weight_decay=weight_decay)
        adamw = torch.optim.AdamW(self._others, lr=other_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self._rates: list[tuple[torch.optim.Optimizer, float]] = [(muon, matrix_rate), (adamw, other_rate)]
        self._rows = rows

    def step(self, loss: Tensor, scale: float) -> None:
        torch.autograd.backward(loss)
        for weight, parts in self._aliases:
            if weight.grad is None:
                raise RuntimeError("a matrix given to the optimiser took no part in the loss")
            for part, grad in zip(parts, _split(weight.grad.contiguous(), self._rows), strict=True):
                part.grad = grad
        torch.nn.utils.clip_grad_norm_(self._others, 1.0)
        for optimizer, rate in self._rates:
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()
        for weight in (*(weight for weight, _ in self._aliases), *self._others):
            weight.grad = None


def _split(weight: Tensor, rows: int | None) -> tuple[Tensor, ...]:
    # view, not reshape: a copy would be trained in the model's place.
    matrix = weight.view(weight.shape[0], -1)
    return torch.split(matrix, rows) if rows else (matrix,)


def rate_scale(step: int, steps: int, *, warmup: int, hold: float) -> float:
    """Linear warm-up, full rate for the `hold` share of the run, then linearly to one percent."""
    done = step / steps
    decay = 1.0 if done < hold else 0.01 + 0.99 * (1 - done) / (1 - hold)
    return min(1.0, (step + 1) / warmup) * decay


def short_attention() -> AbstractContextManager[None]:
    """For sequences as short as these, the CPU's fused attention is slow, its backward above all."""
    return sdpa_kernel(SDPBackend.MATH)
