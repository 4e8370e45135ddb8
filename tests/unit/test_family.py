"""Modules gathered together: one collective a step, and never a value of another step or input."""

from __future__ import annotations

import torch
from torch import nn

from vitrail.apply.planning import derive_plan
from vitrail.apply.prove import compare, randomised
from vitrail.apply.simulate import Ranks, run_all, shard_all
from vitrail.plan import resolve


class Modulated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Linear(13, 22)

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return x + self.shift(nn.functional.silu(c))[:, None]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(7, 13)
        self.blocks = nn.ModuleList(Modulated() for _ in range(3))
        self.twice = False
        self.skip = -1

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        c = self.time(t)
        for index, block in enumerate(self.blocks):
            if index != self.skip:
                x = block(x, c * 2 if self.twice and index == 1 else c)
        return x


def inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(2, 5, 22, dtype=torch.float64, generator=generator),
        "t": torch.randn(2, 7, dtype=torch.float64, generator=generator),
    }


def test_modules_with_one_input_share_a_collective() -> None:
    plan = derive_plan(Model(), {name: value.float() for name, value in inputs().items()}, keep=False)
    together = {rule.module: rule.together for rule in plan.rules if rule.style == "gathered"}
    assert together == {"time": "", "blocks.*.shift": "common input"}
    found = compare(plan, randomised(Model()), [inputs], 3)
    assert found.ok
    assert found.collectives == 2


def test_what_a_step_left_over_is_not_used_in_the_next() -> None:
    model = randomised(Model())
    plan = derive_plan(Model(), {name: value.float() for name, value in inputs().items()}, keep=False)
    ranks = Ranks(2)
    copies = shard_all(model, resolve(plan, model, 2), ranks)
    for step, skip in enumerate((-1, 0, 2, 1, -1)):
        for each in (model, *copies):
            each.skip = skip  # type: ignore[assignment]
        with torch.no_grad():
            expected = model(**inputs(step))
        for output in run_all(copies, ranks, lambda step=step: inputs(step)):  # type: ignore[misc]
            assert torch.allclose(output, expected, rtol=1e-12, atol=1e-12)


def test_an_input_that_somebody_changed_is_gathered_alone() -> None:
    model = randomised(Model())
    plan = derive_plan(Model(), {name: value.float() for name, value in inputs().items()}, keep=False)
    for each in (model,):
        each.twice = True  # type: ignore[assignment]
    assert compare(plan, model, [inputs], 2).ok
