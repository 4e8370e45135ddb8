"""Where tensors live and how they travel: copies, saving, pickling, pinning, parameters that change device."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

D = "neuron"


def test_save_and_load():
    file = io.BytesIO()
    torch.save({"x": torch.arange(5, device=D), "state": nn.Linear(2, 2).to(D).state_dict()}, file)
    for where, expected in (
        (None, "neuron:0"),
        ("cpu", "cpu"),
        ("neuron:1", "neuron:1"),
        (torch.device(D), "neuron:0"),
    ):
        file.seek(0)
        loaded = torch.load(file, map_location=where)
        assert str(loaded["x"].device) == expected
        assert loaded["x"].cpu().tolist() == [0, 1, 2, 3, 4]
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    file.seek(0)
    assert torch.load(file, map_location=D).device.type == D


def test_load_to_a_core_that_is_not_there():
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    file.seek(0)
    with pytest.raises((RuntimeError, ValueError), match="device"):
        torch.load(file, map_location="neuron:99")


def test_deepcopy_and_pickle():
    x = torch.arange(6.0, device=D)[2:]
    y = copy.deepcopy(x)
    y += 1
    assert x.cpu().tolist() == [2, 3, 4, 5]
    z = pickle.loads(pickle.dumps(x))
    assert z.device == x.device
    assert torch.equal(z, x)
    assert copy.deepcopy(nn.Linear(2, 2).to(D)).weight.device.type == D


def test_safetensors_by_index_and_from_the_device(tmp_path):
    # safetensors knows the names of devices and refuses "neuron", also on the real one; it takes an index.
    safetensors = pytest.importorskip("safetensors.torch")
    path = str(tmp_path / "x.safetensors")
    safetensors.save_file({"x": torch.arange(3.0, device=D)}, path)
    assert safetensors.load_file(path, device=1)["x"].device == torch.device("neuron:1")
    with safetensors.safe_open(path, "pt", device=0) as file:
        assert file.get_tensor("x").cpu().tolist() == [0, 1, 2]


def test_printing_moves_to_the_host_once():
    import neuron_sim

    x = torch.arange(3.0, device=D)
    neuron_sim.reset_counts()
    assert repr(x) == "tensor([0., 1., 2.], device='neuron:0')"
    assert f"{x.sum():.1f}" == "3.0"
    assert set(neuron_sim.counts().executed) <= {
        "aten::_copy_from",
        "aten::empty_strided",
        "aten::sum.dim_IntList",
        "aten::_local_scalar_dense",
    }
    assert "grad_fn" in repr(torch.ones(1, device=D, requires_grad=True) * 2)


def test_pinned_memory():
    x = torch.ones(4).pin_memory()
    assert x.is_pinned()
    assert x[1:].is_pinned()
    assert not torch.ones(4).is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert torch.equal(x.to(D, non_blocking=True).cpu(), x)


@pytest.mark.parametrize("workers", [0, 2])
def test_dataloader_pins(workers):
    torch.neuron.init()
    loader = DataLoader(TensorDataset(torch.arange(10.0)), batch_size=4, pin_memory=True, num_workers=workers)
    batches = [batch for (batch,) in loader]
    assert all(batch.is_pinned() for batch in batches)
    assert torch.equal(torch.cat(batches), torch.arange(10.0))


def test_parameters_change_device_in_place():
    p = nn.Parameter(torch.ones(3))
    kept = p
    p.data = p.data.to(D)
    assert p.device.type == D
    (p * 2).sum().backward()
    assert p.grad.device.type == D
    p.grad = None
    p.data = p.data.cpu()
    assert p is kept
    assert (p + torch.ones(3)).device.type == "cpu"
    layer = nn.Linear(2, 2)
    weight = layer.weight
    assert layer.to(D).weight is weight


def test_methods_that_pytorch_generates():
    assert torch.ones(2).neuron().is_neuron
    assert nn.Linear(2, 2).neuron(1).weight.device.index == 1
    storage = torch.ones(2).untyped_storage().neuron()
    assert storage.is_neuron
    assert storage.nbytes() == 8


def test_storages_resize_and_are_set():
    x = torch.arange(6.0, device=D)
    y = torch.empty(0, device=D).set_(x.untyped_storage(), 2, (2,), (1,))
    x.resize_(20)
    assert y.cpu().tolist() == [2, 3]
    before = torch.neuron.memory_allocated()
    x.untyped_storage().resize_(0)
    assert torch.neuron.memory_allocated() == before - 80


def test_default_device_context():
    with torch.device(D):
        assert nn.Linear(3, 3).weight.device.type == D
    assert torch.ones(1).device.type == "cpu"


def test_numpy_is_refused_and_read():
    numpy = pytest.importorskip("numpy")
    with pytest.raises(TypeError, match="can't convert neuron:0 device type tensor to numpy"):
        torch.ones(2, device=D).numpy()
    assert torch.tensor(numpy.ones(2, dtype="float32"), device=D).dtype == torch.float32
