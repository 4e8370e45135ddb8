"""A prompt is encoded once, and the encoders can go before denoising."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import vitrail
from vitrail.errors import UsageError
from vitrail.run.prompts import Memory, encode_only, free, remember


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * scale


class Pipeline:
    def __init__(self) -> None:
        self.components = {"text_encoder": Encoder(), "scheduler": object(), "transformer": nn.Linear(3, 3)}


def test_equal_inputs_give_the_remembered_output() -> None:
    pipeline = Pipeline()
    [encoder] = remember(pipeline)
    assert type(encoder).__name__ == "Encoder"
    x = torch.ones(2, 3)
    first = encoder(x)
    assert encoder(x.clone()) is first
    assert encoder.calls == 1
    encoder(x, scale=2.0)
    encoder(x[:1])
    encoder(x.double().float() + 1)
    assert encoder.calls == 4
    remember(pipeline)  # again: a new memory, the same class once
    encoder(x)
    assert encoder.calls == 5


def test_the_oldest_is_forgotten() -> None:
    memory = Memory(limit=2)
    for key in "abc":
        memory.keep(key, key)
    assert list(memory.outputs) == ["b", "c"]


def test_a_freed_encoder_knows_what_it_encoded_and_nothing_else() -> None:
    [encoder] = remember(Pipeline(), limit=None)
    x = torch.ones(2, 3)
    known = encoder(x)
    assert free([encoder]) == 12 * 4
    assert sum(parameter.numel() for parameter in encoder.parameters()) == 0
    assert encoder(x) is known
    with pytest.raises(UsageError, match="Encoder was freed, and is asked for something that it did not encode"):
        encoder(x + 1)


def test_encoding_stops_before_the_first_step() -> None:
    pipeline = Pipeline()
    ran = []

    def call() -> None:
        ran.append("encoded")
        pipeline.components["transformer"](torch.ones(1, 3))
        ran.append("denoised")

    encode_only(pipeline, call)
    assert ran == ["encoded"]
    call()
    assert ran == ["encoded", "encoded", "denoised"]


def picture(pipeline: Any, prompt: str, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    made = pipeline(
        prompt=prompt, height=64, width=64, num_inference_steps=1, guidance_scale=1.0, generator=generator,
        output_type="np",
    )  # fmt: skip
    return made.images[0]


def test_the_pictures_are_those_of_a_pipeline_that_encodes_each_time() -> None:
    pipeline = vitrail.load_pipeline()
    pipeline.set_progress_bar_config(disable=True)
    wanted = [picture(pipeline, "a red apple", seed) for seed in (0, 1)]
    [encoder] = remember(pipeline, None)
    encode_only(pipeline, lambda: picture(pipeline, "a red apple"))
    assert free([encoder]) > 1e6
    for seed, expected in enumerate(wanted):
        assert np.array_equal(picture(pipeline, "a red apple", seed), expected)
    with pytest.raises(UsageError, match="was freed"):
        picture(pipeline, "a dog")
