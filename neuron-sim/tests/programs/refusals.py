"""What the device refuses, on two ranks; both print "fine". Both must still be in step after every refusal."""

import os

import pytest
import torch
import torch.distributed as dist

from neuron_sim import NeuronRuleError, NeuronSimError

dist.init_process_group("neuron")
rank = dist.get_rank()
x = torch.ones(2, device="neuron")
part = torch.ones(1, device="neuron")


def refused(words, call, kind=NeuronRuleError):
    with pytest.raises(kind) as error:
        call()
    assert words in str(error.value)
    if kind is NeuronRuleError:
        assert f"at {__file__}:" in str(error.value)
    dist.all_reduce(torch.ones(1, device="neuron"))


group = dist.new_group([0, 1])
refused("barrier is supported on the default group only", lambda: dist.barrier(group))
refused("has no point-to-point operations", lambda: dist.send(x, 1 - rank))
refused("has no point-to-point operations", lambda: dist.recv(x, 1 - rank))
refused("receiving from any source is not supported", lambda: dist.recv(x))
refused(
    "reduce_scatter does not support ReduceOp.PRODUCT",
    lambda: dist.reduce_scatter_tensor(part, x, op=dist.ReduceOp.PRODUCT),
)
refused(
    "all_to_all_single takes even splits only",
    lambda: dist.all_to_all_single(
        torch.empty(2 + 2 * rank, device="neuron"),
        torch.ones(3, device="neuron"),
        [1 + rank] * 2,
        [1, 2],
    ),
)
refused(
    "all_to_all takes even splits only",
    lambda: dist.all_to_all([torch.empty(1 + rank, device="neuron")] * 2, [part, x]),
)


def coalesced():
    from torch.distributed._functional_collectives import reduce_scatter_tensor_coalesced

    reduce_scatter_tensor_coalesced([x, x], "sum", [0, 0], group=dist.group.WORLD)


refused("reduce_scatter_tensor_coalesced is not supported", coalesced)
refused("No backend type associated with device type cpu", lambda: dist.all_reduce(torch.ones(1)), RuntimeError)
refused("monitored_barrier is only implemented for GLOO", lambda: dist.monitored_barrier(), ValueError)

# Ranks that disagree are told so, each on both ranks, and can go on.
sizes = f"rank 0: all_reduce SUM of 1 float32 at {__file__}:"
refused(sizes, lambda: dist.all_reduce(torch.ones(1 + rank, device="neuron")), NeuronSimError)
dtype = (torch.float32, torch.bfloat16)[rank]
refused("the ranks disagree", lambda: dist.all_reduce(torch.ones(1, dtype=dtype, device="neuron")), NeuronSimError)
refused("with root 1", lambda: dist.broadcast(x, src=rank), NeuronSimError)
op = (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank]
refused("rank 1: all_reduce MAX of 2 float32", lambda: dist.all_reduce(x, op), NeuronSimError)


def another():
    if rank == 0:
        dist.all_reduce(x)
    else:
        dist.broadcast(x, src=0)


refused("rank 1: broadcast of 2 float32 with root 0", another, NeuronSimError)
dist.barrier()
dist.destroy_process_group()
print("fine", flush=True)
# A process whose group saw errors may be aborted by gloo at its very end, without neuron-sim too.
os._exit(0)
