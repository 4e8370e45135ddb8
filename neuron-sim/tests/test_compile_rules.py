"""Each rule of compiled graphs: what triggers it, what nearly does, in its words and at the user's line."""

import dataclasses
import sys

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from neuron_sim import NeuronRuleError, NeuronRuleWarning, profiles
from neuron_sim.compile.inspect import Finding, enforce, inspect_graph
from neuron_sim.compile.instructions import estimate_instructions, product_tiles
from neuron_sim.compile.liveness import peak_bytes
from neuron_sim.policy import Rulebook


def graph_of(function, *inputs, dynamic=False):
    """The ATen graph that AOTAutograd makes of a function."""
    graphs = []

    def keep(graph_module, _):
        graphs.append(graph_module)
        return make_boxed_func(graph_module.forward)

    torch._dynamo.reset()
    with (
        torch.no_grad(),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True),
    ):
        torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True, dynamic=dynamic)(*inputs)
    (graph,) = graphs
    return graph


def found(function, *inputs, profile="sdk-2.33", strictness="warn", dynamic=False, settings=None, capacity=None):
    book = Rulebook(profiles.profile(profile), strictness, settings)
    return inspect_graph(graph_of(function, *inputs, dynamic=dynamic), book, capacity)


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def after(function, lines: int) -> str:
    return f"{__file__}:{function.__code__.co_firstlineno + lines}"


def test_float64_is_found_where_it_begins():
    def rotary(x):
        angles = torch.arange(4, dtype=torch.float64) / 3
        return x * torch.cos(angles).float()

    finding = only(found(rotary, torch.ones(2, 4)))
    assert (finding.rule, finding.op, finding.action) == ("float64", "aten::arange", "convert")
    assert str(finding.where) == after(rotary, 1)
    assert finding.message.startswith(
        "float64 is not supported on neuron: the tensor becomes float32 [aten::arange at "
    )
    assert "rule float64 of profile sdk-2.33" in finding.message
    assert only(found(rotary, torch.ones(2, 4), strictness="raise")).action == "refuse"
    assert not found(rotary, torch.ones(2, 4), strictness="off")


def test_a_float64_input_is_found_at_its_first_use():
    def first(x):
        return x.float() + 1

    finding = only(found(first, torch.ones(2, dtype=torch.float64)))
    assert (finding.rule, str(finding.where)) == ("float64", after(first, 1))


def test_pythons_numbers_are_no_float64():
    assert not found(lambda x: torch.where(x > 0.5, x * 2.5, 1e-3), torch.ones(3))


def test_complex_numbers():
    def rotary(x):
        turned = torch.view_as_complex(x) * 1j
        return torch.view_as_real(turned)

    assert not found(rotary, torch.ones(3, 2))  # decomposed
    for finding in (
        only(found(rotary, torch.ones(3, 2), profile="beta-2.10")),
        only(found(rotary, torch.ones(3, 2), settings={"TORCH_NEURONX_COMPLEX_DECOMPOSE": False})),
    ):
        assert finding.message.startswith(
            "NCC_EVRF004: Complex data types are not supported [aten::view_as_complex at "
        )
        assert (finding.action, str(finding.where)) == ("refuse", after(rotary, 1))


def test_int64_numbers_beyond_32_bits():
    def hashed(x):
        return x * 2**31

    finding = only(found(hashed, torch.ones(3, dtype=torch.int64)))
    assert "and 2147483648 does not fit" in finding.message
    assert str(finding.where) == after(hashed, 1)
    assert not found(lambda x: x * (2**31 - 1), torch.ones(3, dtype=torch.int64))
    # The end of a slice without one is the largest number there is, and no value.
    assert not found(lambda x: x[1:] + 1, torch.ones(3, dtype=torch.int64))


def test_shapes_that_depend_on_values():
    def masked(x):
        return x[x > 0]

    finding = only(found(masked, torch.ones(3)))
    assert (finding.rule, finding.action) == ("static_shapes", "refuse")
    assert "Dynamic shapes detected in the model, but torch-neuronx requires static shapes" in finding.message
    assert str(finding.where) == after(masked, 1)
    assert not found(lambda x: torch.where(x > 0, x, 0.0), torch.ones(3))
    assert not found(lambda x, i: x[i], torch.ones(3), torch.tensor([0, 2]))
    repeats = torch.tensor([1, 2])
    assert not found(lambda x, r: torch.repeat_interleave(x, r, output_size=3), torch.ones(2), repeats)
    assert [f.rule for f in found(lambda x, r: torch.repeat_interleave(x, r), torch.ones(2), repeats)]


def test_sizes_that_are_not_fixed():
    def twice(x):
        return x * 2

    findings = found(twice, torch.ones(3, 4), dynamic=True)
    assert {f.rule for f in findings} == {"static_shapes"}
    assert all(f.action == "refuse" and str(f.where) == after(twice, 1) for f in findings)
    assert not found(twice, torch.ones(3, 4))


def test_a_number_read_on_the_host():
    def read(x):
        return x * int(x.sum().item())

    finding = found(read, torch.ones(3, dtype=torch.int64))[0]
    assert "the host must read" in finding.message
    assert (finding.action, str(finding.where)) == ("refuse", after(read, 1))
    assert not found(lambda x: x * x.sum(), torch.ones(3, dtype=torch.int64))


def test_memory_formats():
    def channels_last(x):
        return x.clone(memory_format=torch.channels_last)

    finding = only(found(channels_last, torch.ones(1, 2, 3, 4)))
    assert "memory format channels_last is not supported on neuron" in finding.message
    assert str(finding.where) == after(channels_last, 1)
    assert not found(lambda x: x.clone(memory_format=torch.contiguous_format), torch.ones(1, 2, 3, 4))


def test_operators_that_the_compiler_does_not_know():
    def solved(x):
        return torch.linalg.solve(x, x)

    finding = found(solved, torch.eye(3))[0]
    assert finding.message.startswith("NCC_EVRF001: An unsupported operator was used: aten::_linalg_solve_ex")
    assert (finding.action, str(finding.where)) == ("refuse", after(solved, 1))
    assert not found(lambda x: x @ x, torch.eye(3))
    group_norm = torch.nn.GroupNorm(2, 4)
    assert not found(group_norm, torch.ones(1, 4, 3))  # taken apart before the compiler sees it


def test_calls_without_a_test():
    transposed = torch.nn.ConvTranspose2d(2, 2, 3)
    assert only(found(transposed, torch.ones(1, 2, 4, 4))).rule == "untested"
    assert not found(torch.nn.Conv2d(2, 2, 3), torch.ones(1, 2, 4, 4))


def test_attention_with_wide_heads():
    def attend(x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    finding = only(found(attend, torch.ones(1, 2, 16, 129)))
    assert "with heads of 129, and the fused attention kernel takes heads of at most 128" in finding.message
    assert (finding.action, str(finding.where)) == ("tell", after(attend, 1))
    assert not found(attend, torch.ones(1, 2, 16, 128))


def test_too_many_instructions(monkeypatch):
    def product(x):
        return x @ x

    graph = graph_of(product, torch.ones(256, 256))
    total = estimate_instructions(graph).total
    assert total == 2 * 2 * 1 + 1
    for limit, action in ((total * 2, None), (total + 1, "tell"), (total, "tell"), (total // 2, "refuse")):
        book = Rulebook(profiles.profile("sdk-2.33"), "warn")
        rules = dict(book.profile.rules)
        rules["instructions"] = dataclasses.replace(rules["instructions"], limit=limit)
        monkeypatch.setattr(book, "profile", dataclasses.replace(book.profile, rules=rules))
        findings = inspect_graph(graph, book)
        assert [f.action for f in findings] == ([action] if action else [])
        for finding in findings:
            assert (
                "NCC_EVRF007: The number of instructions generated exceeds the limit: about 5 by an" in finding.message
            )
            assert str(finding.where) == after(product, 1)


def test_more_than_a_cores_memory():
    def add(x):
        return (x + 1) * 2

    graph = graph_of(add, torch.ones(1024))
    assert peak_bytes(graph).total == 3 * 4096  # the input, and an intermediate beside what it is made into
    book = Rulebook(profiles.profile("sdk-2.33"), "warn")
    assert not inspect_graph(graph, book, 3 * 4096)
    finding = only(inspect_graph(graph, book, 3 * 4096 - 1))
    assert finding.message.startswith("NCC_EOOM001: The combined memory needed for the model tensors exceeds")
    assert (finding.rule, finding.action, str(finding.where)) == ("hbm", "refuse", after(add, 1))


def test_a_view_needs_no_memory_and_keeps_what_it_looks_at():
    assert peak_bytes(graph_of(lambda x: x.view(2, 512).t(), torch.ones(1024))).total == 4096

    def kept(x):
        row = (x + 1).view(2, 512)
        return (x * 2).sum() + row.sum()

    assert peak_bytes(graph_of(kept, torch.ones(1024))).total >= 3 * 4096


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "tiles"),
    [
        (1, 1, 1, 1),
        (128, 128, 512, 1),
        (129, 128, 512, 2),
        (128, 129, 512, 2),
        (512, 128, 128, 1),
        (4608, 3072, 3072, 5184),
    ],
)
def test_tiles_of_a_product(rows, inner, columns, tiles):
    assert product_tiles(rows, inner, columns) == tiles


def test_enforce_raises_and_tells_as_eager_does():
    def both(x):
        angles = torch.arange(4, dtype=torch.float64).float()
        return torch.linalg.solve(x * (angles + 1), x)

    book = Rulebook(profiles.profile("sdk-2.33"), "warn")
    findings = inspect_graph(graph_of(both, torch.eye(4) + 1), book)
    with pytest.warns(NeuronRuleWarning, match="becomes float32") as told, pytest.raises(NeuronRuleError) as refused:
        enforce(findings, book)
    assert refused.value.rule == "unsupported_op"
    assert f"{told[0].filename}:{told[0].lineno}" == after(both, 1)
    assert {event.rule for event in book.events} == {"float64", "unsupported_op"}


def test_a_line_of_a_library_is_named_beside_the_users(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages" / "lib"
    folder.mkdir(parents=True)
    (folder / "wide.py").write_text("import torch\ndef ids(n):\n    return torch.arange(n, dtype=torch.float64)\n")
    monkeypatch.syspath_prepend(str(folder))
    import wide

    def use(x):
        return x + wide.ids(3).float()

    assert str(only(found(use, torch.ones(3))).where) == after(use, 1) + " (in lib/wide.py:3)"
    del sys.modules["wide"]
