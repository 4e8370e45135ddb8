"""`init_process_group("neuron")`: gloo over the host memory that the simulated cores' tensors live in.

Confined here: `torch.distributed.Backend.register_backend` and the names of c10d's operators; tested on torch 2.13.
"""

from datetime import timedelta

import torch.distributed as dist

from neuron_sim import _core

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


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo(store, rank, size, timeout)


def register() -> None:
    """Register the backend `neuron` and its collectives. Once a process."""
    if "neuron" in dist.Backend.backend_list:
        return
    dist.Backend.register_backend("neuron", _create, devices=["neuron", "cpu"])
    _core.register_collectives(list(OPERATORS))
