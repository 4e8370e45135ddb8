"""Measure, with the real pipeline, how often a prompt brings the picture it names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from captions import Captioner, with_article
from dataset import BACKGROUNDS, TINTS, Dataset, Spec
from diffusers import Flux2KleinPipeline

BATCH = 36
STEPS = 4


class Score(NamedTuple):
    right: int
    asked: int

    @property
    def share(self) -> float:
        return self.right / self.asked


class Probe(NamedTuple):
    """Prompts with the pictures they ask for, and the pictures they must not be nearer to."""

    prompts: list[str]
    wanted: list[Spec]
    choices: list[Spec]


def probes(dataset: Dataset, captioner: Captioner, share: float) -> dict[str, Probe]:
    """The questions; `share` below one asks about a part of the emoji."""
    core, everything = range(dataset.core), range(len(dataset.labels))
    asked = core[:: round(1 / share)]
    names = captioner.labels
    plain = [Spec(index) for index in everything]
    tints, backgrounds = list(TINTS), list(BACKGROUNDS)
    tinted = [Spec(index, tints[index % len(tints)]) for index in asked if dataset.tintable(index)]
    placed = [Spec(index, None, backgrounds[index % len(backgrounds)]) for index in asked]
    others = everything[dataset.core :: round(1 / share)]
    unseen = [
        captioner.unseen[index % len(captioner.unseen)].format(n=names[index], a=captioner.label(index))
        for index in asked
    ]
    return {
        "core": Probe([captioner.label(index) for index in asked], [Spec(index) for index in asked], plain),
        "others": Probe([captioner.label(index) for index in others], [Spec(index) for index in others], plain),
        "tints": Probe(
            [with_article(f"{spec.tint} {names[spec.emoji]}") for spec in tinted],
            tinted,
            plain + [Spec(index, tint) for index in everything for tint in tints],
        ),
        "backgrounds": Probe(
            [f"{captioner.label(spec.emoji)} on a {spec.background} background" for spec in placed],
            placed,
            plain + [Spec(index, None, background) for index in everything for background in backgrounds],
        ),
        "unseen wordings": Probe(unseen, [Spec(index) for index in asked], plain),
    }


def measure(model: Path, dataset: Dataset, captioner: Captioner, share: float = 1.0) -> dict[str, Score]:
    """A prompt is right when no other picture is nearer to what it brought than the one it asked for."""
    pipeline = Flux2KleinPipeline.from_pretrained(model, low_cpu_mem_usage=False)
    pipeline.set_progress_bar_config(disable=True)
    scores = {}
    for name, probe in probes(dataset, captioner, share).items():
        made = torch.cat(
            [_pictures(pipeline, probe.prompts[at : at + BATCH], at) for at in range(0, len(probe.prompts), BATCH)]
        )
        right = sum(
            probe.choices[index] == spec
            for index, spec in zip(_nearest(made, dataset, probe.choices), probe.wanted, strict=True)
        )
        scores[name] = Score(right, len(probe.prompts))
        print(f"recall, {name}: {right} of {len(probe.prompts)} ({scores[name].share:.1%})", flush=True)
    return scores


def _pictures(pipeline: Flux2KleinPipeline, prompts: list[str], first: int) -> torch.Tensor:
    # A generator for each prompt, so that the batch size does not change what is measured.
    made: torch.Tensor = pipeline(
        prompt=prompts,
        height=64,
        width=64,
        num_inference_steps=STEPS,
        guidance_scale=1.0,
        generator=[torch.Generator().manual_seed(first + index) for index in range(len(prompts))],
        output_type="pt",
    ).images
    return made * 2 - 1


def _nearest(made: torch.Tensor, dataset: Dataset, choices: Sequence[Spec]) -> list[int]:
    flat = made.flatten(1)
    distances = [
        torch.cdist(flat, dataset.render(choices[at : at + 500]).flatten(1)) for at in range(0, len(choices), 500)
    ]
    return torch.cat(distances, 1).argmin(1).tolist()
