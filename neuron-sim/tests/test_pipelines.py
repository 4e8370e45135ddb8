"""Pipelines of diffusers that have branches of their own for the device: tiny, random, eager, and as on the host."""

import pytest
import torch

diffusers = pytest.importorskip("diffusers")

# float32 on both sides and the host's kernels below; what may differ is how a time step is cast on the way.
TOLERANCE = 1e-5


def vae():
    torch.manual_seed(0)
    return diffusers.AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        latent_channels=4,
        sample_size=128,
    )


def sdxl():
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(2, 4),
        layers_per_block=2,
        sample_size=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=80,
        cross_attention_dim=64,
        norm_num_groups=1,
    )
    scheduler = diffusers.EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, steps_offset=1, beta_schedule="scaled_linear", timestep_spacing="leading"
    )
    pipe = diffusers.StableDiffusionXLPipeline(
        vae=vae(), text_encoder=None, text_encoder_2=None, tokenizer=None, tokenizer_2=None, unet=unet,
        scheduler=scheduler, add_watermarker=False,
    )  # fmt: skip
    made = torch.Generator().manual_seed(1)
    prompts = {
        name: torch.randn(shape, generator=made)
        for name, shape in (
            ("prompt_embeds", (1, 7, 64)),
            ("negative_prompt_embeds", (1, 7, 64)),
            ("pooled_prompt_embeds", (1, 32)),
            ("negative_pooled_prompt_embeds", (1, 32)),
        )
    }
    return pipe, prompts | {"height": 64, "width": 64, "num_inference_steps": 3}


def pixart():
    torch.manual_seed(0)
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=32,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
        num_embeds_ada_norm=1000,
        norm_elementwise_affine=False,
        norm_eps=1e-6,
    )
    pipe = diffusers.PixArtAlphaPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae(),
        transformer=transformer.eval(),
        scheduler=diffusers.DDIMScheduler(),
    )
    made = torch.Generator().manual_seed(1)
    prompts = {name: torch.randn(1, 7, 32, generator=made) for name in ("prompt_embeds", "negative_prompt_embeds")}
    masks = {name: torch.ones(1, 7) for name in ("prompt_attention_mask", "negative_prompt_attention_mask")}
    return pipe, prompts | masks | {"negative_prompt": None, "num_inference_steps": 3, "use_resolution_binning": False}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [sdxl, pixart])
def test_the_device_makes_the_hosts_picture(make):
    pictures = []
    for device in ("cpu", "neuron"):
        pipe, call = make()
        pipe.to(device).set_progress_bar_config(disable=True)
        call = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in call.items()}
        image = pipe(**call, generator=torch.Generator().manual_seed(0), output_type="pt").images
        assert image.device.type == device
        pictures.append(image.cpu())
    assert pictures[0].std() > 0.01
    torch.testing.assert_close(pictures[1], pictures[0], atol=TOLERANCE, rtol=0)
