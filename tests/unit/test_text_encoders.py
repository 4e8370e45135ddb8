"""Text encoders of transformers take plans as transformers of diffusers do: proven, full, with their tables."""

from __future__ import annotations

import pytest
import torch
from support.encoders import CASES, call
from torch import nn

import vitrail
from vitrail.apply.install import slice_tensors
from vitrail.errors import PlanError
from vitrail.plan import Plan, resolve
from vitrail.plan.configuration import configuration
from vitrail.plan.report import summarise


@pytest.mark.parametrize("name", CASES)
def test_its_plan_is_full_and_proven(name: str) -> None:
    model = CASES[name]()
    plan = vitrail.derive_plan(model, [call(2, 7), call(3, 11)], keep=False)
    assert plan.verified["degrees"][:3] == [2, 3, 4]
    assert plan.verified["error"] < 1e-9
    for degree in (2, 3, 4):
        summary = summarise(resolve(plan, model, degree), model, (degree,), torch.float32)
        assert summary.full, summary.leftovers
        assert summary.ratio < 1.06 or 6 % degree  # heads that do not divide are shared out raggedly
    assert Plan.from_json(plan.to_json()) == plan or Plan.from_json(plan.to_json()).to_document() == plan.to_document()


@pytest.mark.parametrize(
    "name, tables",
    [
        ("Qwen3ForCausalLM, tied", ("model.embed_tokens", "lm_head")),
        ("T5EncoderModel", ("shared", "encoder.embed_tokens")),
    ],
)
def test_a_tied_table_stays_one_tensor(name: str, tables: tuple[str, str]) -> None:
    model = CASES[name]()
    plan = vitrail.derive_plan(model, [call(2, 7), call(3, 11)], keep=False)
    resolved = resolve(plan, model, 3)
    before = model.get_submodule(tables[0]).weight.shape
    slice_tensors(model, resolved.shards, 1)
    first, second = (model.get_submodule(table).weight for table in tables)
    assert first is second
    assert first.numel() < before.numel() / 2


def test_a_tied_table_cannot_be_cut_under_one_name() -> None:
    model = CASES["Qwen3ForCausalLM, tied"]()
    plan = {"vitrail_plan": 1, "model": "Qwen3ForCausalLM", "axes": {}, "attributes": {}, "whole": {}}
    alone = Plan.from_document({**plan, "modules": {"lm_head": {"style": "gathered"}}})
    with pytest.raises(
        PlanError, match=r"lm_head.weight is tied to model.embed_tokens.weight, so it cannot be cut alone"
    ):
        resolve(alone, model, 2)
    across = {"lm_head": {"style": "gathered"}, "model.embed_tokens": {"style": "gathered"}}
    with pytest.raises(PlanError, match="cannot be cut alone") as error:
        resolve(Plan.from_document({**plan, "modules": across}), model, 2)
    assert "takes the style vocab" in str(error.value.hint)


def test_fewer_rows_than_ranks() -> None:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(3, 12)
            self.head = nn.Linear(12, 3, bias=False)
            self.head.weight = self.table.weight
            self.mix = nn.Linear(12, 12)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.mix(self.table(ids)))

    plan = vitrail.derive_plan(Tiny(), {"ids": torch.tensor([[0, 1, 2, 2], [1, 1, 0, 2]])}, keep=False)
    assert {rule.module: rule.style for rule in plan.rules}["table"] == "vocab"
    assert plan.verified["error"] < 1e-9


def test_a_configuration_is_what_shapes_the_model() -> None:
    model = CASES["Qwen3ForCausalLM, tied"]()
    config = configuration(model)
    assert (config["hidden_size"], config["tie_word_embeddings"]) == (60, True)
    assert not {"transformers_version", "dtype", "use_cache", "output_hidden_states"} & set(config)
    assert configuration(nn.Linear(1, 1)) == {}
