"""Wrappers that only hold models of the catalog: each is sharded by its own plan."""

from __future__ import annotations

import pytest
import torch
from diffusers import FluxMultiControlNetModel, SD3MultiControlNetModel
from diffusers.models.controlnets.controlnet_hunyuan import HunyuanDiT2DMultiControlNetModel
from torch import nn

from vitrail.apply.planning import known_plan
from vitrail.apply.prove import compare, randomised
from vitrail.apply.trial import trial_of
from vitrail.plan import catalog, resolve


@pytest.mark.parametrize(
    "wrapper, part",
    [
        (FluxMultiControlNetModel, "FluxControlNetModel"),
        (SD3MultiControlNetModel, "SD3ControlNetModel"),
        (HunyuanDiT2DMultiControlNetModel, "HunyuanDiT2DControlNetModel"),
    ],
)
def test_multi_controlnets(wrapper: type[nn.Module], part: str) -> None:
    trial = trial_of(catalog.probes(part)[0])
    model = randomised(wrapper([trial.model, trial_of(catalog.probes(part)[0]).model]))
    plan = known_plan(model)
    assert plan is not None
    resolved = resolve(plan, model, 3)
    assert {name.split(".")[1] for name in resolved.styles} == {"0", "1"}

    def arguments() -> dict[str, object]:
        given = dict(trial.arguments[0]())
        given["controlnet_cond"] = [given["controlnet_cond"]] * 2
        given["conditioning_scale"] = [1.0, 0.5]
        if wrapper is FluxMultiControlNetModel:
            given["controlnet_mode"] = [torch.zeros(2, dtype=torch.long)] * 2
        return given

    with torch.no_grad():
        found = compare(plan, model, [arguments], 3)
    assert found.ok, found
