"""The public ways to shard a model."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from diffusers import TensorParallelConfig
from torch import nn

from ..errors import DisagreementError, UnsupportedError, UsageError, VitrailError
from ..plan import Plan, ResolvedPlan, resolve
from ..plan.configuration import configuration
from .agree import Agreement
from .install import install, slice_tensors
from .load import Request, load
from .mesh import Placement, degree_of, place, read_config
from .planning import PlanLike, known_plan, plan_for
from .sharded import Sharding, is_sharded, mark
from .watchdog import watch

M = TypeVar("M", bound=nn.Module)

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def apply_tensor_parallel(
    model: M,
    config: Any,
    tp_plan: PlanLike = None,
    *,
    device: str | torch.device | None = None,
    pad: bool = False,
) -> M:
    """Shard ``model``, which is in memory and equal on all ranks, in place over the ranks of ``config``.

    ``config`` is diffusers' ``TensorParallelConfig`` or ``ParallelConfig``. ``tp_plan`` is a `vitrail.Plan`, or a flat
    dict in diffusers' form; without one it is the catalog's for the model's class. ``device`` says where the mesh is
    when the configuration has none. ``pad`` gives all ranks equal shapes, with zeros where units do not divide, for
    compilers that make one program for all. The model stays on the device it is on: move it with ``.to(device)``
    afterwards.

    Raises before anything is changed: `PlanError` for a plan that does not fit the model or the degree,
    `UnsupportedError` for a class without a plan or a model that is quantised, offloaded or adapted, `UsageError`
    without a process group, `DisagreementError` when the ranks' weights differ.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a model, not {type(model).__name__}")
    whole, tensor = read_config(config)
    if _alone(tensor):
        return model
    _refuse(model)
    plan = known_plan(model, tp_plan)
    placement = None
    if plan is None:
        placement = place(tensor, device)
        plan = _shared_plan(model, placement)
    resolved = resolve(plan, model, degree_of(tensor), pad)
    placement = placement or place(tensor, device)
    _compare({**_described(model, resolved), **_weights(model)}, placement)
    slice_tensors(model, resolved.shards, placement.axis.index)
    _finish(model, resolved, placement, whole)
    return model


def enable_parallelism(
    model: M,
    *,
    config: Any,
    plan: PlanLike = None,
    device: str | torch.device | None = None,
    pad: bool = False,
) -> M:
    """`apply_tensor_parallel` under the name diffusers has for it, with the class's own plan unless one is given."""
    return apply_tensor_parallel(model, config, plan, device=device, pad=pad)


def from_pretrained(
    cls: type[M],
    path: str,
    *,
    parallel_config: Any = None,
    plan: PlanLike = None,
    device: str | torch.device | None = None,
    pad: bool = False,
    **arguments: Any,
) -> M:
    """``cls.from_pretrained(path, ...)``, where every rank reads and holds only its slice.

    ``arguments`` are diffusers' own (``subfolder``, ``dtype`` or ``torch_dtype``, ``variant``, ``revision``,
    ``token``, ...); those that contradict sharding on load (``device_map``, ``quantization_config``, ...) raise
    `UnsupportedError`. ``pad`` is as for `apply_tensor_parallel`. The weights land on the mesh's device. Without a
    ``parallel_config`` this is diffusers' loader.

    Raises `CheckpointError` for a missing, truncated or mismatching file, naming file and tensor.
    """
    if parallel_config is None:
        return cls.from_pretrained(path, **arguments)  # type: ignore[attr-defined,no-any-return]
    whole, tensor = read_config(parallel_config)
    if _alone(tensor):
        return cls.from_pretrained(path, **arguments)  # type: ignore[attr-defined,no-any-return]
    request = Request.of(cls, path, arguments)
    model = request.skeleton()
    checkpoint = request.checkpoint(model)
    chosen = known_plan(model, plan)
    placement = None
    if chosen is None:
        placement = place(tensor, device)
        chosen = _shared_plan(model, placement)
    resolved = resolve(chosen, model, degree_of(tensor), pad)
    placement = placement or place(tensor, device)
    _compare({**_described(model, resolved), "dtype": str(request.dtype)}, placement)
    load(model, checkpoint, resolved.shards, placement.axis.index, request.dtype_for(model), placement.device)
    _finish(model, resolved, placement, whole)
    model.eval()
    assert isinstance(model, cls)
    return model


def _shared_plan(model: nn.Module, placement: Placement) -> Plan:
    """A plan that the axis' first rank finds in the cache or derives, and the others receive."""
    told: list[Any] = [None]
    if placement.axis.index == 0:
        try:
            told = [(plan_for(model).to_document(), None)]
        except VitrailError as error:
            told = [(None, error)]
    dist.broadcast_object_list(told, src=placement.axis.ranks[0], group=placement.host_group)
    document, failure = told[0]
    if failure is not None:
        raise failure
    return Plan.from_document(document, source="derived")


def _alone(config: TensorParallelConfig) -> bool:
    """A degree of 1 without a mesh asks for nothing, as in diffusers."""
    return config.mesh is None and config.tp_degree == 1


def _refuse(model: nn.Module) -> None:
    name = type(model).__name__
    if is_sharded(model):
        raise UnsupportedError(f"this {name} is sharded already; a model can be sharded once")
    if getattr(model, "_parallel_config", None) is not None:
        raise UnsupportedError(f"this {name} already has a parallel configuration of diffusers' own")
    if any(getattr(module, "fused_projections", False) for module in model.modules()):
        raise UnsupportedError(
            f"this {name} has fused projections, which its plan does not know",
            hint="shard it first and fuse afterwards, or unfuse it: model.unfuse_qkv_projections()",
        )
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        raise UnsupportedError(f"this {name} is quantised, which cannot be sharded yet")
    if getattr(model, "hf_device_map", None) is not None or any(hasattr(m, "_hf_hook") for m in model.modules()):
        raise UnsupportedError(
            f"this {name} was placed or offloaded by accelerate",
            hint="load it without device_map and without offloading",
        )
    for parameter_name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise UsageError(
                f"parameter {parameter_name} is on the meta device: there is nothing to shard",
                hint="vitrail.from_pretrained(cls, path, parallel_config=...) loads and shards in one go",
            )


def _described(model: nn.Module, resolved: ResolvedPlan) -> dict[str, str]:
    config = {key: value for key, value in configuration(model).items() if not key.startswith("_")}
    plan = (resolved.styles, resolved.shards, resolved.attributes)
    return {"the model's configuration": _digest(repr(config).encode()), "the plan": _digest(repr(plan).encode())}


def _weights(model: nn.Module) -> dict[str, str]:
    """A checksum of every parameter and buffer: the sum of its bits, exact in any order, and a sample in its order."""
    sums = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        flat = tensor.detach().contiguous().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 16)].cpu().contiguous().view(torch.uint8).numpy().tobytes()
        integer = _INTEGERS.get(flat.element_size(), torch.uint8)
        total = int(flat.view(integer).sum(dtype=torch.int64))
        sums[name] = _digest(f"{tuple(tensor.shape)} {tensor.dtype} {total}".encode() + sample)
    return sums


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _compare(mine: dict[str, str], placement: Placement) -> None:
    """Ranks that initialised their weights apart, or planned otherwise, would give a plausible, wrong picture."""
    everyone: list[Any] = [None] * placement.axis.degree
    dist.all_gather_object(everyone, mine, group=placement.host_group)
    for rank, other in zip(placement.axis.ranks, everyone, strict=True):
        for name in {**everyone[0], **other}:
            if everyone[0].get(name) != other.get(name):
                raise DisagreementError(
                    f"the ranks hold different models: {name} on rank {rank} is not that of rank "
                    f"{placement.axis.ranks[0]}",
                    hint="load them from one checkpoint, or seed torch equally on all ranks before initialising",
                )


def _finish(model: nn.Module, resolved: ResolvedPlan, placement: Placement, config: Any) -> None:
    config.setup(dist.get_rank(), dist.get_world_size(), placement.device, mesh=placement.mesh)
    if hasattr(model, "_parallel_config"):
        model._parallel_config = config
    if placement.axis.degree == 1:  # the slice is the whole: nothing to reduce, nothing to guard
        return
    install(model, resolved, placement.axis.index, placement.axis.group)
    model.requires_grad_(False)
    mark(model, Sharding(resolved, placement.axis, Agreement(placement.axis.ranks)))
    watch(placement.axis)
