"""Modulations gathered together, once a step, against each by itself: seconds and collectives of a transformer step.

    torchrun --nproc-per-node 2 benchmarks/together.py [--rounds 20]

The two ways take turns in one run, on a Flux transformer of 4 + 8 blocks, in eager mode; the table has the medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time

import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel, TensorParallelConfig
from torch.distributed.device_mesh import DeviceMesh

import vitrail
from vitrail.apply.planning import plan_for

SIZES = {
    "tiny": dict(num_attention_heads=4, attention_head_dim=16, axes_dims_rope=(4, 6, 6), tokens=64),
    "small": dict(num_attention_heads=8, attention_head_dim=64, axes_dims_rope=(16, 24, 24), tokens=256),
}


def build(heads: int, width: int, rope: tuple[int, ...]) -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        num_layers=4, num_single_layers=8, num_attention_heads=heads, attention_head_dim=width, axes_dims_rope=rope,
        in_channels=16, joint_attention_dim=64, pooled_projection_dim=32,
    ).eval()  # fmt: skip


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = TensorParallelConfig(mesh=DeviceMesh("cpu", list(range(dist.get_world_size()))))
    rows = []
    for size, numbers in SIZES.items():
        shape = (numbers["num_attention_heads"], numbers["attention_head_dim"], numbers["axes_dims_rope"])
        tokens = numbers["tokens"]
        models = {}
        for way in ("together", "apart"):
            model = build(*shape)
            plan = plan_for(model)
            if way == "apart":
                rules = tuple(dataclasses.replace(rule, together="") for rule in plan.rules)
                plan = dataclasses.replace(plan, rules=rules)
            models[way] = vitrail.enable_parallelism(model, config=config, plan=plan)
        inputs = dict(
            hidden_states=torch.randn(1, tokens, 16), encoder_hidden_states=torch.randn(1, 32, 64),
            pooled_projections=torch.randn(1, 32), img_ids=torch.zeros(tokens, 3), txt_ids=torch.zeros(32, 3),
        )  # fmt: skip
        seconds: dict[str, list[float]] = {way: [] for way in models}
        for index in range(rounds + 3):
            for way, model in models.items():
                dist.barrier()
                started = time.perf_counter()
                model(timestep=torch.full((1,), 1 - index / 100), **inputs)
                if index >= 3:
                    seconds[way].append(time.perf_counter() - started)
        medians = {way: statistics.median(values) for way, values in seconds.items()}
        counts = {way: vitrail.sharding_of(model).resolved.collectives for way, model in models.items()}
        ratios = sorted(a / b for a, b in zip(seconds["together"], seconds["apart"], strict=True))
        rows.append({"size": size, "seconds": medians, "collectives": counts, "ratio": statistics.median(ratios)})
    if dist.get_rank() == 0:
        print(f"{'size':8} {'together':>10} {'apart':>10} {'ratio':>7} {'collectives':>14}")
        for row in rows:
            counts = f"{row['collectives']['together']} / {row['collectives']['apart']}"
            print(
                f"{row['size']:8} {row['seconds']['together']:10.4f} {row['seconds']['apart']:10.4f} "
                f"{row['ratio']:7.3f} {counts:>14}"
            )
        print(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
