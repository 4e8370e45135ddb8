"""FSDP2 on two ranks: a step of training gives what one process gives; both print "fine"."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("neuron")
rank, size = dist.get_rank(), dist.get_world_size()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 10), nn.GELU(), nn.Linear(10, 3))


def train(net, data, device="neuron"):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = net(data.to(device)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


data = torch.randn(4 * size, 6, generator=torch.Generator().manual_seed(1))
alone = model()
expected = train(alone, data, "cpu")
mine = data[4 * rank : 4 * rank + 4]


def mean(losses):
    total = torch.tensor(losses, device="neuron")
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    return total.cpu()


mesh = init_device_mesh("neuron", (size,))
sharded = model().to("neuron")
for layer in sharded:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(sharded, mesh=mesh)
assert sharded[2].weight.to_local().shape == (5, 10)
torch.testing.assert_close(mean(train(sharded, mine)), torch.tensor(expected), rtol=1e-4, atol=1e-5)
for name, parameter in sharded.named_parameters():
    whole = parameter.full_tensor().cpu()
    torch.testing.assert_close(whole, alone.get_parameter(name), rtol=1e-3, atol=1e-5)

half = model().to("neuron")
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
fully_shard(half, mesh=mesh, mp_policy=policy)
torch.testing.assert_close(mean(train(half, mine)), torch.tensor(expected), rtol=0.05, atol=0.01)

copies = DistributedDataParallel(model().to("neuron"))
torch.testing.assert_close(mean(train(copies, mine)), torch.tensor(expected), rtol=1e-4, atol=1e-5)

dist.destroy_process_group()
print("fine")
