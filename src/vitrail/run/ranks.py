"""Joining a run: the process group, this rank's device, its share of the cores."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import env
from ..apply.groups import side_group
from ..errors import UnsupportedError, UsageError
from ..layout import AXIS, BACKENDS
from .rank import lost_touch


def threads_for(ranks: int) -> int:
    """CPU threads for one of ``ranks`` on this machine."""
    return max(1, len(os.sched_getaffinity(0)) // ranks) if hasattr(os, "sched_getaffinity") else 1


@contextmanager
def joined(device_type: str, degree: int) -> Iterator[DeviceMesh]:
    """Join the run that ``RANK`` speaks of, and leave it after: the mesh axis to shard along.

    With more ranks than ``degree`` the mesh has a second dimension, "data", whose rows work apart.
    """
    world = env.WORLD_SIZE.read() or 1
    if degree < 1 or world % degree:
        raise UsageError(f"{world} ranks were started, which a degree of {degree} does not divide")
    bind(device_type)
    try:
        dist.init_process_group(BACKENDS[device_type], timeout=datetime.timedelta(seconds=env.TIMEOUT_SECONDS.read()))
    except RuntimeError as error:
        if device_type == "cpu" or lost_touch(str(error)):
            raise
        # The device's own words: cores that cannot be routed together, or that another process has.
        raise UnsupportedError(
            f"{world} ranks cannot be a group on {device_type}: {' '.join(str(error).split())}"
        ) from error
    yield mesh(device_type, degree)
    # Only after success: when a rank has failed, taking the group down can wait for the others.
    dist.destroy_process_group()


def mesh(device_type: str, degree: int) -> DeviceMesh:
    """The mesh axis "tp" of ``degree`` ranks out of all ranks there are."""
    world = dist.get_world_size()
    if world % degree:
        raise UsageError(f"the process group has {world} ranks, which a degree of {degree} does not divide")
    ranks = torch.arange(world).view(-1, degree)
    return DeviceMesh(device_type, ranks, mesh_dim_names=("data", AXIS))[AXIS]


def host_group() -> dist.ProcessGroup:
    """A group of all ranks for objects and tensors of the CPU: the default one if that is gloo, else one beside it."""
    if "gloo" in str(dist.get_backend_config()):
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    return side_group(tuple(range(dist.get_world_size())))


def bind(device_type: str) -> None:
    """Take this rank's device on its machine, and on the CPU its share of the cores."""
    if device_type == "cpu":
        if env.OMP_NUM_THREADS.read() is None:
            torch.set_num_threads(threads_for(int(os.environ.get("LOCAL_WORLD_SIZE") or env.WORLD_SIZE.read() or 1)))
        return
    if device_type != "neuron":  # one core a process: the runtime binds it when the group is made
        torch.get_device_module(device_type).set_device(env.LOCAL_RANK.read() or 0)
