"""What a dispatch costs on the device against the plain CPU, interleaved, rulebook on. Prints JSON; exit code 1 beyond
2.5 times for linear, add and slice."""

import json
import sys
import time
from collections.abc import Callable

import torch

LIMIT, GUARDED, ROUNDS, CALLS = 2.5, ("linear", "add", "slice"), 60, 400


def operations(device: str) -> dict[str, Callable[[], object]]:
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


def microseconds(call: Callable[[], object]) -> float:
    """The time of one call."""
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


@torch.no_grad()
def measure() -> dict[str, dict[str, float]]:
    """The best of several rounds for each operation, host and device in turn."""
    torch.set_num_threads(1)
    host, device = operations("cpu"), operations("neuron")
    results = {}
    for name in host:
        best = [float("inf")] * 2
        for _ in range(ROUNDS):
            best = [min(best[0], microseconds(host[name])), min(best[1], microseconds(device[name]))]
        results[name] = {
            "cpu_us": round(best[0], 2),
            "neuron_us": round(best[1], 2),
            "ratio": round(best[1] / best[0], 2),
        }
    return results


if __name__ == "__main__":
    found = measure()
    print(json.dumps(found, indent=2))
    sys.exit(int(any(found[name]["ratio"] > LIMIT for name in GUARDED)))
