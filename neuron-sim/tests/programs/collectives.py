"""Every collective that the device has, on two ranks; both print "fine"."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from neuron_sim import collectives

dist.init_process_group("neuron")
rank, size = dist.get_rank(), dist.get_world_size()
assert size == 2
assert torch.neuron.device_count() == 1
assert torch.neuron.current_device() == 0


def on(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device="neuron")


def equal(tensor, *values):
    assert tensor.device.type == "neuron"
    assert tensor.cpu().tolist() == list(values), (tensor.cpu().tolist(), values)


def reductions():
    for op, value in (("SUM", 5), ("AVG", 2.5), ("PRODUCT", 6), ("MIN", 2), ("MAX", 3)):
        x = on(float(rank + 2))
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        equal(x, value)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8):
        x = on(rank + 1, dtype=dtype)
        dist.all_reduce(x)
        equal(x, 3)
    x = on(float(rank))
    dist.all_reduce(x, async_op=True).wait()
    equal(x, 1)
    some = [on(1.0, float(rank)), on(2.0)]
    dist.all_reduce_coalesced(some)
    equal(some[0], 2, 1)
    equal(some[1], 4)
    x = on(float(rank + 1))
    dist.reduce(x, dst=1)
    if rank == 1:
        equal(x, 3)
    part = on(0.0, 0.0)
    dist.reduce_scatter_tensor(part, on(0.0, 1.0, 2.0, 3.0))
    equal(part, 4 * rank, 4 * rank + 2)
    whole = on(0.0, 1.0, 2.0, 3.0)
    dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.AVG)
    equal(part, 2 * rank, 2 * rank + 1)
    equal(whole, 0, 1, 2, 3)
    dist.reduce_scatter(part, [on(1.0, 2.0), on(3.0, 4.0)])
    equal(part, *((2, 4), (6, 8))[rank])


def moves():
    x = on(float(rank), 5.0)
    dist.broadcast(x, src=1)
    equal(x, 1, 5)
    parts = [on(0.0), on(0.0)]
    dist.all_gather(parts, on(float(rank)))
    equal(parts[0], 0)
    equal(parts[1], 1)
    whole = on(0, 0, 0, 0, dtype=torch.int64)
    dist.all_gather_into_tensor(whole, on(rank, rank + 10, dtype=torch.int64))
    equal(whole, 0, 10, 1, 11)
    parts = [on(0.0), on(0.0)] if rank == 0 else None
    dist.gather(on(float(rank + 1)), parts, dst=0)
    if rank == 0:
        equal(parts[0], 1)
        equal(parts[1], 2)
    x = on(0.0, 0.0)
    dist.scatter(x, [on(1.0, 2.0), on(3.0, 4.0)] if rank == 1 else None, src=1)
    equal(x, *((1, 2), (3, 4))[rank])
    out = on(0.0, 0.0)
    dist.all_to_all_single(out, on(10.0 * rank, 10.0 * rank + 1))
    equal(out, rank, 10 + rank)
    outs = [torch.zeros(2, 1, device="neuron") for _ in range(2)]
    dist.all_to_all(outs, [torch.full((2, 1), float(10 * rank + to), device="neuron") for to in range(2)])
    equal(outs[0].flatten(), rank, rank)
    equal(outs[1].flatten(), 10 + rank, 10 + rank)
    # A part of a larger tensor keeps its place in it.
    row = torch.zeros(2, 2, device="neuron")
    dist.broadcast(row[1], src=0) if rank else dist.broadcast(on(7.0, 8.0), src=0)
    equal(row[1], *((0, 0), (7, 8))[rank])


def objects():
    gathered = [None, None]
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": 0}, {"rank": 1}]
    some = [{"from": rank}]
    dist.broadcast_object_list(some, src=1)
    assert some == [{"from": 1}]
    received = [None]
    dist.scatter_object_list(received, ["a", "b"] if rank == 0 else None, src=0)
    assert received == ["ab"[rank]]
    gathered = [None, None] if rank == 0 else None
    dist.gather_object(rank, gathered, dst=0)
    assert rank == 1 or gathered == [0, 1]


def meshes():
    mesh = DeviceMesh("neuron", [0, 1])
    assert fc.all_reduce(on(1.0), "sum", mesh).cpu().tolist() == [2]
    assert fc.all_gather_tensor(on(float(rank)), 0, mesh).cpu().tolist() == [0, 1]
    assert fc.reduce_scatter_tensor(on(1.0, 2.0), "sum", 0, mesh).cpu().tolist() == [2 * (rank + 1)]
    assert fc.all_to_all_single(on(0.0, 1.0), None, None, mesh).cpu().tolist() == [rank, rank]
    table = torch.arange(12.0).view(6, 2)
    weight = distribute_tensor(table.to("neuron"), mesh, [Shard(0)])
    equal(weight.full_tensor().flatten(), *range(12))
    product = weight @ distribute_tensor(torch.ones(2, 1, device="neuron"), mesh, [Replicate()])
    equal(product.full_tensor().flatten(), 1, 5, 9, 13, 17, 21)
    uneven = distribute_tensor(torch.arange(3.0, device="neuron"), mesh, [Shard(0)])
    equal(uneven.redistribute(placements=[Replicate()]).to_local(), 0, 1, 2)
    moved = DTensor.from_local(table[3 * rank : 3 * rank + 3].to("neuron"), mesh, [Shard(0)])
    equal(moved.redistribute(placements=[Shard(1)]).to_local().flatten(), *table[:, rank].tolist())
    both = init_device_mesh("neuron", (1, 2), mesh_dim_names=("data", "tp"))
    x = on(1.0)
    dist.all_reduce(x, group=both["tp"].get_group())
    equal(x, 2)


def counting():
    collectives.reset_counts()
    dist.all_reduce(on(1.0, 2.0))
    dist.all_gather_into_tensor(on(*[0.0] * 6), on(1.0, 2.0, 3.0))
    found = {count.name: (count.calls, count.bytes) for count in collectives.counts()}
    assert found == {"all_reduce": (1, 8), "all_gather_into_tensor": (1, 24)}, found


reductions()
moves()
objects()
meshes()
counting()
dist.barrier()
dist.destroy_process_group()
print("fine")
