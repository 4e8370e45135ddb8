"""Classes of transformers that pipelines of diffusers load and that have no plan in the catalog, and why."""

from __future__ import annotations

from collections.abc import Mapping

_TWO_WIDTHS = (
    "heads of its sliding and its global layers have two widths: the plan that is derived names every layer, and so "
    "serves no other depth"
)

ABSENT: Mapping[str, str] = {
    "BlipForConditionalGeneration": "it captions a picture before the run, word by word, and stays whole",
    "DPTForDepthEstimation": "it estimates depth once, mostly by convolutions over pixels, and stays whole",
    "Gemma4ForConditionalGeneration": _TWO_WIDTHS,
    "Gemma4UnifiedForConditionalGeneration": _TWO_WIDTHS,
    "SpeechT5HifiGan": "a vocoder: convolutions over samples, which stay whole",
    "VitsModel": "it speaks the transcript with durations drawn from its own values, and stays whole",
}

# Pipelines that are annotated with a base class, and what their checkpoints have.
BASES: Mapping[str, tuple[str, ...]] = {
    "Gemma2PreTrainedModel": ("Gemma2Model",),
    "GemmaPreTrainedModel": ("GemmaModel",),
    "PreTrainedModel": ("Qwen3Model", "Qwen3VLModel"),
}
