"""What a rank holds of a pipeline's text encoders, at published sizes, over the ideal 1/N: counted on meta tensors.

    python benchmarks/encoders.py [--degrees 4 8] [--output results/encoders.json]

All encoders of a pipeline are counted together, as they lie on a rank together.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import transformers
from common import table
from torch import nn

from vitrail.apply.classes import made, model_class
from vitrail.plan import resolve
from vitrail.plan.catalog import lookup
from vitrail.plan.skeleton import skeleton

RESULTS = Path(__file__).parent / "results"
Encoder = tuple[str, dict[str, Any]]

# google/t5-v1_1-xxl
T5_XXL: Encoder = (
    "T5EncoderModel",
    {
        "vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    },
)  # fmt: skip
# google/umt5-xxl
UMT5_XXL: Encoder = ("UMT5EncoderModel", {**T5_XXL[1], "vocab_size": 256384})
# openai/clip-vit-large-patch14
CLIP_L = {
    "vocab_size": 49408, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "max_position_embeddings": 77, "hidden_act": "quick_gelu", "projection_dim": 768,
}  # fmt: skip
# laion/CLIP-ViT-bigG-14-laion2B-39B-b160k
CLIP_G = {
    **CLIP_L, "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
    "hidden_act": "gelu", "projection_dim": 1280,
}  # fmt: skip
# Qwen/Qwen3-4B and Qwen/Qwen3-8B
QWEN3 = {
    "vocab_size": 151936, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128,
}  # fmt: skip
QWEN3_4B = {**QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
QWEN3_8B = {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
# mistralai/Mistral-Small-3.2-24B-Instruct-2506
MISTRAL_SMALL = {
    "text_config": {
        "model_type": "mistral", "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 32768,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
    "vision_config": {
        "model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16, "head_dim": 64, "patch_size": 14, "image_size": 1540, "hidden_act": "silu",
    },
    "spatial_merge_size": 2, "multimodal_projector_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
# Qwen/Qwen2.5-VL-7B-Instruct
QWEN25_VL_7B = {
    "text_config": {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
        "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "tie_word_embeddings": False,
}  # fmt: skip
# xtuner/llava-llama-3-8b-v1_1-transformers, its language model
LLAMA_3_8B = {
    "vocab_size": 128320, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip

ENCODERS: dict[str, tuple[Encoder, ...]] = {
    "FLUX.1-dev": (("CLIPTextModel", CLIP_L), T5_XXL),
    "FLUX.2-dev": (("Mistral3ForConditionalGeneration", MISTRAL_SMALL),),
    "FLUX.2-klein-4B": (("Qwen3ForCausalLM", QWEN3_4B),),
    "FLUX.2-klein-9B": (("Qwen3ForCausalLM", QWEN3_8B),),
    "Qwen-Image": (("Qwen2_5_VLForConditionalGeneration", QWEN25_VL_7B),),
    "SD3.5-large": (("CLIPTextModelWithProjection", CLIP_L), ("CLIPTextModelWithProjection", CLIP_G), T5_XXL),
    "Wan2.1-14B": (UMT5_XXL,),
    "HunyuanVideo": (("LlamaModel", LLAMA_3_8B), ("CLIPTextModel", CLIP_L)),
}


def build(encoder: Encoder) -> nn.Module:
    """The model with its parameters on meta."""
    name, config = encoder
    return skeleton(lambda: made(model_class(name), config)).eval()


def held(models: list[nn.Module], degree: int) -> list[int]:
    """The parameters that each rank holds of all the models."""
    ranks = [0] * degree
    for model in models:
        plan = lookup(model)
        if plan is None:
            raise SystemExit(f"the catalog has no plan for this {type(model).__name__}: which transformers is it?")
        resolved = resolve(plan, model, degree)
        for rank in range(degree):
            ranks[rank] += resolved.parameter_numel(model, rank)
    return ranks


def measure(name: str, degrees: list[int]) -> list[dict[str, Any]]:
    """One row for each degree: the largest rank, and the mean, over the ideal."""
    models = [build(encoder) for encoder in ENCODERS[name]]
    total = sum(parameter.numel() for model in models for parameter in model.parameters())
    rows = []
    for degree in degrees:
        started = time.monotonic()
        ranks = held(models, degree)
        ideal = total / degree
        rows.append(
            {
                "pipeline": name,
                "encoders": [encoder for encoder, _ in ENCODERS[name]],
                "degree": degree,
                "parameters": total,
                "largest_over_ideal": max(ranks) / ideal,
                "mean_over_ideal": sum(ranks) / degree / ideal,
                "seconds": time.monotonic() - started,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--degrees", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--output", type=Path, default=RESULTS / "encoders.json")
    options = parser.parse_args()
    rows = [row for name in ENCODERS for row in measure(name, options.degrees)]
    shown = [
        (
            row["pipeline"],
            f"{row['parameters'] / 1e9:.2f} G",
            str(row["degree"]),
            f"{row['largest_over_ideal']:.3f}",
            f"{row['mean_over_ideal']:.3f}",
        )
        for row in rows
    ]
    title = f"Text encoders' parameters of a rank over the ideal, transformers {transformers.__version__}"
    table(title, ("pipeline", "parameters", "degree", "largest rank", "mean rank"), shown)
    worst = max(rows, key=lambda row: row["largest_over_ideal"])
    met = "met" if worst["largest_over_ideal"] <= 1.05 else "missed"
    print(f"Aim: at most 1.05: {met}, at worst {worst['largest_over_ideal']:.4f} ({worst['pipeline']})")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
