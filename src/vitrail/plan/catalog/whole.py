"""Classes that pipelines load beside transformers and text encoders, and why they stay whole on every rank."""

from __future__ import annotations

from collections.abc import Mapping

STAYS_WHOLE: Mapping[str, str] = {
    "BlipForConditionalGeneration": "it captions a picture before the run, word by word, and is not part of it",
    "DPTForDepthEstimation": "it estimates depth once, with convolutions over pixels; 0.1 GB",
    "SpeechT5HifiGan": "a vocoder: convolutions over samples, which a rank cannot share without their neighbours",
    "VitsModel": "it speaks the transcript with random durations, read from its values while it runs",
}
