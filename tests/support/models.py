"""Small models with random weights, the same on every rank, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Flux2Transformer2DModel, SD3Transformer2DModel

FLUX2: dict[str, Any] = dict(
    patch_size=1,
    in_channels=12,
    num_layers=2,
    num_single_layers=2,
    attention_head_dim=16,
    num_attention_heads=8,
    joint_attention_dim=20,
    timestep_guidance_channels=32,
    mlp_ratio=2.5,
    axes_dims_rope=(4, 4, 4, 4),
    guidance_embeds=True,
)
SD3: dict[str, Any] = dict(
    sample_size=16,
    num_layers=3,
    attention_head_dim=8,
    num_attention_heads=8,
    joint_attention_dim=20,
    caption_projection_dim=64,
    pooled_projection_dim=24,
    in_channels=4,
    out_channels=4,
    pos_embed_max_size=16,
    dual_attention_layers=(0, 1),
    qk_norm="rms_norm",
)


def flux2(seed: int = 0, **changes: Any) -> Flux2Transformer2DModel:
    torch.manual_seed(seed)
    return randomised(Flux2Transformer2DModel(**{**FLUX2, **changes}))


def sd3(seed: int = 0, **changes: Any) -> SD3Transformer2DModel:
    torch.manual_seed(seed)
    return randomised(SD3Transformer2DModel(**{**SD3, **changes}))


def randomised(model: Any) -> Any:
    """Float64, and no parameter at a value that hides it: norms away from 1, biases away from 0."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.double().eval()


def flux2_inputs(batch: int = 2, image: int = 6, text: int = 5, seed: int = 1, **changes: Any) -> dict[str, Any]:
    config = {**FLUX2, **changes}
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return dict(
        hidden_states=random(batch, image, config["in_channels"]),
        encoder_hidden_states=random(batch, text, config["joint_attention_dim"]),
        timestep=torch.full((batch,), 0.5, dtype=torch.float64),
        guidance=torch.full((batch,), 3.0, dtype=torch.float64) if config["guidance_embeds"] else None,
        img_ids=torch.randint(0, 9, (image, 4), generator=generator),
        txt_ids=torch.randint(0, 9, (text, 4), generator=generator),
        return_dict=False,
    )


def sd3_inputs(batch: int = 2, size: int = 16, text: int = 5, seed: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return dict(
        hidden_states=random(batch, SD3["in_channels"], size, size),
        encoder_hidden_states=random(batch, text, SD3["joint_attention_dim"]),
        pooled_projections=random(batch, SD3["pooled_projection_dim"]),
        timestep=torch.full((batch,), 300.0, dtype=torch.float64),
        return_dict=False,
    )


def error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference, relative to the reference's largest value; NaN anywhere makes it NaN."""
    return float((value - reference).abs().max() / reference.abs().max())
