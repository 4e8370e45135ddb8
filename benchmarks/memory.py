"""What a rank holds of the transformer, at published sizes, over the ideal 1/N: counted on meta tensors.

    python benchmarks/memory.py [--degrees 4 8] [--output results/memory.json]

Beside it stand diffusers' own figures, where a class has a ``_tp_plan``. Heads that do not divide are shown apart: the
same, if the largest share were the mean.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import diffusers
from diffusers.hooks.tensor_parallel import resolve_tp_shard_specs
from rich.console import Console
from rich.table import Table
from torch import nn

from vitrail.apply.classes import model_class
from vitrail.plan import ResolvedPlan, resolve, valid_degrees
from vitrail.plan.catalog import lookup
from vitrail.plan.skeleton import skeleton

RESULTS = Path(__file__).parent / "results"
# The published configurations; what is not named is the class's default.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "FLUX.1-dev": ("FluxTransformer2DModel", {"guidance_embeds": True}),
    "FLUX.2-dev": ("Flux2Transformer2DModel", {}),
    "FLUX.2-klein-4B": (
        "Flux2Transformer2DModel",
        {
            "num_layers": 5,
            "num_single_layers": 20,
            "num_attention_heads": 24,
            "joint_attention_dim": 7680,
            "guidance_embeds": False,
        },
    ),
    "FLUX.2-klein-9B": (
        "Flux2Transformer2DModel",
        {
            "num_layers": 8,
            "num_single_layers": 24,
            "num_attention_heads": 32,
            "joint_attention_dim": 12288,
            "guidance_embeds": False,
        },
    ),
    "Qwen-Image": ("QwenImageTransformer2DModel", {}),
    "SD3.5-large": (
        "SD3Transformer2DModel",
        {
            "num_layers": 38,
            "num_attention_heads": 38,
            "attention_head_dim": 64,
            "caption_projection_dim": 2432,
            "pos_embed_max_size": 192,
            "qk_norm": "rms_norm",
        },
    ),
    "Wan2.1-14B": ("WanTransformer3DModel", {}),
    "HunyuanVideo": ("HunyuanVideoTransformer3DModel", {"guidance_embeds": True}),
    "CogVideoX-5B": (
        "CogVideoXTransformer3DModel",
        {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True},
    ),
    "LTX-Video": ("LTXVideoTransformer3DModel", {}),
}


def build(name: str) -> nn.Module:
    class_name, config = MODELS[name]
    cls = model_class(class_name)
    return skeleton(lambda: cls(**config)).eval()


def theirs(model: nn.Module, degree: int) -> float | None:
    """diffusers' own, over the ideal; None where it has no plan or refuses the degree."""
    flat = getattr(type(model), "_tp_plan", None)
    if not flat:
        return None
    try:
        specs = resolve_tp_shard_specs(model, flat, degree)
    except ValueError:
        return None
    total = sum(parameter.numel() for parameter in model.parameters())
    sharded = sum(model.get_parameter(name).numel() for name, spec in specs.items() if spec.dim is not None)
    return (sharded / degree + total - sharded) / (total / degree)


def ours(model: nn.Module, resolved: ResolvedPlan) -> tuple[float, float]:
    """The largest rank's bytes over the ideal, and the mean rank's: what is more in the first is raggedness."""
    total = sum(parameter.numel() for parameter in model.parameters())
    ranks = [resolved.parameter_numel(model, rank) for rank in range(resolved.degree)]
    ideal = total / resolved.degree
    return max(ranks) / ideal, sum(ranks) / len(ranks) / ideal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--degrees", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--output", type=Path, default=RESULTS / "memory.json")
    options = parser.parse_args()
    rows = []
    for name in MODELS:
        model = build(name)
        plan = lookup(model)
        if plan is None:
            raise SystemExit(f"the catalog has no plan for {name}: was it built with this diffusers?")
        degrees = valid_degrees(plan, model)
        for degree in options.degrees:
            started = time.monotonic()
            resolved = resolve(plan, model, degree)
            largest, mean = ours(model, resolved)
            rows.append(
                {
                    "model": name,
                    "degree": degree,
                    "parameters": sum(parameter.numel() for parameter in model.parameters()),
                    "largest_over_ideal": largest,
                    "mean_over_ideal": mean,
                    "diffusers_over_ideal": theirs(model, degree),
                    "most_ranks": degrees[-1],
                    "seconds": time.monotonic() - started,
                }
            )
    show(rows)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"Transformer parameters of a rank over the ideal, diffusers {diffusers.__version__}")
    for column in ("model", "parameters", "degree", "largest rank", "mean rank", "diffusers' own", "at most"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        other = row["diffusers_over_ideal"]
        table.add_row(
            row["model"],
            f"{row['parameters'] / 1e9:.2f} G",
            str(row["degree"]),
            f"{row['largest_over_ideal']:.3f}",
            f"{row['mean_over_ideal']:.3f}",
            "-" if other is None else f"{other:.2f}",
            f"{row['most_ranks']} ranks",
        )
    Console().print(table)
    worst = max(row["mean_over_ideal"] for row in rows)
    over = [row for row in rows if row["largest_over_ideal"] > 1.05]
    print(f"Aim: at most 1.05 without raggedness: {'met' if worst <= 1.05 else 'missed'}, at worst {worst:.4f}")
    for row in over:
        ragged = row["largest_over_ideal"] / row["mean_over_ideal"]
        print(f"{row['model']} at {row['degree']}: {ragged:.3f} of the {row['largest_over_ideal']:.3f} is raggedness")
    assert not math.isnan(worst)


if __name__ == "__main__":
    main()
