"""Linear modules that hold a rank's slice. A plain ``nn.Linear`` becomes one by taking its class, in place.

The module object stays, and with it hooks, names and ``isinstance(module, nn.Linear)``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ..plan import Style
from .collectives import gather_columns, reduce_sum
from .guard import GuardedSlice


class ColwiseLinear(GuardedSlice, nn.Linear):
    """Holds rows of the weight: its output is this rank's columns. No collective."""


class RowwiseLinear(GuardedSlice, nn.Linear):
    """Holds columns of the weight: its input is sharded, its output summed over the ranks. The bias is replicated."""

    group: str

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        total = reduce_sum(nn.functional.linear(input, self.weight), self.group, self)
        return total if self.bias is None else total.add_(self.bias)


class GatheredLinear(GuardedSlice, nn.Linear):
    """Holds rows of the weight; every rank's columns are gathered, so input and output are whole."""

    group: str
    degree: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        local = nn.functional.linear(input, self.weight, self.bias)
        return gather_columns(local, self.degree, self.out_features, self.group, self)


def become(module: nn.Linear, style: Style, degree: int, group: str) -> None:
    """Make ``module``, whose parameters are already the rank's slices, behave as ``style``."""
    if style == "colwise":
        module.__class__ = ColwiseLinear
        module.out_features = module.weight.shape[0]
        return
    if style == "rowwise":
        module.__class__ = RowwiseLinear
        module.in_features = module.weight.shape[1]
    else:
        module.__class__ = GatheredLinear
        module.__dict__["degree"] = degree
    module.__dict__["group"] = group


@functools.cache
def sharded_class(base: type[Any], root: type[Any]) -> type[Any]:
    """``base`` with ``root`` in front, under its own name: what a sharded model becomes.

    Pipelines and savers look at the class' name and module, which therefore stay.
    """
    names: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (root, base), names)
