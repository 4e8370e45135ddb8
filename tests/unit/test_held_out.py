"""Ten classes in styles the catalog does not have, written before it was known whether they derive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from support.held_out import cases
from torch import nn

from vitrail.apply.planning import derive_plan
from vitrail.apply.prove import compare, randomised
from vitrail.plan import resolve
from vitrail.plan.report import summarise


def wide(call: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in call.items()
    }


@pytest.mark.parametrize("name, build, inputs", cases(), ids=[name for name, _, _ in cases()])
def test_held_out_classes(name: str, build: Callable[[], nn.Module], inputs: list[dict[str, Any]]) -> None:
    plan = derive_plan(build(), inputs, keep=False)
    model = randomised(build(), seed=5)
    for degree in (2, 3, 4):
        assert compare(plan, model, [lambda call=call: wide(call) for call in inputs], degree).ok
    summary = summarise(resolve(plan, model, 2), model, [], torch.float32)
    assert [left.name for left in summary.leftovers if left.share > 0.001] == []
