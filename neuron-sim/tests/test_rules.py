"""Each rule: what triggers it, what nearly does, in its words and at the user's line, at each strictness."""

import inspect
import warnings

import pytest
import torch

from neuron_sim import ConfigurationError, NeuronRuleError, NeuronRuleWarning, instances, profiles

D = "neuron"


def here(ahead: int = 0) -> str:
    """`file:line` of the caller's line, or of one below it."""
    frame = inspect.currentframe().f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno + ahead}"


def test_float64_becomes_float32_and_is_told_once_a_line(rules):
    rules()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            x = torch.zeros(2, dtype=torch.float64, device=D)
            line = here(-1)
        y = torch.ones(2, dtype=torch.float64).to(D)
    assert x.dtype == y.dtype == torch.float32
    assert [w.category for w in told] == [NeuronRuleWarning] * 2
    assert "float64 is not supported on neuron: the tensor becomes float32" in str(told[0].message)
    assert f"at {line}; rule float64 of profile sdk-2.33" in str(told[0].message)
    assert f"{told[0].filename}:{told[0].lineno}" == line


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.ones(3, device=D).double(),
        lambda: torch.ones(3, device=D).sum(dtype=torch.float64),
        lambda: torch.linspace(0, 1, 3, dtype=torch.float64, device=D),
        lambda: torch.ones(3, device=D) * torch.tensor(2.0, dtype=torch.float64).to(D),
        lambda: torch.nn.Linear(2, 2, dtype=torch.float64).to(D).weight,
    ],
)
def test_float64_by_any_way(rules, call):
    book = rules()
    with pytest.warns(NeuronRuleWarning, match="becomes float32"):
        assert call().dtype == torch.float32
    assert {event.rule for event in book.events} == {"float64"}


def test_bytes_cannot_be_viewed_as_float64(rules):
    rules()
    with pytest.warns(NeuronRuleWarning), pytest.raises(TypeError, match="cannot be viewed as"):
        torch.ones(4, device=D).view(torch.float64)
    assert torch.ones(4, device=D).view(torch.int32).dtype == torch.int32


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.ones(3, device=D) * 2.5,
        lambda: torch.ones(3, device=D) * torch.tensor(2.5, dtype=torch.float64),
        lambda: torch.where(torch.ones(3, device=D) > 0, 1.0, torch.ones(3, device=D)),
        lambda: torch.ones(3, device=D).masked_fill(torch.ones(3, device=D) > 0, float("-inf")),
        lambda: torch.tensor([1.0, 2.0], device=D).mean(),
        lambda: torch.tensor(1.5, device=D),
    ],
)
def test_python_numbers_are_no_float64(rules, call):
    book = rules("beta-2.10", "raise")
    assert call().dtype == torch.float32
    assert not book.events


def test_raise_makes_the_silent_an_error(rules):
    rules(strictness="raise")
    with pytest.raises(NeuronRuleError, match="becomes float32") as refused:
        torch.zeros(2, dtype=torch.float64, device=D)
    assert here(-1) in str(refused.value)
    with pytest.raises(NeuronRuleError, match="aten::normal_ has no kernel on neuron"):
        torch.randn(2, device=D)


def test_off_has_no_rules(rules):
    book = rules("beta-2.10", "off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.ones(2, dtype=torch.float64, device=D).sum().dtype == torch.float64
        assert (torch.ones(2, dtype=torch.complex64, device=D) * 1j).cpu().tolist() == [1j, 1j]
        torch.randn(2, device=D)
    assert not book.events
    with pytest.raises(RuntimeError, match="on cpu device, expected neuron"):
        torch.ones(2, device=D) + torch.ones(2)


def test_complex_is_refused_by_the_beta(rules):
    rules("beta-2.10")
    for call in (
        lambda: torch.ones(2, dtype=torch.complex64, device=D),
        lambda: torch.ones(2, dtype=torch.complex64).to(D),
        lambda: torch.complex(torch.ones(2, device=D), torch.ones(2, device=D)),
        lambda: torch.fft.fft(torch.ones(4, device=D)),
        lambda: torch.view_as_complex(torch.ones(3, 2, device=D)),
        lambda: torch.ones(4, device=D).view(torch.complex64),
    ):
        with pytest.raises(NeuronRuleError, match="NCC_EVRF004: Complex data types are not supported") as refused:
            call()
        assert f"{__file__}:" in str(refused.value)
        assert "rule complex of profile beta-2.10" in str(refused.value)


def test_complex_is_decomposed_by_the_sdk_unless_told_otherwise(rules):
    rules("sdk-2.33")
    assert torch.fft.fft(torch.ones(4, device=D)).cpu().tolist() == [4, 0, 0, 0]
    rules("sdk-2.33", decomposes_complex=False)
    with pytest.raises(NeuronRuleError, match="NCC_EVRF004"):
        torch.ones(2, dtype=torch.complex64, device=D)


@pytest.mark.parametrize("profile", profiles.names())
def test_a_tensor_of_the_host_beside_the_devices(rules, profile):
    rules(profile)
    x = torch.ones(3, device=D)
    with pytest.raises(NeuronRuleError, match="Non-scalar tensor arg1 is on cpu device, expected neuron") as refused:
        x + torch.ones(3)
    assert f"aten::add.Tensor at {here(-1)}" in str(refused.value)
    with pytest.raises(NeuronRuleError, match="arg0 is on cpu"):
        torch.cat([x, torch.ones(3)])
    with pytest.raises(NeuronRuleError, match="arg1 is on cpu"):
        torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3, device=D), torch.ones(4, device=D))


def test_scalars_and_indices_of_the_host_pass(rules):
    rules(strictness="raise")
    x = torch.ones(3, device=D)
    assert (x + torch.tensor(1.0)).cpu().tolist() == [2, 2, 2]
    assert x[torch.tensor([0, 2])].cpu().tolist() == [1, 1]
    x[torch.tensor([1])] = 5
    x.copy_(torch.zeros(3))
    assert x.cpu().tolist() == [0, 0, 0]


def test_a_fallback_is_counted_and_told_once_a_line(rules):
    import torch_neuronx

    book = rules()
    torch_neuronx.clear_op_tracking()
    with pytest.warns(NeuronRuleWarning, match="aten::roll has no kernel on neuron and runs on the host") as told:
        [torch.arange(3, device=D).roll(1) for _ in range(3)]
    assert len(told) == 1
    assert told[0].filename == __file__
    assert torch_neuronx.get_fallback_ops() == ["aten::roll"]
    assert "aten::roll" not in torch_neuronx.get_executed_ops()
    assert sum(book.events.values()) == 3


def test_a_warning_turned_error_reaches_the_caller(rules):
    rules()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(NeuronRuleWarning, match="aten::roll"):
            torch.arange(3, device=D).roll(1)


def test_rules_apply_in_backward(rules):
    book = rules()
    x = torch.ones(1, 4, 2, 2, device=D, requires_grad=True)
    with pytest.warns(NeuronRuleWarning, match="native_group_norm"):
        torch.nn.functional.group_norm(x, 2).sum().backward()
    assert "aten::native_group_norm_backward" in {event.op for event in book.events}


def test_unknown_names_list_the_known():
    with pytest.raises(ConfigurationError, match=r"unknown profile 'sdk-9'.*known: beta-2.10, sdk-2.33"):
        profiles.profile("sdk-9")
    with pytest.raises(ConfigurationError, match=r"unknown instance type 'trn9'.*trn2.48xlarge"):
        instances.instance("trn9")


@pytest.mark.parametrize("name", profiles.names())
def test_every_rule_says_what_where_from_and_what_to_do(name):
    profile = profiles.profile(name)
    assert profile.name == name
    assert set(profile.rules) == {"float64", "complex", "mixed_devices", "fallback"}
    for rule in profile.rules.values():
        assert rule.message
        assert rule.source
        assert rule.advice
