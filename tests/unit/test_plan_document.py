"""The plan document: what is read is what was written, and what is wrong is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.models import FLUX2

from vitrail.errors import PlanError
from vitrail.plan import Plan
from vitrail.plan.catalog import entries, lookup, names


def document(**changes: Any) -> dict[str, Any]:
    return {
        "vitrail_plan": 1,
        "model": "Tiny",
        "axes": {"heads": {"size": 4, "width": 2}},
        "modules": {"blocks.*.q": {"style": "colwise", "parts": ["heads"]}},
        **changes,
    }


@pytest.mark.parametrize("name", names())
def test_catalogued_plans_survive_a_round_trip(name: str) -> None:
    assert entries(name)
    for entry in entries(name):
        assert entry.plan.model == name
        assert entry.plan.verified["error"] <= 1e-9
        assert {2, 3} <= set(entry.plan.verified["degrees"])
        assert Plan.from_json(entry.plan.to_json(), source="catalog") == entry.plan


def test_the_catalog_is_for_diffusers_own_classes_alone() -> None:
    from diffusers import Flux2Transformer2DModel

    class Mine(Flux2Transformer2DModel):
        pass

    assert lookup(Flux2Transformer2DModel(**FLUX2)) is not None
    assert lookup(Mine(**FLUX2)) is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vitrail_plan": 7}, "has format 7; this vitrail reads format 1"),
        ({"model": ""}, "does not name the model's class"),
        ({"modules": {"q": {"parts": ["heads"]}}}, "module 'q' has no style"),
        ({"layers": {}}, r"unknown keys \['layers'\]"),
        ({"modules": {"q": {"style": "diagonal", "parts": ["heads"]}}}, "'q' has style 'diagonal'"),
        ({"modules": {"q": {"style": "colwise"}}}, "'q' is colwise, which takes the parts"),
        ({"modules": {"q": {"style": "gathered", "parts": ["heads"]}}}, "'q' is gathered, which takes no parts"),
        ({"modules": {"q": {"style": "colwise", "parts": ["tails"]}}}, "'q' names axis 'tails'"),
        ({"modules": {"q": {"style": "colwise", "parts": [0]}}}, "'q' has part 0"),
        ({"modules": {"q": {"style": "colwise", "parts": ["heads", 1]}}}, "mixes axes and proportions"),
        ({"modules": {"q": {"style": "colwise", "parts": ["heads"], "dim": 1}}}, r"unknown keys \['dim'\]"),
        ({"modules": ["q"]}, "'modules' must be an object"),
        ({"attributes": {"blocks.*.heads": "tails"}}, "attribute 'blocks.*.heads' names axis 'tails'"),
        ({"attributes": {"blocks.": "heads"}}, "'blocks.' must be a module's name, a dot and the attribute"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(document(**changes)))


def test_keys_that_come_twice_are_refused() -> None:
    text = '{"vitrail_plan": 1, "model": "Tiny", "modules": {"q": {"style": "gathered"}, "q": {"style": "gathered"}}}'
    with pytest.raises(PlanError, match="has the key 'q' twice in one object"):
        Plan.from_json(text)


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(PlanError, match="is not JSON"):
        Plan.from_json(None)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="is not JSON"):
        Plan.from_json("{")
    with pytest.raises(PlanError, match="'vitrail_plan' is missing"):
        Plan.from_json("[]")
