"""Compares PyTorch's operator database on the device with the host: values, gradients, in-place, `out=`, forward AD.

    python tools/operators.py [--samples N] [--dtypes float32,bfloat16,int64,bool] [--strict warn|off] [--only REGEX]
                              [--json FILE]

Needs `expecttest`. Each operator ends as `equal`, `rejected` (a rule refused it), or `failing`; exit code 1 if any
fails. Each runs in this process, so a crash ends the run; the last name on stderr is then the culprit.
"""

import argparse
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from neuron_sim import NeuronRuleError, policy
from neuron_sim.profiles import profile

DEVICE = "neuron"

# What cannot be compared: memory that nobody wrote, and kernels that only other devices have.
NOT_COMPARED = re.compile(r"empty|new_empty|jiterator|triton")


def moved(value: Any, device: str, wants_grad: bool = False) -> Any:
    """A copy of a nest of tensors on a device, leaves of their own graphs."""
    if isinstance(value, torch.Tensor):
        copy = value.detach().to(device, copy=True)
        return copy.requires_grad_() if wants_grad and value.requires_grad else copy
    if isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu"):
        return torch.device(device)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(moved(item, device, wants_grad) for item in value)
    if isinstance(value, dict):
        return {key: moved(item, device, wants_grad) for key, item in value.items()}
    return value


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a nest, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors(item)]
    return []


def run(
    op: Callable[..., Any], sample: SampleInput, device: str, wants_grad: bool, seed: int = 0
) -> tuple[Any, list[torch.Tensor]]:
    """Call an operator on a sample's copy; returns the result and the leaves that may have gradients."""
    args = moved((sample.input, sample.args), device, wants_grad)
    kwargs = moved(sample.kwargs, device, wants_grad)
    torch.manual_seed(seed)
    result = op(args[0], *args[1], **kwargs)
    return result, [leaf for leaf in tensors((args, kwargs)) if leaf.requires_grad]


def same(one: Any, other: Any) -> None:
    """Raises AssertionError unless both hold the same values, bit for bit but for rounding in the last places."""
    ones, others = tensors(one), tensors(other)
    assert len(ones) == len(others), f"{len(ones)} tensors against {len(others)}"
    for a, b in zip(ones, others, strict=True):
        assert b.device.type == DEVICE or a.device == b.device, f"result on {b.device}"
        b = b.detach().cpu()
        a = a.detach().to(b.dtype) if a.dtype == torch.float64 and b.dtype == torch.float32 else a.detach()
        torch.testing.assert_close(
            b,
            a,
            equal_nan=True,
            rtol=1e-5 if a.dtype == torch.float32 else None,
            atol=1e-5 if a.dtype == torch.float32 else None,
        )


def compare(info: OpInfo, sample: SampleInput, dtype: torch.dtype) -> Iterator[str]:
    """Every comparison of one sample, named; raises AssertionError where host and device differ."""
    wants_grad = dtype.is_floating_point and info.supports_autograd
    expected, host_leaves = run(info.op, sample, "cpu", wants_grad)
    found, device_leaves = run(info.op, sample, DEVICE, wants_grad)
    yield "forward"
    same(expected, found)
    if wants_grad:
        yield "backward"
        same(backward(expected, host_leaves), backward(found, device_leaves))
    if info.inplace_variant is not None and isinstance(sample.input, torch.Tensor) and not sample.broadcasts_input:
        yield "in-place"
        host, _ = attempt(lambda: run(info.inplace_variant, sample, "cpu", False))
        if host is not None:
            same(host, run(info.inplace_variant, sample, DEVICE, False)[0])
    if info.supports_out and isinstance(expected, torch.Tensor):
        yield "out="
        with torch.no_grad():
            out = torch.empty(0, dtype=expected.dtype, device=DEVICE)
            host, _ = attempt(
                lambda: run(
                    lambda *a, **k: info.op(*a, **k, out=torch.empty(0, dtype=expected.dtype)), sample, "cpu", False
                )
            )
            if host is not None:
                same(host, run(lambda *a, **k: info.op(*a, **k, out=out), sample, DEVICE, False)[0])
    if wants_grad and info.supports_forward_ad and isinstance(sample.input, torch.Tensor):
        yield "forward AD"
        host, _ = attempt(lambda: (tangents(info, sample, "cpu"), None))
        if host is not None:
            same(host, tangents(info, sample, DEVICE))


def attempt(call: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """What the host makes of it, or None where the host itself refuses."""
    try:
        return call()
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return None, None


def backward(result: Any, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of the sum of what can be differentiated."""
    outputs = [t for t in tensors(result) if t.requires_grad and t.dtype.is_floating_point]
    if not outputs or not leaves:
        return []
    grads = torch.autograd.grad(outputs, leaves, [torch.ones_like(t) for t in outputs], allow_unused=True)
    return [grad for grad in grads if grad is not None]


def tangents(info: OpInfo, sample: SampleInput, device: str) -> list[torch.Tensor]:
    """Forward-mode derivatives with a tangent of ones on the input."""
    with forward_ad.dual_level():
        args = moved((sample.input, sample.args), device)
        dual = forward_ad.make_dual(args[0], torch.ones_like(args[0]))
        torch.manual_seed(0)
        result = info.op(dual, *args[1], **moved(sample.kwargs, device))
        found = [forward_ad.unpack_dual(t).tangent for t in tensors(result)]
        return [t for t in found if t is not None]


def examine(info: OpInfo, dtypes: list[torch.dtype], samples: int) -> tuple[str, str]:
    """What becomes of one operator, and the first reason."""
    for dtype in dtypes:
        if dtype not in info.supported_dtypes("cpu"):
            continue
        wants_grad = dtype.is_floating_point and info.supports_autograd
        stage = "samples"
        for count, sample in enumerate(info.sample_inputs("cpu", dtype, requires_grad=wants_grad)):
            if count >= samples:
                break
            steps = compare(info, sample, dtype)
            try:
                while (reached := next(steps, None)) is not None:
                    stage = reached
            except (NeuronRuleError, NotImplementedError) as error:
                return "rejected", f"{dtype} {stage}: {str(error).splitlines()[0][:160]}"
            except (AssertionError, RuntimeError, TypeError, ValueError, IndexError) as error:
                return "failing", f"{dtype} {stage}: {type(error).__name__} {' '.join(str(error).split())[:240]}"
    return "equal", ""


def main() -> int:
    """Run the comparison. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--dtypes", default="float32,bfloat16,int64,bool")
    parser.add_argument("--strict", default="warn", choices=["warn", "off"])
    parser.add_argument("--profile", default="sdk-2.33")
    parser.add_argument("--only", default="")
    parser.add_argument("--json")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.neuron.init()
    policy.use(policy.Rulebook(profile(chosen.profile), chosen.strict))
    dtypes = [getattr(torch, name) for name in chosen.dtypes.split(",")]
    outcome: dict[str, tuple[str, str]] = {}
    for info in op_db:
        if re.search(chosen.only, info.full_name) and not NOT_COMPARED.search(info.full_name):
            print(info.full_name, file=sys.stderr, flush=True)
            outcome[info.full_name] = examine(info, dtypes, chosen.samples)
    for name, (verdict, reason) in outcome.items():
        if verdict != "equal":
            print(f"{verdict:<9} {name}: {reason}")
    totals = Counter(verdict for verdict, _ in outcome.values())
    print(dict(totals))
    if chosen.json:
        with open(chosen.json, "w", encoding="utf-8") as file:
            json.dump({"totals": totals, "operators": outcome}, file, indent=1)
    return int(totals["failing"] > 0)


if __name__ == "__main__":
    sys.exit(main())
