"""The catalog: every class, on its probes, and a rotating part of it derived afresh."""

from __future__ import annotations

import datetime

import diffusers
import pytest
import torch
from support.torchvision_stand_in import stand_in

from vitrail.apply.classes import made, model_class
from vitrail.apply.planning import prove_trial
from vitrail.apply.trial import trial_of
from vitrail.plan import catalog, resolve
from vitrail.plan.report import summarise
from vitrail.plan.skeleton import skeleton
from vitrail.plan.structure import key_of

SLICES = 12
TODAY = datetime.date.today().toordinal() % SLICES


def test_every_class_with_a_probe_has_a_plan() -> None:
    assert catalog.probe_names() == catalog.names()
    assert len(catalog.names()) >= 80


@pytest.mark.parametrize("name", catalog.names())
def test_plans_fit_their_probes_at_any_degree_up_to_their_heads(name: str) -> None:
    stand_in()
    probes = {probe.name: probe for probe in catalog.probes(name)}
    for entry in catalog.entries(name):
        probe = probes[entry.probe]
        model = skeleton(lambda probe=probe: made(model_class(name), probe.config)).eval()  # type: ignore[misc]
        assert key_of(model) == entry.key, "the sources or the structure changed: python tools/build_catalog.py"
        resolved = resolve(entry.plan, model, 3)
        summary = summarise(resolved, model, [], torch.bfloat16)
        assert summary.full, [left for left in summary.leftovers if left.share > 0.001]


@pytest.mark.parametrize("name", [name for index, name in enumerate(catalog.names()) if index % SLICES == TODAY])
def test_a_part_of_the_catalog_derived_afresh_is_the_same(name: str) -> None:
    stand_in()
    diffusers.utils.logging.set_verbosity_error()
    probes = {probe.name: probe for probe in catalog.probes(name)}
    for entry in catalog.entries(name)[:2]:
        plan, comparisons = prove_trial(trial_of(probes[entry.probe]))
        assert all(comparison.ok for comparison in comparisons)
        assert {**plan.to_document(), "verified": {}} == {**entry.plan.to_document(), "verified": {}}
