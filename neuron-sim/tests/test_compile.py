"""`torch.compile(backend="neuron")`: results are eager mode's, shapes are static, the rest is refused."""

import pytest
import torch
from torch import nn

from neuron_sim import ConfigurationError, NeuronRuleError, env, opcache
from neuron_sim.compile import artifacts, record, shortcut
from neuron_sim.report import recorder

D = "neuron"


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """As a new process with an empty cache."""
    monkeypatch.setenv(env.NEFF_CACHE_DIR.name, str(tmp_path / "neff"))
    torch.neuron.init()
    opcache.start_again()
    torch._dynamo.reset()
    artifacts.forget_loaded()
    shortcut.forget()
    record.forget()
    yield
    monkeypatch.undo()
    opcache.start_again()


def compiled(function, **keywords):
    return torch.compile(function, backend="neuron", **({"fullgraph": True} | keywords))


def flat(value):
    return [tensor for part in value for tensor in flat(part)] if isinstance(value, list | tuple) else [value]


class Block(nn.Module):
    """What blocks of a picture model do: attention, norms, a convolution, a split, a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.conv, self.groups = nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2)

    def forward(self, x):
        heads = self.linear(x).unflatten(-1, (2, 4)).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        picture = self.groups(self.conv(y.unsqueeze(1)))
        scale = torch.tensor([1.0, 2.0], device=x.device)
        return self.norm(y), picture * scale.view(2, 1, 1), x.chunk(2), y.argmax(-1)


def test_equals_eager():
    model = Block().to(D).eval()
    x = torch.randn(2, 4, 8).to(D)
    with torch.no_grad():
        expected, found = flat(model(x)), flat(compiled(model)(x))
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.device == other.device
        assert torch.equal(one.cpu(), other.cpu())
    assert (artifacts.totals.aot_autograd, artifacts.totals.compiled) == (1, 1)


def test_random_numbers_are_the_devices():
    def draw(x):
        return torch.rand_like(x) + nn.functional.dropout(x, 0.5)

    x = torch.ones(64).to(D)
    results = []
    for function in (draw, compiled(draw)):
        torch.manual_seed(0)
        results.append(function(x))
    assert torch.equal(results[0].cpu(), results[1].cpu())


def test_mutation_views_and_aliases():
    def step(a, b):
        a.add_(1)
        tail = b[1:]
        tail.mul_(2)
        return a, tail, a.t(), torch.arange(3, device=a.device) + a.new_zeros(3)

    a, b = torch.ones(2, 2, device=D), torch.ones(3, device=D)
    same, tail, turned, _ = compiled(step)(a, b)
    assert (a.cpu().tolist(), b.cpu().tolist()) == ([[2, 2], [2, 2]], [1, 2, 2])
    assert same is a
    turned[0, 1] = 7
    tail[0] = 9
    assert (a[1, 0].item(), b[1].item()) == (7, 9)


def test_two_results_that_share_memory():
    one, other = compiled(lambda x: (lambda y: (y, y.view(-1)))(x + 1))(torch.zeros(2, 2).to(D))
    one[0, 0] = 5
    assert other[0].item() == 5


@pytest.mark.parametrize("dynamic", [None, False])
def test_a_new_shape_compiles_once_and_a_seen_one_never(dynamic):
    function = compiled(lambda x: x.softmax(-1), dynamic=dynamic)
    for size in (4, 6, 4, 8, 6):
        assert function(torch.ones(size, device=D)).shape == (size,)
    assert artifacts.totals.compiled == 3


@pytest.mark.parametrize("mark", [False, True])
def test_dynamic_shapes_are_refused(mark):
    x = torch.ones(4, device=D)
    if mark:
        torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(RuntimeError, match=r"Dynamic shapes detected in the model, but torch-neuronx requires static"):
        compiled(lambda x: x + 1, dynamic=None if mark else True)(x)


def test_other_backends_keep_automatic_dynamic_shapes():
    seen = []

    def other(graph, inputs):
        seen.append(any(isinstance(value, torch.SymInt) for value in inputs))
        return graph.forward

    compiled(lambda x: x + 1)(torch.ones(4, device=D))
    function = torch.compile(lambda x: x * 2, backend=other)
    for size in (4, 5):
        function(torch.ones(size))
    assert seen == [False, True]


def test_graph_breaks():
    def broken(x):
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    assert compiled(broken, fullgraph=False)(torch.ones(2, device=D)).cpu().tolist() == [3, 3]
    assert artifacts.totals.compiled == 2


def test_training():
    model = nn.Linear(3, 2).to(D)
    x = torch.randn(4, 3).to(D)
    model(x).square().sum().backward()
    expected = model.weight.grad.cpu()
    model.weight.grad = None
    compiled(model)(x).square().sum().backward()
    assert torch.allclose(model.weight.grad.cpu(), expected)
    assert artifacts.totals.compiled == 2


def test_inputs_on_the_host(monkeypatch):
    def double(x):
        return x * 2

    x = torch.ones(2)
    assert compiled(double)(x).device.type == D
    monkeypatch.setenv("TORCH_NEURONX_RETAIN_DEVICE_MODE", "1")
    torch._dynamo.reset()
    assert compiled(double)(x).device.type == "cpu"
    monkeypatch.setenv("TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY", "1")
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=r"input 0 of the graph.*is on cpu device, expected neuron"):
        compiled(double)(x)


def test_float64_becomes_float32():
    found = compiled(lambda x: torch.arange(3, device=x.device, dtype=torch.float64) * x)(torch.ones(3, device=D))
    assert (found.dtype, found.cpu().tolist()) == (torch.float32, [0, 1, 2])


def test_unknown_options_are_refused():
    for keywords in ({"options": {"speed": 11}}, {"mode": "max-autotune"}):
        with pytest.raises(RuntimeError, match=r"speed|max-autotune") as caught:
            compiled(lambda x: x + 1, **keywords)(torch.ones(2, device=D))
        assert isinstance(caught.value.inner_exception, ConfigurationError)


def test_one_graph_on_two_cores_is_refused():
    with pytest.raises(RuntimeError, match=r"on the cores 0, 1; a program runs on one core"):
        compiled(lambda a, b: (a + 1, b + 1))(torch.ones(2, device="neuron:0"), torch.ones(2, device="neuron:1"))


def test_a_refusal_is_the_rulebooks():
    x = torch.ones(4, device=D)
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(RuntimeError) as caught:
        compiled(lambda x: x + 1)(x)
    assert isinstance(caught.value.inner_exception, NeuronRuleError)
    assert (recorder.refusal_behind(caught.value) or "").startswith("Dynamic shapes detected in the model")


def test_repeated_blocks_of_a_picture_model_are_two_graphs():
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.Flux2Transformer2DModel(
        in_channels=4, num_layers=4, num_single_layers=8, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, timestep_guidance_channels=8, axes_dims_rope=(2, 2, 2, 2), mlp_ratio=1.0,
    ).eval()  # fmt: skip

    def inputs(side, text):
        given = {"hidden_states": torch.randn(1, side * side, 4), "encoder_hidden_states": torch.randn(1, text, 16)}
        given |= {"timestep": torch.ones(1), "guidance": torch.ones(1)}
        given |= {"img_ids": torch.zeros(1, side * side, 4), "txt_ids": torch.zeros(1, text, 4)}
        return {name: tensor.to(D) for name, tensor in given.items()}

    small, large = inputs(2, 3), inputs(3, 3)
    model = model.to(D)
    with torch.no_grad():
        expected = [model(**given, return_dict=False)[0].cpu() for given in (small, large)]
        model.compile_repeated_blocks(backend="neuron", fullgraph=True)
        assert torch.equal(model(**small, return_dict=False)[0].cpu(), expected[0])
        assert artifacts.totals.compiled == 2
        assert torch.equal(model(**large, return_dict=False)[0].cpu(), expected[1])
        for given in (small, large, small):
            model(**given, return_dict=False)
    assert (artifacts.totals.compiled, artifacts.totals.aot_autograd) == (4, 4)
    assert [(graph.count.runs, graph.is_recompile) for graph in record.graphs()] == [
        (12, False), (24, False), (8, True), (16, True),
    ]  # fmt: skip


def test_the_stand_in_names_models_in_the_report():
    from torch_neuronx import neuron_dynamo_backend

    neuron_dynamo_backend.set_model_name("Flux2")
    torch.compile(lambda x: x + 1, backend=neuron_dynamo_backend.neuron_backend)(torch.ones(2, device=D))
    neuron_dynamo_backend.set_model_name(None)
    assert record.as_data()["graphs"][0]["model"] == "Flux2"
    assert neuron_dynamo_backend.get_fallback_ops() == sorted(neuron_dynamo_backend.get_fallback_ops())


def test_graphs_are_written_for_who_asks(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_NEURONX_DEBUG_DIR", str(tmp_path))
    compiled(lambda x: x.cos())(torch.ones(2, device=D))
    dynamo, aten = sorted((tmp_path / "proc_0").iterdir())
    assert (dynamo.name[-11:], aten.name[-14:]) == ("_dynamo.txt", "_inference.txt")
    assert "aten.cos" in aten.read_text()
