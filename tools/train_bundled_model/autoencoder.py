"""The image autoencoder, and the tokens the transformer sees."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from dataset import Dataset, Spec
from diffusers import AutoencoderKLFlux2
from schedule import Optimizer, rate_scale
from stages import Meter
from torch import Tensor

BATCH = 16
# The transformer's tokens: 2 x 2 patches of the latent picture, itself an eighth of the picture.
GRID = 4
TOKENS = GRID * GRID
CHANNELS = 64


def build() -> AutoencoderKLFlux2:
    return AutoencoderKLFlux2(
        block_out_channels=(8, 16, 32, 64),
        decoder_block_out_channels=(16, 32, 64, 96),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=8,
        sample_size=64,
    )


def optimizer(vae: AutoencoderKLFlux2, parts: Sequence[torch.nn.Module], matrix_rate: float, rate: float) -> Optimizer:
    """For the given parts; the layers that touch pixels have too few inputs or outputs for Muon to balance."""
    pixels = {id(vae.encoder.conv_in.weight), id(vae.decoder.conv_out.weight)}
    weights = [weight for part in parts for weight in part.parameters()]
    matrices = [weight for weight in weights if weight.ndim >= 2 and id(weight) not in pixels]
    others = [weight for weight in weights if weight.ndim < 2 or id(weight) in pixels]
    return Optimizer(matrices, others, matrix_rate=matrix_rate, other_rate=rate)


def edge_error(made: Tensor, wanted: Tensor) -> Tensor:
    """Mean error of the differences between neighbouring pixels: without it, small pictures come out soft."""
    error = made - wanted
    return error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()


def train(dataset: Dataset, steps: int, rng: random.Random) -> AutoencoderKLFlux2:
    vae = build()
    optim = optimizer(vae, [vae], matrix_rate=0.02, rate=4e-3)
    meter = Meter("vae", steps)
    for step in range(steps):
        wanted = dataset.render([dataset.random_spec(rng, natural=0.55) for _ in range(BATCH)])
        with torch.autocast("cpu", torch.bfloat16):
            latents = vae.encode(wanted).latent_dist.mean.float()
            # The transformer's latents will be a little off, so the decoder learns to bear noise.
            spread = latents.std(dim=(0, 2, 3), keepdim=True).detach()
            noise = torch.randn_like(latents) * spread * (0.02 + 0.15 * torch.rand(BATCH, 1, 1, 1))
            made = vae.decode(latents + noise).sample.float()
        pixels, squares = (made - wanted).abs().mean(), F.mse_loss(made, wanted)
        coarse = (F.avg_pool2d(made, 4) - F.avg_pool2d(wanted, 4)).abs().mean()
        power = latents.square().mean()
        size = 0.01 * (power - 1).clamp(min=0) + 1e-4 * power
        loss = pixels + squares + 0.5 * edge_error(made, wanted) + 0.5 * coarse + size
        optim.step(loss, rate_scale(step, steps, warmup=10, hold=0.3))
        meter.add(step, l1=pixels.item(), mse=squares.item())
    vae.eval()
    _set_statistics(vae, dataset, rng)
    return vae


@torch.no_grad()
def _set_statistics(vae: AutoencoderKLFlux2, dataset: Dataset, rng: random.Random) -> None:
    """The pipeline normalises latents by the running statistics of a batch norm that is never run."""
    specs = [Spec(emoji) for emoji in range(len(dataset.labels))]
    specs += [dataset.random_spec(rng, natural=0.3) for _ in range(2 * len(specs))]
    patches = torch.cat([_patches(vae, dataset, specs[at : at + 100]) for at in range(0, len(specs), 100)])
    vae.bn.running_mean.copy_(patches.mean((0, 2, 3)))
    vae.bn.running_var.copy_(patches.var((0, 2, 3)))


def _patches(vae: AutoencoderKLFlux2, dataset: Dataset, specs: Sequence[Spec]) -> Tensor:
    return F.pixel_unshuffle(vae.encode(dataset.render(specs)).latent_dist.mode(), 2)


def _statistics(vae: AutoencoderKLFlux2) -> tuple[Tensor, Tensor]:
    deviation = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()
    return vae.bn.running_mean.view(1, -1, 1, 1), deviation.view(1, -1, 1, 1)


@torch.no_grad()
def to_tokens(vae: AutoencoderKLFlux2, dataset: Dataset, specs: Sequence[Spec]) -> Tensor:
    """The pictures as the transformer's tokens, `[len(specs), TOKENS, CHANNELS]`."""
    mean, deviation = _statistics(vae)
    parts = [_patches(vae, dataset, specs[at : at + 100]) for at in range(0, len(specs), 100)]
    return ((torch.cat(parts) - mean) / deviation).flatten(2).mT.contiguous()


def decode(vae: AutoencoderKLFlux2, tokens: Tensor) -> Tensor:
    """Pictures from the transformer's tokens."""
    mean, deviation = _statistics(vae)
    patches = tokens.mT.reshape(len(tokens), CHANNELS, GRID, GRID) * deviation + mean
    pictures: Tensor = vae.decode(F.pixel_shuffle(patches, 2)).sample
    return pictures.float()
