"""Fine-tune the decoder on what the transformer really makes, which is a little off from what the encoder makes."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from autoencoder import decode, edge_error, optimizer
from captions import Captioner
from dataset import Dataset, Spec
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from flow import USUAL_STEPS, sample
from schedule import rate_scale
from stages import Meter
from text_encoder import condition, make_prompts
from torch import Tensor
from transformers import Qwen3ForCausalLM

MADE, ENCODED = 24, 8
SAMPLED = 64
# Samples further from the picture than this show something else: to decode them right would be to learn a lie.
ASTRAY = 0.45


def sample_tokens(
    captioner: Captioner,
    tokenizer: Any,
    encoder: Qwen3ForCausalLM,
    transformer: Flux2Transformer2DModel,
    specs: list[Spec],
    tokens: Tensor,
    batches: int,
    rng: random.Random,
) -> tuple[list[int], Tensor]:
    """Sampled tokens, and the indices of the pictures they show."""
    plain = len(captioner.labels)
    made: list[Tensor] = []
    shown: list[int] = []
    for _ in range(batches):
        chosen = [rng.randrange(plain) if rng.random() < 0.65 else rng.randrange(len(specs)) for _ in range(SAMPLED)]
        captions = [
            captioner.label(index) if index < plain and rng.random() < 0.5 else captioner.caption(specs[index], rng)
            for index in chosen
        ]
        told = condition(encoder, make_prompts(tokenizer, captions, rng))
        result = sample(transformer, told, rng.choice((USUAL_STEPS, USUAL_STEPS, USUAL_STEPS, 2 * USUAL_STEPS)))
        near = (result - tokens[chosen]).square().mean((1, 2)) < ASTRAY
        made.append(result[near])
        shown += [index for index, keep in zip(chosen, near.tolist(), strict=True) if keep]
    print(f"decoder: {len(shown)} of {batches * SAMPLED} samples show their picture", flush=True)
    return shown, torch.cat(made)


def train(
    dataset: Dataset,
    vae: AutoencoderKLFlux2,
    specs: list[Spec],
    tokens: Tensor,
    shown: list[int],
    made: Tensor,
    steps: int,
    rng: random.Random,
) -> None:
    """Train `vae`'s decoder in place, mostly on the transformer's tokens, partly on the encoder's."""
    optim = optimizer(vae, [vae.decoder, vae.post_quant_conv], matrix_rate=0.015, rate=1.5e-3)
    meter = Meter("decoder", steps)
    for step in range(steps):
        # A barely trained transformer makes nothing worth decoding.
        picked = [rng.randrange(len(shown)) for _ in range(MADE)] if shown else []
        encoded = [rng.randrange(len(specs)) for _ in range(ENCODED)]
        noisy = tokens[encoded] + torch.randn_like(tokens[encoded]) * 0.15 * torch.rand(ENCODED, 1, 1)
        wanted = dataset.render([specs[index] for index in [*(shown[index] for index in picked), *encoded]])
        with torch.autocast("cpu", torch.bfloat16):
            pictures = decode(vae, torch.cat([made[picked], noisy]))
        pixels, squares = (pictures - wanted).abs().mean(), F.mse_loss(pictures, wanted)
        loss = pixels + 0.5 * squares + 0.7 * edge_error(pictures, wanted)
        optim.step(loss, rate_scale(step, steps, warmup=10, hold=0.0))
        meter.add(step, l1=pixels.item(), mse=squares.item())
