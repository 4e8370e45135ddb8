"""Operators give the host's results; aliasing, autograd and the composites that need care among them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

D = "neuron"


def both(call, *tensors):
    """The results of a call on the host and on the device, and the gradients of its inputs."""
    host = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    device = [t.to(D).requires_grad_(t.is_floating_point()) for t in tensors]
    expected, found = call(*host), call(*device)
    expected.square().sum().backward()
    found.square().sum().backward()
    assert found.device.type == D
    assert_close(found.cpu(), expected)
    for one, other in zip(host, device, strict=True):
        if one.grad is not None:
            assert_close(other.grad.cpu(), one.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "call, shapes",
    [
        (F.conv1d, [(1, 2, 9), (4, 2, 3), (4,)]),
        (F.conv2d, [(2, 3, 8, 8), (4, 3, 3, 3), (4,)]),
        (F.conv3d, [(1, 2, 4, 4, 4), (3, 2, 2, 2, 2), (3,)]),
        (F.conv_transpose2d, [(1, 3, 8, 8), (3, 4, 3, 3), (4,)]),
        (F.linear, [(5, 3), (4, 3), (4,)]),
        (F.scaled_dot_product_attention, [(1, 2, 16, 8)] * 3),
        (lambda x: F.group_norm(x, 2), [(2, 4, 3, 3)]),
        (lambda x: F.layer_norm(x, (4,)), [(3, 4)]),
        (lambda x: F.interpolate(x, scale_factor=2.0), [(1, 2, 4, 4)]),
        (lambda x: x[1:, ::2].t().contiguous().view(-1), [(4, 6)]),
        (lambda x: torch.cat([x, x.flip(0)]).cumsum(0), [(3, 2)]),
    ],
)
def test_forward_and_backward(call, shapes):
    torch.manual_seed(0)
    both(call, *(torch.randn(shape) for shape in shapes))


def test_attention_takes_the_hosts_kernel():
    import neuron_sim

    q = torch.randn(1, 2, 16, 8).to(D)
    neuron_sim.reset_counts()
    F.scaled_dot_product_attention(q, q, q)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in neuron_sim.counts().executed


def test_bfloat16_norms_are_the_hosts():
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    host = torch.native_layer_norm(x, (64,), None, None, 1e-5)
    device = torch.native_layer_norm(x.to(D), (64,), None, None, 1e-5)
    for one, other in zip(host, device, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other.cpu())


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_recurrent_cells(cell):
    host = cell(4, 6)
    device = copy.deepcopy(host).to(D)
    x = torch.randn(3, 4)
    expected, found = host(x), device(x.to(D))
    if isinstance(expected, tuple):
        expected, found = sum(expected), sum(found)
    expected.square().sum().backward()
    found.square().sum().backward()
    assert_close(found.cpu(), expected)
    for one, other in zip(host.parameters(), device.parameters(), strict=True):
        assert_close(other.grad.cpu(), one.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_recurrent_layers_on_padded_sequences(layer):
    host = layer(4, 6, num_layers=2, bidirectional=True)
    device = copy.deepcopy(host).to(D)
    x = torch.randn(5, 2, 4)
    pack = nn.utils.rnn.pack_padded_sequence
    assert_close(device(x.to(D))[0].cpu(), host(x)[0])
    found = device(pack(x.to(D), torch.tensor([5, 3])))[0].data.cpu()
    assert_close(found, host(pack(x, torch.tensor([5, 3])))[0].data)


def test_views_share_memory_both_ways():
    x = torch.zeros(4, 3, device=D)
    row, column = x[1], x.t()[2]
    row += 1
    column.fill_(7)
    assert x.cpu().tolist() == [[0, 0, 7], [1, 1, 7], [0, 0, 7], [0, 0, 7]]
    assert row.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert row._is_view()


def test_results_that_share_a_buffer_share_it_on_the_device():
    parts = torch.unbind(torch.arange(6.0, device=D).view(2, 3))
    chunks = torch.arange(6.0, device=D).chunk(3)
    chunks[1].zero_()
    assert parts[1].cpu().tolist() == [3, 4, 5]
    assert chunks[1]._base is not None
    assert chunks[1]._base.cpu().tolist() == [0, 1, 0, 0, 4, 5]


def test_in_place_returns_the_same_tensor():
    x = torch.ones(3, device=D)
    assert x.add_(1) is x
    assert torch.relu_(x) is x


def test_out_is_resized():
    out = torch.empty(0, device=D)
    returned = torch.add(torch.ones(5, device=D), 1, out=out)
    assert returned is out
    assert out.cpu().tolist() == [2.0] * 5
    values, indices = torch.empty(0, device=D), torch.empty(0, dtype=torch.int64, device=D)
    torch.max(torch.arange(6.0, device=D).view(2, 3), 1, out=(values, indices))
    assert (values.cpu().tolist(), indices.cpu().tolist()) == ([2, 5], [2, 2])
    assert torch.neuron.memory_allocated() >= out.untyped_storage().nbytes()


def test_indexing(rules):
    rules("beta-2.10")  # which runs what depends on values on the host
    x = torch.arange(12.0, device=D).view(3, 4)
    x[torch.tensor([0, 2])] = 5
    x[:, 1] = 7
    assert x[x > 6].cpu().tolist() == [7, 7, 7, 7]
    assert torch.nonzero(x == 5).shape == (6, 2)
    assert x.unique().cpu().tolist() == [4, 5, 6, 7]


def test_zero_tensors_and_negative_views():
    zero = torch._efficientzerotensor(3, device=D)
    assert (zero + torch.ones(3, device=D)).cpu().tolist() == [1, 1, 1]
    negative = torch._neg_view(torch.ones(3, device=D))
    assert negative.cpu().tolist() == [-1, -1, -1]
    assert (negative + 1).cpu().tolist() == [0, 0, 0]


def test_forward_mode_and_functional_transforms():
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(3, device=D), torch.ones(3, device=D))
        tangent = forward_ad.unpack_dual((x * 2).sin().sgn() + x.exp()).tangent
    assert_close(tangent.cpu(), torch.ones(3).exp())
    assert torch.func.vmap(lambda a: a.sin().sum())(torch.ones(3, 2, device=D)).shape == (3,)
    assert torch.func.jacrev(torch.sin)(torch.ones(2, device=D)).shape == (2, 2)


def test_optimizers_step_as_on_the_host():
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop):
        torch.manual_seed(0)
        host = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        device = copy.deepcopy(host).to(D)
        for model, where in ((host, "cpu"), (device, D)):
            optimizer = kind(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(2, 4, device=where)).square().sum().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        for one, other in zip(host.parameters(), device.parameters(), strict=True):
            assert_close(other.cpu(), one)


def test_autocast():
    layer, x = nn.Linear(4, 4).to(D), torch.ones(2, 4, device=D)
    with torch.autocast(D, dtype=torch.bfloat16):
        y = layer(x)
        assert y.dtype == torch.bfloat16
        assert torch.exp(y).dtype == torch.float32
        with torch.autocast(D, enabled=False):
            assert layer(x).dtype == torch.float32
    y.sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_gradient_scaler():
    layer = nn.Linear(4, 4).to(D)
    scaler, optimizer = torch.amp.GradScaler(D), torch.optim.SGD(layer.parameters(), lr=0.1)
    with torch.autocast(D, dtype=torch.float16):
        loss = layer(torch.ones(2, 4, device=D)).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(layer.weight.grad.cpu(), torch.zeros(4, 4))


def test_no_sparse_tensors():
    with pytest.raises(NotImplementedError, match="strided tensors only"):
        torch.ones(3, 3, device=D).to_sparse()


def test_no_mixing_of_cores():
    with pytest.raises(RuntimeError, match=r"neuron:1 and neuron:0! \(aten::add.Tensor\)"):
        torch.ones(3, device="neuron:1") + torch.ones(3, device="neuron:0")
    assert torch.ones(3, device="neuron:0").to("neuron:1").device.index == 1
