"""Models that are too large to be compared whole: block by block, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrail
from vitrail.apply import planning, trial
from vitrail.errors import PlanError
from vitrail.plan import Plan, valid_degrees

WIDTH, HEADS = 30, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 80)
        self.down = nn.Linear(80, WIDTH)

    def bias(self, logits: Tensor) -> Tensor:
        return logits

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        q, k, v = self.qkv(x * scale).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        weights = self.bias(q @ k.transpose(-1, -2)).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        made: Tensor = x + self.down(F.gelu(self.up(x)))
        return made


class Slopes(Block):
    def bias(self, logits: Tensor) -> Tensor:
        distance = torch.arange(logits.shape[-1], dtype=logits.dtype)
        slopes = 0.5 ** torch.arange(logits.shape[1], dtype=logits.dtype)
        return logits - slopes[:, None, None] * (distance[:, None] - distance).abs()


class Model(nn.Module):
    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(4))
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, scale=scale[:, None, None])
        made: Tensor = self.head(x)
        return made


class Loose(nn.Module):
    """Nothing in it is a block: what one module makes sharded, another takes so."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 900), nn.Linear(900, 6)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(F.gelu(self.up(x)))
        return made


CALL = {"x": torch.randn(2, 7, 6), "scale": torch.rand(2)}


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (planning, trial):
        monkeypatch.setattr(module, "most_numel", lambda: 10_000)


def derived(model: nn.Module, call: dict[str, Any], **more: Any) -> Plan:
    return vitrail.derive_plan(model, call, keep=False, **more)


@pytest.mark.usefixtures("small_machine")
def test_the_plan_is_the_same_as_when_it_is_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    by_blocks = derived(Model(), CALL)
    monkeypatch.undo()
    whole = derived(Model(), CALL)
    assert by_blocks.verified["blocks"] == 4  # the embedder, two of the blocks, which are all alike, and the head
    assert by_blocks.verified["degrees"] == [2, 3, 4]
    assert by_blocks.verified["error"] <= 1e-9
    assert "blocks" not in whole.verified
    assert {**by_blocks.to_document(), "verified": None} == {**whole.to_document(), "verified": None}
    assert valid_degrees(by_blocks, Model()) == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("small_machine")
def test_what_is_wrong_in_a_block_is_not_sharded() -> None:
    plan = derived(Model(Slopes), CALL)
    styles = {rule.module: rule.style for rule in plan.rules}
    assert styles["blocks.*.up"] == "colwise"
    assert styles["blocks.*.qkv"] == "gathered"


@pytest.mark.usefixtures("small_machine")
def test_a_block_that_is_too_large_is_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            made: Tensor = self.model(x, scale)
            return made

    plan = derived(Outer(), CALL)
    assert {rule.module: rule.style for rule in plan.rules}["model.blocks.*.qkv"] == "colwise"


@pytest.mark.usefixtures("small_machine")
def test_what_is_cut_across_blocks_is_gathered_unless_one_insists() -> None:
    plan = derived(Loose(), {"x": torch.randn(2, 6)})
    assert {rule.module: rule.style for rule in plan.rules} == {"up": "gathered", "down": "gathered"}
    assert plan.verified["blocks"] == 2
    plan = derived(Loose(), {"x": torch.randn(2, 6)}, unproven=True)
    assert {rule.module: rule.style for rule in plan.rules} == {"up": "colwise", "down": "rowwise"}
    assert not plan.verified


@pytest.mark.usefixtures("small_machine")
def test_a_model_of_which_no_part_can_be_compared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "most_numel", lambda: 10)
    with pytest.raises(PlanError, match="too large to compare a derived plan's values, and no part of it"):
        derived(Loose(), {"x": torch.randn(2, 6)})


def test_a_machine_can_compare_some() -> None:
    from vitrail.apply.blocks import most_numel

    assert 60_000_000 <= most_numel() <= 1_000_000_000


@pytest.mark.usefixtures("small_machine")
def test_verify_does_not_call_right_what_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.errors import UnsupportedError
    from vitrail.run.subject import Subject
    from vitrail.verify.trials import cases

    with pytest.raises(UnsupportedError, match="Model is too large to be compared in float64"):
        cases(Subject("Model", Model, Model(), [CALL]), 2)


def test_a_machine_that_has_more_memory_a_moment_later_still_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "most_numel", lambda: 10_000)  # planning would run it whole
    assert derived(Model(), CALL).verified["blocks"] == 4
