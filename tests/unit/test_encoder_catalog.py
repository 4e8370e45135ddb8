"""The encoders that pipelines load: all of them are in the catalog, or are not for a reason."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

from vitrail.apply.classes import made, model_class
from vitrail.apply.loaded import loaded_classes
from vitrail.apply.trial import probe_trials
from vitrail.errors import UsageError
from vitrail.plan import catalog
from vitrail.plan.catalog import lookup
from vitrail.plan.catalog.absent import ABSENT, BASES
from vitrail.plan.configuration import configuration, with_words
from vitrail.plan.probe import evaluate, inputs_for
from vitrail.plan.skeleton import skeleton
from vitrail.plan.structure import structure

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
# transformers' own styles for what is cut as here. A norm of each head's vector is whole, and is not among them.
STYLES = {"colwise": "colwise", "rowwise": "rowwise", "colwise_gather_output": "gathered"}


def test_every_class_that_pipelines_load_is_catalogued_or_absent_for_a_reason() -> None:
    loaded = {name for found in loaded_classes() for name in BASES.get(found, (found,))}
    assert len(loaded) >= 35
    assert loaded >= {"T5EncoderModel", "CLIPTextModel", "Qwen2_5_VLForConditionalGeneration", "Gemma2Model"}
    assert not loaded - set(catalog.names()) - set(ABSENT)
    assert not set(ABSENT) & set(catalog.names())
    assert set(ABSENT) <= loaded
    assert "FluxPipeline" in loaded_classes()["T5EncoderModel"]


def test_a_class_that_a_pipeline_makes_for_itself_is_found() -> None:
    entry, model = first("T5GemmaEncoder")
    assert type(model).__module__ == "diffusers.pipelines.prx"
    assert lookup(model) is entry.plan
    with pytest.raises(UsageError, match="no class T5GemmaDecoderEncoder"):
        model_class("T5GemmaDecoderEncoder")


def test_a_structure_no_probe_has_takes_the_numbers_of_one_that_has() -> None:
    probe = catalog.probes("Qwen2_5_VLForConditionalGeneration")[0]
    config = with_words(probe.config, {"text_config": {"hidden_act": "gelu"}})
    model = skeleton(lambda: made(model_class(probe.model), config)).eval()
    assert lookup(model) is None
    (trial,) = probe_trials(model)
    assert trial.model.config.text_config.hidden_act == "gelu"  # type: ignore[union-attr]
    assert trial.model.get_parameter("lm_head.weight").shape == (97, 108)


def first(name: str) -> tuple[catalog.Entry, nn.Module]:
    entry, probe = catalog.entries(name)[0], catalog.probes(name)[0]
    assert entry.probe == probe.name
    return entry, skeleton(lambda: made(model_class(name), probe.config)).eval()


@pytest.mark.parametrize(
    "name, prefix",
    [("Qwen3ForCausalLM", "model."), ("Mistral3Model", "language_model."), ("Qwen2_5_VLTextModel", "")],
)
def test_transformers_own_plan_cuts_the_same_modules_the_same_way(name: str, prefix: str) -> None:
    entry, model = first(name)
    ours = {rule.module: rule.style for rule in entry.plan.rules}
    text = model.get_submodule(prefix.rstrip("."))
    theirs = {
        f"{prefix}{module}": STYLES[style]
        for module, style in text.config.base_model_tp_plan.items()
        if style in STYLES
    }
    assert len(theirs) >= 7
    assert {module: ours.get(module) for module in theirs} == theirs
    beyond = {module for module in ours if module.startswith(prefix)} - set(theirs)
    assert f"{prefix}embed_tokens" in beyond  # which theirs leaves whole


def test_a_fused_projection_that_transformers_gathers_is_cut_here() -> None:
    entry, model = first("GlmModel")
    fused = ["layers.*.mlp.gate_up_proj", "layers.*.mlp.down_proj"]
    theirs = [model.config.base_model_tp_plan[module] for module in fused]  # type: ignore[union-attr, index]
    assert theirs == ["colwise_gather_output", "rowwise_split_input"]
    ours = {rule.module: (rule.style, len(rule.parts)) for rule in entry.plan.rules}
    assert [ours[module] for module in fused] == [("colwise", 2), ("rowwise", 1)]


def test_the_configuration_of_a_part_is_told_by_its_type_too() -> None:
    _, model = first("T5GemmaEncoderModel")
    assert "transformers_version" not in configuration(model)["encoder"]
    assert structure(model)["config"]["encoder"]["hidden_activation"] == "gelu_pytorch_tanh"


@pytest.mark.parametrize("pipeline", ["FLUX.2-dev", "FLUX.2-klein-4B", "Qwen-Image", "SD3.5-large"])
def test_published_sizes_are_shared_out(pipeline: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    encoders = importlib.import_module("encoders")
    for row in encoders.measure(pipeline, [4, 8]):
        assert 1 <= row["largest_over_ideal"] <= 1.05


def test_masks_as_tokenizers_make_them() -> None:
    made = inputs_for({"end": "padded[batch, text]", "front": "left[batch, text]"}, {"batch": 3, "text": 5})
    assert made["end"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert made["front"].tolist() == [[1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert made["end"].dtype == torch.int64
    (single,) = inputs_for({"mask": "padded[1, text]"}, {"text": 1})["mask"].tolist()
    assert single == [1]


def test_an_expression_asks_a_configuration_within_the_configuration() -> None:
    assert evaluate("vision_config.patch_size ** 2 * 3", {"vision_config": {"patch_size": 4}}) == 48
