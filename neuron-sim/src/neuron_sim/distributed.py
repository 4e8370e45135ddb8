"""`init_process_group("neuron")`: gloo over the host memory that the simulated cores' tensors live in.

Confined here: `torch.distributed.Backend.register_backend` and the names of c10d's operators; tested on torch 2.13.
"""

import os
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from neuron_sim import _core, env

# What gloo can do. barrier and the object collectives take no tensor of the device and need nothing.
OPERATORS = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_",
    "allreduce_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "barrier",
    "broadcast_",
    "gather_",
    "monitored_barrier_",
    "recv_",
    "recv_any_source_",
    "reduce_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "scatter_",
    "send",
)


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> object:
    from torch.distributed import ProcessGroupGloo

    _take_own_core()
    return ProcessGroupGloo(store, rank, size, timeout)


def _take_own_core() -> None:
    """One core a process: under a launcher, the one of the local rank, unless the environment names others.

    Source: the native backend sets NEURON_RT_VISIBLE_CORES to LOCAL_RANK when it is absent.
    """
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is not None and not _core.is_started() and not env.VISIBLE_CORES.is_set():
        os.environ[env.VISIBLE_CORES.name] = local_rank
    _core.ensure_ready()


def register() -> None:
    """Register the backend `neuron` and its collectives. Once a process."""
    if "neuron" in dist.Backend.backend_list:
        return
    dist.Backend.register_backend("neuron", _create, devices=["neuron", "cpu"])
    _core.register_collectives(list(OPERATORS))
