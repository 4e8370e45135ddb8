"""Modules that hold a rank's slice. A plain module becomes one by taking its class, in place.

The module object stays, and with it hooks, names and ``isinstance``. Linear modules, which are most, have classes of
their own; others get theirs put together here.

Shapes: B batch and sequence dimensions, C channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from ..plan import Style
from ..plan.norms import Norm
from .collectives import Group, gather_columns, gather_dim, reduce_sum
from .family import Family
from .guard import GuardedSlice

F = TypeVar("F", bound=Callable[..., Any])


def _cached(function: F) -> F:
    """`functools.cache`, which to the type checker takes no classes."""
    return functools.cache(function)  # type: ignore[return-value]


class ColwiseLinear(GuardedSlice, nn.Linear):
    """Holds rows of the weight: its output is this rank's columns. No collective."""


class RowwiseLinear(GuardedSlice, nn.Linear):
    """Holds columns of the weight: its input is sharded, its output summed over the ranks. The bias is replicated."""

    group: Group

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        total = reduce_sum(nn.functional.linear(input, self.weight), self.group, self)
        return total if self.bias is None else total.add_(self.bias)


class GatheredLinear(GuardedSlice, nn.Linear):
    """Holds rows of the weight; every rank's columns are gathered, so input and output are whole."""

    group: Group
    degree: int
    family: Family | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.family is not None and not torch.compiler.is_compiling():
            made = self.family.output(self, input)
            if made is not None:
                return made
        local = nn.functional.linear(input, self.weight, self.bias)
        return gather_columns(local, self.degree, self.out_features, self.group, self)


class _Rowwise(GuardedSlice):
    """A convolution over this rank's input channels; the bias is added after the reduce."""

    group: Group
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        partial = self._conv_forward(input, self.weight, None)  # type: ignore[attr-defined]
        total = reduce_sum(partial, self.group, self)  # type: ignore[arg-type]
        if self.bias is None:
            return total
        return total.add_(self.bias.view(-1, *[1] * (self.weight.dim() - 2)))


class _GatheredConv(GuardedSlice):
    """A convolution that makes this rank's channels; all are gathered."""

    group: Group
    degree: int
    weight: nn.Parameter
    out_channels: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.weight.shape[0]:
            local = self._conv_forward(input, self.weight, self.bias)  # type: ignore[attr-defined]
        else:  # fewer channels than ranks: there is none here, which a convolution does not take
            one = self.weight.new_zeros(1, *self.weight.shape[1:])
            local = self._conv_forward(input, one, None)  # type: ignore[attr-defined]
            local = local.narrow(local.dim() - self.weight.dim() + 1, 0, 0)
        dim = local.dim() - self.weight.dim() + 1
        return gather_dim(local, dim, self.degree, self.out_channels, self.group, self)  # type: ignore[arg-type]


class GatheredEmbedding(GuardedSlice, nn.Embedding):
    """Holds columns of the table; the vectors looked up are gathered."""

    group: Group
    degree: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gather_columns(super().forward(input), self.degree, self.embedding_dim, self.group, self)


class VocabEmbedding(GuardedSlice, nn.Embedding):
    """Holds rows of the table, from ``first`` on; vectors of other rows are zeros here, and added up over the ranks."""

    group: Group
    first: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = self.weight.shape[0]
        local = input - self.first
        here = (local >= 0) & (local < rows)
        if rows:
            found = nn.functional.embedding(local.clamp(0, rows - 1), self.weight)
        else:  # fewer rows than ranks
            found = self.weight.new_zeros(*input.shape, self.embedding_dim)
        return reduce_sum(found * here.unsqueeze(-1).to(found.dtype), self.group, self)


class _ShardedNorm(GuardedSlice):
    """RMS or layer norm over a sharded last dim. Statistics are in float32 at least, and of the true width."""

    group: Group
    degree: int
    norm: Norm

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        norm = self.norm
        wide = input if input.dtype == torch.float64 else input.float()
        if norm.kind == "layer":
            wide, variance = self._centred(wide)
        else:
            squares = wide.square().sum(-1, keepdim=True)
            variance = reduce_sum(squares, self.group, self) / norm.width  # type: ignore[arg-type]
        eps = torch.finfo(input.dtype).eps if norm.eps is None else norm.eps
        result = wide * torch.rsqrt(variance + eps)
        if norm.weight is not None:
            result = result * (getattr(self, norm.weight).to(result.dtype) + norm.weight_offset)
        if norm.bias is not None:
            result = result + getattr(self, norm.bias).to(result.dtype)
        return result.to(input.dtype)

    def _centred(self, wide_BC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The input less its mean, and the variance. Each rank's mean and squares are combined after Chan et al.

        (1979), which loses no digits where the mean is large.
        """
        count = wide_BC.shape[-1]
        mean = wide_BC.mean(-1, keepdim=True)
        squares = (wide_BC - mean).square().sum(-1, keepdim=True)
        own = torch.cat([mean, squares, torch.full_like(mean, count)], -1)
        stacked = gather_columns(own, self.degree, 3 * self.degree, self.group, self)  # type: ignore[arg-type]
        means, sums, counts = stacked.view(*stacked.shape[:-1], self.degree, 3).unbind(-1)
        whole = (means * counts).sum(-1, keepdim=True) / self.norm.width
        total = (sums + counts * (means - whole).square()).sum(-1, keepdim=True)
        return wide_BC - whole, total / self.norm.width


def become(module: nn.Module, style: Style | None, degree: int, group: Group, norm: Norm | None = None) -> None:
    """Make ``module``, whose tensors are already the rank's slices, behave as ``style`` (None: as it is)."""
    values = vars(module)
    weight = getattr(module, "weight", None)
    if style in ("rowwise", "gathered", "norm", "vocab"):
        values["group"] = group
    if style in ("gathered", "norm"):
        values["degree"] = degree
    if isinstance(module, nn.Linear) and type(module) is nn.Linear and style is not None:
        assert isinstance(weight, torch.Tensor)
        if style == "colwise":
            module.__class__ = ColwiseLinear
            module.out_features = weight.shape[0]
        elif style == "rowwise":
            module.__class__ = RowwiseLinear
            module.in_features = weight.shape[1]
        else:
            module.__class__ = GatheredLinear
        return
    if style == "norm":
        values["norm"] = norm
        module.__class__ = sharded_class(type(module), _ShardedNorm)
    elif style == "rowwise":
        assert isinstance(weight, torch.Tensor)
        values["in_channels"] = weight.shape[1]
        module.__class__ = sharded_class(type(module), _Rowwise)
    elif style == "vocab":
        module.__class__ = table_class(type(module), VocabEmbedding)
    elif style == "gathered" and isinstance(module, nn.Embedding):
        module.__class__ = table_class(type(module), GatheredEmbedding)
    elif style == "gathered":
        module.__class__ = sharded_class(type(module), _GatheredConv)
    else:
        if style is not None:
            assert isinstance(weight, torch.Tensor)
            values["out_channels"] = weight.shape[0]
            if style == "depthwise":
                values["in_channels"] = values["groups"] = weight.shape[0]
        module.__class__ = sharded_class(type(module), GuardedSlice)


@_cached
def sharded_class(base: Any, root: Any) -> type[Any]:
    """``base`` with ``root`` in front, under its own name: what a sharded model becomes.

    Pipelines and savers look at the class' name and module, which therefore stay.
    """
    names: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (root, base), names)


@_cached
def table_class(base: Any, root: Any) -> type[Any]:
    """``root``, or ``base`` with ``root`` between it and the embedding: its forward then goes through ``root``'s."""
    if base is nn.Embedding:
        return root  # type: ignore[no-any-return]
    names: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base, root), names)
