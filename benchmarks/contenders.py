"""One FLUX.2 transformer as each contender holds it, and what a rank measures of them. Runs on the ranks."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from diffusers import Flux2Transformer2DModel, ParallelConfig, TensorParallelConfig
from diffusers.hooks import tensor_parallel as diffusers_tp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import vitrail
from vitrail.apply.flight import FLIGHT, Flight

WHOLE, VITRAIL, UNCHECKED, DIFFUSERS = CONTENDERS = ("whole", "vitrail", "vitrail, unchecked", "diffusers")


class Held:
    """What this rank holds, from `prepare` on."""

    models: dict[str, Any]
    inputs: dict[str, Any]
    reference: torch.Tensor


HELD = Held()


def cpu_mesh() -> DeviceMesh:
    return DeviceMesh("cpu", list(range(dist.get_world_size())), mesh_dim_names=("tp",))


def admit_cpu() -> None:
    """Let diffusers shard on the CPU: its list of devices lacks it, and it takes the device from the accelerator."""

    def resolve(model: Flux2Transformer2DModel, config: TensorParallelConfig) -> ParallelConfig:
        whole = ParallelConfig(tensor_parallel_config=config)
        whole.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=config.mesh)
        model._parallel_config = whole
        return whole

    diffusers_tp._SUPPORTED_TP_DEVICES = (*diffusers_tp._SUPPORTED_TP_DEVICES, "cpu")
    Flux2Transformer2DModel._resolve_parallel_config = resolve


def prepare(config: Mapping[str, Any], image: int, text: int) -> int:
    """Make the models, equal on all ranks, and inputs of so many tokens; the number of the whole one's parameters."""
    torch.manual_seed(0)
    whole = Flux2Transformer2DModel.from_config(dict(config)).eval().requires_grad_(False)
    parallel = TensorParallelConfig(mesh=cpu_mesh())
    models = {WHOLE: whole}
    for who, switch in ((VITRAIL, "on"), (UNCHECKED, "off")):
        with mock.patch.dict(os.environ, {"VITRAIL_CHECK_INPUTS": switch}):
            models[who] = vitrail.apply_tensor_parallel(copy.deepcopy(whole), parallel)
    admit_cpu()
    models[DIFFUSERS] = copy.deepcopy(whole)
    models[DIFFUSERS].enable_parallelism(config=parallel)
    if dist.get_rank() != 0:
        del models[WHOLE]
    HELD.models = models
    side = round(image**0.5)
    HELD.inputs = {
        "hidden_states": torch.randn(1, image, whole.config.in_channels),
        "encoder_hidden_states": torch.randn(1, text, whole.config.joint_attention_dim),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.tensor([[0, place // side, place % side, 0] for place in range(image)]),
        "txt_ids": torch.tensor([[0, 0, 0, place] for place in range(text)]),
        "return_dict": False,
    }
    return sum(parameter.numel() for parameter in whole.parameters())


def step(who: str) -> torch.Tensor:
    with torch.no_grad():
        output = HELD.models[who](**HELD.inputs)[0]
    assert isinstance(output, torch.Tensor)
    return output


def error(who: str) -> float:
    """The output's largest difference from the whole model's, which comes first, over that one's largest value."""
    output = step(who)
    if who == WHOLE:
        HELD.reference = output
    if dist.get_rank() != 0:
        return 0.0
    return float((output - HELD.reference).abs().max() / HELD.reference.abs().max())


class Collectives(TorchDispatchMode):
    """Counts the collectives that are issued, and the bytes this rank puts in."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as what it does to local tensors
        if func.namespace == "_c10d_functional" and not func._opname.startswith(("wait", "_wrap")):
            self.counts[func._opname.rstrip("_")] += 1
            self.bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def collectives(who: str) -> dict[str, Any]:
    """Those of a step. Where vitrail counts them too, the counts must agree."""
    before = FLIGHT.collectives
    with Collectives() as seen:
        step(who)
    total = seen.counts.total()
    if who in (VITRAIL, UNCHECKED) and total != FLIGHT.collectives - before:
        raise RuntimeError(f"{who} counts {FLIGHT.collectives - before} collectives, the dispatcher {seen.counts}")
    return {"total": total, "by_kind": dict(seen.counts), "bytes": seen.bytes}


def timed(who: str, warm: int, steps: int) -> float:
    """Seconds per step, over ``steps`` after ``warm`` that do not count."""
    for _ in range(warm):
        step(who)
    if who != WHOLE:
        dist.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        step(who)
    return (time.perf_counter() - begun) / steps


def alone(repeats: int = 300) -> dict[str, float]:
    """Seconds of one comparison of inputs, and of what the watchdog is told at one collective."""
    model = HELD.models[VITRAIL]
    flight, payload = Flight(), HELD.inputs["hidden_states"]
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(repeats):
        model.sharding.agreement.check(model, (), HELD.inputs)
    compared = time.perf_counter()
    for _ in range(repeats):
        flight.take_off("all_reduce", model, payload)
        flight.land()
    told = time.perf_counter()
    return {"comparison": (compared - begun) / repeats, "bookkeeping": (told - compared) / repeats}


def watchdog_cpu() -> float:
    """Seconds of CPU that the watchdog's thread has used until now."""
    ids = [thread.native_id for thread in threading.enumerate() if thread.name == "vitrail-watchdog"]
    files = [Path(f"/proc/self/task/{one}/schedstat") for one in ids]
    return sum(int(file.read_text(encoding="ascii").split()[0]) for file in files) / 1e9
