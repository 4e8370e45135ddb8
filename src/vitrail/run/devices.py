"""Choosing a device, and what it takes to communicate on it."""

from __future__ import annotations

import importlib.metadata
import os

import torch

from ..errors import UnsupportedError, UsageError
from ..layout import BACKENDS

PREFERENCE = ("cuda", "xpu", "neuron")


def available(device_type: str) -> int:
    """How many devices of that type this machine has; 0 when there are none, or PyTorch does not know the type."""
    if device_type == "cpu":
        return os.cpu_count() or 1
    module = getattr(torch, device_type, None)
    if module is None or not module.is_available():
        return 0
    return int(module.device_count())


def simulated(device_type: str) -> bool:
    """Whether the device is a simulation, by the version its package gives itself."""
    if device_type != "neuron":
        return False
    try:
        return "sim" in importlib.metadata.version("torch_neuronx")
    except importlib.metadata.PackageNotFoundError:
        return False


def choose(name: str | None) -> str:
    """The device type to run on: ``name``, or the best real one. A simulated one is only taken by name."""
    if name is None:
        return next((kind for kind in PREFERENCE if not simulated(kind) and available(kind)), "cpu")
    kind = name.split(":")[0]
    if name != kind:
        raise UsageError(f"--device {name}: give the type alone ({kind}); ranks take the devices in turn")
    if kind not in BACKENDS:
        raise UsageError(f"--device {name}: unknown device", hint=f"known: {', '.join(BACKENDS)}")
    if not available(kind):
        raise UnsupportedError(
            f"--device {kind}: this machine has none that PyTorch {torch.__version__} can use",
            hint=f"available here: {', '.join(other for other in BACKENDS if available(other))}",
        )
    return kind


def check_degree(kind: str, degree: int) -> str | None:
    """Raise `UnsupportedError` when there are not ``degree`` devices; a warning to show, when ranks share cores."""
    count = available(kind)
    if kind == "cpu":
        if degree > count:
            return f"{degree} ranks share {count} CPU cores: right, but slower than {count}"
        return None
    if degree > count:
        raise UnsupportedError(
            f"{degree} ranks need {degree} {kind} devices; this machine has {count}",
            hint=f"--tp {count} at most, or --device cpu, which takes any number of ranks",
        )
    return None


def default_dtype(kind: str) -> str:
    return "float32" if kind == "cpu" else "bfloat16"
