"""Put the trained parts together as a pipeline folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import text_encoder
import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Transformer2DModel
from flow import scheduler
from transformers import Qwen3ForCausalLM


def assemble(
    folder: Path,
    vae: AutoencoderKLFlux2,
    encoder: Qwen3ForCausalLM,
    tokenizer: Any,
    transformer: Flux2Transformer2DModel,
) -> None:
    """Write a `Flux2KleinPipeline` with bfloat16 weights."""
    pipeline = Flux2KleinPipeline(
        scheduler=scheduler(),
        vae=vae.to(torch.bfloat16),
        text_encoder=text_encoder.expand(encoder, tokenizer).to(torch.bfloat16),
        tokenizer=tokenizer,
        transformer=transformer.to(torch.bfloat16),
        is_distilled=True,
    )
    pipeline.save_pretrained(folder)
    # transformers loads a model in the dtype its config names, diffusers in float32 unless told otherwise: with the
    # encoder's own bfloat16 here, a pipeline loaded without a dtype would mix the two and fail.
    _edit(folder / "text_encoder" / "config.json", dtype="float32")
    for part in ("vae", "transformer"):
        # Where the parts lay while training is nobody's business.
        _edit(folder / part / "config.json", _name_or_path=None)


def _edit(path: Path, **values: str | None) -> None:
    config = json.loads(path.read_text(encoding="utf-8")) | values
    kept = {key: value for key, value in config.items() if key not in values or value is not None}
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
