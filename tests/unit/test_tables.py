"""Tables of embeddings that do more than look up: cut like plain ones as long as they go through the lookup."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import vitrail
from vitrail.apply.modules import VocabEmbedding, table_class
from vitrail.errors import PlanError, ShardedModelError
from vitrail.plan import Plan, resolve
from vitrail.plan.report import summarise
from vitrail.plan.tables import is_table

CALLS = [{"ids": torch.tensor([[0, 1, 2, 16], [1, 1, 0, 2]])}, {"ids": torch.tensor([[3, 5, 16, 9, 4]])}]


class Scaled(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 7.5


class WithSpecial(Scaled):
    """One token has a vector of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.special = nn.Parameter(torch.zeros(self.embedding_dim))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        found = super().forward(input)
        return torch.where((input == 16)[..., None], self.special, found)


class ByItself(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(input, self.weight) * 7.5


class Twice(nn.Embedding):
    """It reads its weight beside the lookup."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + self.weight.mean(0)


class Reader(nn.Module):
    def __init__(self, table: type[nn.Embedding], tied: bool) -> None:
        super().__init__()
        self.table = table(17, 14)
        self.mix = nn.Linear(14, 14)
        self.head = nn.Linear(14, 17, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.table(ids)))


@pytest.mark.parametrize("table", [Scaled, WithSpecial])
@pytest.mark.parametrize("tied", [False, True])
def test_a_table_that_adds_to_the_lookup_is_cut(table: type[nn.Embedding], tied: bool) -> None:
    model = Reader(table, tied)
    plan = vitrail.derive_plan(model, CALLS, keep=False)
    assert {rule.module: rule.style for rule in plan.rules}["table"] == ("vocab" if tied else "gathered")
    assert plan.verified["degrees"] == [2, 3, 4]
    assert plan.verified["error"] < 1e-9
    assert summarise(resolve(plan, model, 3), model, [], torch.float32).full


@pytest.mark.parametrize("table", [ByItself, Twice])
def test_one_that_reads_its_weight_itself_is_held(table: type[nn.Embedding]) -> None:
    plan = vitrail.derive_plan(Reader(table, False), CALLS, keep=False)
    assert "table.weight" in plan.held
    assert "table" not in {rule.module for rule in plan.rules}
    assert plan.verified["error"] < 1e-9


def test_which_tables_go_through_the_lookup() -> None:
    tables = [nn.Embedding, Scaled, WithSpecial, ByItself]
    assert [is_table(table(3, 2)) for table in tables] == [True, True, True, False]
    replaced = Scaled(3, 2)
    vars(replaced)["forward"] = lambda ids: ids
    assert not is_table(replaced)
    assert not is_table(nn.Linear(3, 2))


def test_a_plan_that_cuts_a_table_which_looks_up_by_itself_is_refused() -> None:
    plan = {"vitrail_plan": 1, "model": "Reader", "axes": {}, "modules": {"table": {"style": "gathered"}}}
    with pytest.raises(PlanError, match="'table', which is a ByItself"):
        resolve(Plan.from_document(plan), Reader(ByItself, False), 2)
    assert resolve(Plan.from_document(plan), Reader(WithSpecial, False), 2).styles == {"table": "gathered"}


def test_a_sharded_one_keeps_its_name_and_its_guard() -> None:
    table = Scaled(17, 14)
    table.__class__ = table_class(Scaled, VocabEmbedding)
    assert (type(table).__name__, type(table).__module__) == ("Scaled", __name__)
    assert isinstance(table, Scaled)
    assert isinstance(table, VocabEmbedding)
    with pytest.raises(ShardedModelError):
        copy.deepcopy(table)
    with pytest.raises(ShardedModelError):
        table.state_dict()
