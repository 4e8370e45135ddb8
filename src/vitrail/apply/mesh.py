"""From diffusers' parallel configuration to one axis of a device mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ParallelConfig, TensorParallelConfig
from torch.distributed.device_mesh import DeviceMesh

from ..errors import UnsupportedError, UsageError
from ..layout import AXIS, BACKENDS, MeshAxis
from .groups import side_group


@dataclass(frozen=True)
class Placement:
    """The axis to shard along, its mesh, this rank's device, and a group for small tensors on the CPU."""

    axis: MeshAxis
    mesh: DeviceMesh
    device: torch.device
    host_group: dist.ProcessGroup


def read_config(config: Any) -> tuple[ParallelConfig, TensorParallelConfig]:
    """Accept diffusers' two classes as they are. Raises for anything else, and for context parallelism."""
    if isinstance(config, TensorParallelConfig):
        return ParallelConfig(tensor_parallel_config=config), config
    if isinstance(config, ParallelConfig):
        if config.context_parallel_config is not None:
            raise UnsupportedError("context parallelism is not supported; only tensor_parallel_config is")
        if config.tensor_parallel_config is None:
            raise UsageError("the ParallelConfig has no tensor_parallel_config")
        return config, config.tensor_parallel_config
    if type(config).__name__ == "ContextParallelConfig":
        raise UnsupportedError("context parallelism is not supported; pass a TensorParallelConfig")
    raise UsageError(f"expected diffusers' TensorParallelConfig or ParallelConfig, not {type(config).__name__}")


def degree_of(config: TensorParallelConfig) -> int:
    """The degree that `place` will give, known before any group is made."""
    return config.tp_degree if config.mesh is None else _axis_mesh(config.mesh).size()


def place(config: TensorParallelConfig, device: str | torch.device | None) -> Placement:
    """Find, or make, the mesh of ``config``, and where this rank stands on its axis. Every rank of it must call this.

    The device comes from the mesh, else from ``device``, else from the process group's backend; never from
    ``torch.accelerator``, which a registered but unused device may occupy. A mesh of several dimensions needs one
    called "tp".
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "sharding needs an initialised process group",
            hint="start the script with torchrun and call torch.distributed.init_process_group() first",
        )
    mesh = _make(config, device) if config.mesh is None else _axis_mesh(config.mesh)
    if device is not None and torch.device(device).type != mesh.device_type:
        raise UsageError(f"the mesh is on {mesh.device_type!r}, but device={str(device)!r} was asked for")
    if mesh.get_coordinate() is None:
        raise UsageError(f"rank {dist.get_rank()} is not in the mesh {mesh}")
    group = mesh.get_group()
    ranks = dist.get_process_group_ranks(group)
    axis = MeshAxis(
        name=(mesh.mesh_dim_names or (AXIS,))[0],
        degree=mesh.size(),
        index=ranks.index(dist.get_rank()),
        ranks=tuple(ranks),
        group=group.group_name,
        device_type=mesh.device_type,
    )
    host_group = group if mesh.device_type == "cpu" else side_group(axis.ranks)
    return Placement(axis, mesh, current_device(mesh.device_type), host_group)


def current_device(device_type: str) -> torch.device:
    """This process's device of that type, with its index; an index means nothing on the CPU."""
    if device_type == "cpu":
        return torch.device("cpu")
    current = torch.get_device_module(device_type).current_device()
    return torch.device(device_type, current if isinstance(current, int) else torch.device(current).index)


def _axis_mesh(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.ndim == 1:
        return mesh
    if AXIS not in (mesh.mesh_dim_names or ()):
        raise UsageError(
            f"the mesh has {mesh.ndim} dimensions, {mesh.mesh_dim_names or 'unnamed'}, and none is called {AXIS!r}",
            hint=f"pass one dimension (mesh['{AXIS}']), or name one of them {AXIS!r}",
        )
    return mesh[AXIS]


def _make(config: TensorParallelConfig, device: str | torch.device | None) -> DeviceMesh:
    world = dist.get_world_size()
    if config.tp_degree != world:
        raise UsageError(
            f"tp_degree is {config.tp_degree}, but the process group has {world} ranks",
            hint="pass a mesh to say which ranks belong together: TensorParallelConfig(mesh=mesh['tp'])",
        )
    device_type = torch.device(device).type if device is not None else device_of_group()
    return DeviceMesh(device_type, list(range(world)), mesh_dim_names=(AXIS,))


def device_of_group() -> str:
    """The device the default group communicates on: the accelerator's where it has one beside the CPU."""
    backend = str(dist.get_backend_config())
    by_backend = {name: device for device, name in BACKENDS.items()}
    devices = []
    for entry in backend.split(","):
        device, _, name = entry.rpartition(":")
        if name not in by_backend or device not in ("", *BACKENDS):
            continue
        if not device or by_backend[name] == device:
            devices.append(by_backend[name])
    accelerators = [device for device in devices if device != "cpu"]
    if not devices:
        raise UsageError(f"cannot tell the device from the process group's backend {backend!r}; pass device=")
    return accelerators[0] if accelerators else "cpu"
