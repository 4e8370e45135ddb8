"""The transformer: rectified flow from noise to the autoencoder's tokens, told by the text encoder's states."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from autoencoder import CHANNELS, GRID, TOKENS
from captions import Captioner
from dataset import BACKGROUNDS, TINTS, Dataset, Spec
from diffusers import FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from schedule import Optimizer, rate_scale, short_attention
from stages import Meter
from text_encoder import Condition, condition, make_prompts
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

HEADS, HEAD_WIDTH = 8, 24
WIDTH = HEADS * HEAD_WIDTH
BATCH = 32
USUAL_STEPS = 4

IMAGE_IDS = torch.cartesian_prod(torch.arange(1), torch.arange(GRID), torch.arange(GRID), torch.arange(1))


def build() -> Flux2Transformer2DModel:
    model = Flux2Transformer2DModel(
        patch_size=1,
        in_channels=CHANNELS,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=HEAD_WIDTH,
        num_attention_heads=HEADS,
        joint_attention_dim=144,
        timestep_guidance_channels=256,
        mlp_ratio=2.0,
        axes_dims_rope=(4, 8, 8, 4),
        guidance_embeds=False,
    )
    modulations = (
        model.double_stream_modulation_img,
        model.double_stream_modulation_txt,
        model.single_stream_modulation,
    )
    for modulation in modulations:
        nn.init.normal_(modulation.linear.weight, std=0.02)
    nn.init.zeros_(model.norm_out.linear.weight)
    nn.init.zeros_(model.proj_out.weight)
    return model


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15)


def noise_levels(steps: int) -> Tensor:
    """The levels the pipeline goes through in so many steps, from one to zero."""
    levels = scheduler()
    levels.set_timesteps(sigmas=numpy.linspace(1, 1 / steps, steps), mu=compute_empirical_mu(TOKENS, steps))
    sigmas: Tensor = levels.sigmas
    return sigmas


def optimizer(model: Flux2Transformer2DModel) -> Optimizer:
    edges = [model.x_embedder, model.context_embedder, model.proj_out, model.time_guidance_embed]
    outside = {id(weight) for edge in edges for weight in edge.parameters()}
    matrices = [weight for weight in model.parameters() if weight.ndim == 2 and id(weight) not in outside]
    others = [weight for weight in model.parameters() if weight.ndim < 2 or id(weight) in outside]
    # Every fused weight is a stack of WIDTH-row matrices: queries, keys, values, and pieces of the feed-forward.
    return Optimizer(matrices, others, matrix_rate=0.02, other_rate=3e-3, weight_decay=0.01, rows=WIDTH)


def velocity(model: Flux2Transformer2DModel, tokens: Tensor, level: Tensor, told: Condition) -> Tensor:
    bias = torch.cat([told.bias, torch.zeros(TOKENS)]).expand(len(tokens), 1, 1, -1)
    with short_attention(), torch.autocast("cpu", torch.bfloat16):
        made: Tensor = model(
            hidden_states=tokens,
            timestep=level,
            encoder_hidden_states=told.states,
            txt_ids=told.ids,
            img_ids=IMAGE_IDS,
            joint_attention_kwargs={"attention_mask": bias},
            return_dict=False,
        )[0]
    return made.float()


@torch.no_grad()
def sample(model: Flux2Transformer2DModel, told: Condition, steps: int) -> Tensor:
    """Tokens as the pipeline would make them."""
    tokens = torch.randn(len(told.states), TOKENS, CHANNELS)
    for level, following in noise_levels(steps).unfold(0, 2, 1).tolist():
        tokens = tokens + (following - level) * velocity(model, tokens, torch.full((len(tokens),), level), told)
    return tokens


def all_specs(dataset: Dataset, rng: random.Random) -> list[Spec]:
    """Every picture to learn: plain ones first, then all backgrounds, all tints, and some of both."""
    emoji = range(len(dataset.labels))
    tintable = [index for index in emoji if dataset.tintable(index)]
    specs = [Spec(index) for index in emoji]
    specs += [Spec(index, None, background) for index in emoji for background in BACKGROUNDS]
    specs += [Spec(index, tint) for index in tintable for tint in TINTS]
    for index in tintable:
        specs += [Spec(index, rng.choice(list(TINTS)), rng.choice(list(BACKGROUNDS))) for _ in range(6)]
    return specs


class Picker:
    """Chooses what to train on: mostly plain pictures, mostly of the core."""

    def __init__(self, dataset: Dataset, specs: list[Spec]) -> None:
        core = [index for index, spec in enumerate(specs) if spec.emoji < dataset.core]
        self._plain_core, self._plain = range(dataset.core), range(len(dataset.labels))
        self._varied_core = [index for index in core if index not in self._plain]
        self._varied = range(len(dataset.labels), len(specs))

    def __call__(self, rng: random.Random) -> int:
        core = rng.random() < 0.8
        if rng.random() < 0.65:
            return rng.choice(self._plain_core if core else self._plain)
        return rng.choice(self._varied_core if core else self._varied)


def _random_levels(usual: Tensor) -> Tensor:
    """Noise levels to train on: one in four is pure noise, one in four a level that the usual four steps visit."""
    uniform, kind = torch.rand(BATCH), torch.rand(BATCH)
    level = 2.5 * uniform / (1 + 1.5 * uniform)
    level = torch.where(kind < 0.25, 1.0, level)
    level = torch.where(kind > 0.75, usual[torch.randint(len(usual), (BATCH,))], level)
    return level.clamp(min=0.01)


def train(
    dataset: Dataset,
    captioner: Captioner,
    tokenizer: Any,
    encoder: Qwen3ForCausalLM,
    specs: list[Spec],
    tokens: Tensor,
    steps: int,
    rng: random.Random,
) -> Flux2Transformer2DModel:
    model = build()
    optim = optimizer(model)
    pick = Picker(dataset, specs)
    usual = noise_levels(USUAL_STEPS)[:-1]
    meter = Meter("transformer", steps)
    for step in range(steps):
        chosen = [pick(rng) for _ in range(BATCH)]
        captions = [captioner.caption(specs[index], rng) for index in chosen]
        told = condition(encoder, make_prompts(tokenizer, captions, rng))
        clean, noise, level = tokens[chosen], torch.randn(BATCH, TOKENS, CHANNELS), _random_levels(usual)
        mixed = torch.lerp(clean, noise, level[:, None, None])
        error = (velocity(model, mixed, level, told) - (noise - clean)).square().mean((1, 2))
        optim.step(error.mean(), rate_scale(step, steps, warmup=30, hold=0.3))
        meter.add(step, loss=error.mean().item(), pure=error[level == 1].mean().nan_to_num(1.0).item())
    return model.eval()
