"""What the device costs against the plain CPU, interleaved, with the rulebook and the op cache on.

Single operators on small tensors, and steps of a tiny and a large Flux2 transformer (needs diffusers; --no-models
leaves them out). Prints JSON; exit code 1 where a limit is passed.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch

LIMITS = {"linear": 2.5, "add": 2.5, "slice": 2.5, "flux2_tiny": 1.6, "flux2_large": 1.05}
Calls = dict[str, Callable[[], object]]

TINY = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16}
TINY |= {"joint_attention_dim": 32, "in_channels": 4, "axes_dims_rope": (4, 4, 4, 4)}
LARGE = {"num_layers": 4, "num_single_layers": 8, "num_attention_heads": 8, "attention_head_dim": 64}
LARGE |= {"joint_attention_dim": 512, "in_channels": 64, "axes_dims_rope": (16, 16, 16, 16)}


def operations(device: str) -> Calls:
    """The operations measured, on small tensors of a device."""
    linear = torch.nn.Linear(64, 64).to(device)
    x, y = torch.ones(8, 64).to(device), torch.ones(8, 64).to(device)
    return {
        "linear": lambda: linear(x),
        "add": lambda: x + y,
        "slice": lambda: x[:, 3:9],
        "softmax": lambda: x.softmax(-1),
        "mul_": lambda: x.mul_(1.0),
    }


def step(device: str, config: dict[str, object], side: int, words: int) -> Callable[[], object]:
    """One denoising step of a Flux2 transformer with random weights, for a picture of `side` tokens each way."""
    from diffusers import Flux2Transformer2DModel

    torch.manual_seed(0)
    model = Flux2Transformer2DModel(**config).eval().to(device)
    picture = torch.cartesian_prod(*map(torch.arange, (1, side, side, 1)))
    text = torch.cartesian_prod(*map(torch.arange, (1, 1, 1, words)))
    inputs = {
        "hidden_states": torch.randn(1, side * side, config["in_channels"]),
        "encoder_hidden_states": torch.randn(1, words, config["joint_attention_dim"]),
        "timestep": torch.tensor([0.5]),
        "img_ids": picture[None],
        "txt_ids": text[None],
        "guidance": torch.tensor([1.0]),
    }
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    return lambda: model(**inputs, return_dict=False)


def models(device: str) -> Calls:
    """The steps measured."""
    return {"flux2_tiny": step(device, TINY, 4, 8), "flux2_large": step(device, LARGE, 16, 64)}


def microseconds(call: Callable[[], object], calls: int) -> float:
    """The processor's time for one call: one thread computes, and what else the machine does is not counted."""
    start = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - start) / calls * 1e6


@torch.no_grad()
def measure(host: Calls, device: Calls, rounds: int, calls: dict[str, int]) -> dict[str, dict[str, float]]:
    """The best of several rounds of each, host and device in turn."""
    results = {}
    for name in host:
        best = {"cpu": float("inf"), "neuron": float("inf")}
        for turn in range(rounds):
            # In alternating order: whoever comes second finds the other's data in the processor's caches.
            sides = [("cpu", host), ("neuron", device)]
            for side, operations_of in sides if turn % 2 else reversed(sides):
                best[side] = min(best[side], microseconds(operations_of[name], calls.get(name, 400)))
        results[name] = {
            "cpu_us": round(best["cpu"], 2),
            "neuron_us": round(best["neuron"], 2),
            "ratio": round(best["neuron"] / best["cpu"], 3),
        }
    return results


def main() -> int:
    """Measure and print. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-models", action="store_true", help="only single operators")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(operations("cpu"), operations("neuron"), rounds=60, calls={})
    if not chosen.no_models:
        calls = {"flux2_tiny": 8, "flux2_large": 1}
        found |= measure(models("cpu"), models("neuron"), rounds=25, calls=calls)
    print(json.dumps(found, indent=2))
    return int(any(found[name]["ratio"] > limit for name, limit in LIMITS.items() if name in found))


if __name__ == "__main__":
    sys.exit(main())
