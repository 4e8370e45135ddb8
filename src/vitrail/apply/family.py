"""Gathered modules that are given the same input: the first to run computes for all, and one collective serves them.

Shapes: B batch, C input features, N ranks, K a rank's columns of one module.
"""

from __future__ import annotations

import torch
from torch import nn

from .collectives import Group, gather_dim

# A vector a sample (a timestep's embedding), not a vector a token: the outputs of all modules are kept at once.
MOST_ROWS = 64
# How many steps the inputs are compared on a device, where a comparison waits for it; on the CPU they always are.
COMPARED_STEPS = 3


class Family:
    """The modules that share a collective, and what it gave in this step.

    That the inputs are the same was found when the plan was derived. It is checked again here, as somebody's hook may
    have changed one of them: a module whose input is another is gathered by itself.
    """

    def __init__(self, degree: int, group: Group) -> None:
        self.degree = degree
        self.group = group
        self.members: list[nn.Linear] = []
        self._ready: dict[int, torch.Tensor] = {}
        self._input: torch.Tensor | None = None
        self._steps = 0

    def join(self, module: nn.Module) -> None:
        assert isinstance(module, nn.Linear)
        self.members.append(module)

    def clear(self) -> None:
        """A new step begins."""
        self._ready.clear()
        self._input = None
        self._steps += 1

    def output(self, module: nn.Linear, input_BC: torch.Tensor) -> torch.Tensor | None:
        """The module's whole output; None when it has to be gathered alone."""
        if input_BC.numel() > MOST_ROWS * input_BC.shape[-1]:
            return None
        if self._input is None:
            self._fill(input_BC)
        elif not self._same(input_BC):
            return None
        return self._ready.pop(id(module), None)

    def _same(self, input_BC: torch.Tensor) -> bool:
        first = self._input
        assert first is not None
        if first.shape != input_BC.shape or first.dtype != input_BC.dtype:
            return False
        if input_BC.device.type != "cpu" and self._steps > COMPARED_STEPS:
            return True
        return torch.equal(first, input_BC)

    def _fill(self, input_BC: torch.Tensor) -> None:
        self._input = input_BC
        chunks = [-(-module.out_features // self.degree) for module in self.members]
        local = input_BC.new_zeros(*input_BC.shape[:-1], sum(chunks))
        start = 0
        for module, chunk in zip(self.members, chunks, strict=True):
            columns = nn.functional.linear(input_BC, module.weight, module.bias)
            local.narrow(-1, start, columns.shape[-1]).copy_(columns)
            start += chunk
        width = self.degree * sum(chunks)
        # Rank after rank, and in each module after module.
        gathered = gather_dim(local, -1, self.degree, width, self.group, self.members[0])
        by_rank_BNK = gathered.view(*input_BC.shape[:-1], self.degree, sum(chunks))
        start = 0
        for module, chunk in zip(self.members, chunks, strict=True):
            own = by_rank_BNK.narrow(-1, start, chunk).flatten(-2)
            self._ready[id(module)] = own.narrow(-1, 0, module.out_features).contiguous()
            start += chunk
