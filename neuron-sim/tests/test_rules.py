"""Each rule: what triggers it, what nearly does, in its words and at the user's line, at each strictness."""

import warnings

import pytest
import torch
from conftest import here

from neuron_sim import ConfigurationError, NeuronRuleError, NeuronRuleWarning, instances, profiles

D = "neuron"


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
    with pytest.warns(NeuronRuleWarning, match="aten::normal_ has no kernel on neuron"):
        torch.randn(2, device=D)  # the same numbers, only slower: told, not refused


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
    rules("sdk-2.33", settings={"TORCH_NEURONX_COMPLEX_DECOMPOSE": False})
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
    assert set(profile.rules) == {
        "float64", "float64_out", "int64", "cast64", "complex", "dynamic_shape", "memory_format", "mixed_devices",
        "generator", "fallback", "untested", "static_shapes", "unsupported_op", "sdpa", "instructions", "hbm",
    }  # fmt: skip
    for rule in profile.rules.values():
        assert rule.message
        assert rule.source
        assert rule.advice


def the_only(told) -> str:
    (warning,) = [w for w in told if issubclass(w.category, NeuronRuleWarning)]
    assert f"{warning.filename}:{warning.lineno}" in str(warning.message)
    return str(warning.message)


@pytest.mark.parametrize("profile", profiles.names())
def test_float64_out_is_a_type_error(rules, profile):
    rules(profile)
    x = torch.ones(3, device=D)
    with pytest.raises(TypeError, match=r"aten::add.out cannot write to a float64 tensor \(argument 3\)") as refused:
        torch.add(x, x, out=torch.empty(3, dtype=torch.float64))
    assert f"at {here(-1)}; rule float64_out of profile {profile}" in str(refused.value)
    assert isinstance(refused.value, NeuronRuleError)
    assert torch.add(x, x, out=torch.empty(3, device=D)).cpu().tolist() == [2, 2, 2]


def test_a_float64_tensor_of_before_the_rules_cannot_be_written_to(rules):
    rules(strictness="off")
    old = torch.zeros(3, dtype=torch.float64, device=D)
    rules()
    with pytest.raises(TypeError, match="float64"):
        old.add_(1)


@pytest.mark.parametrize("profile", profiles.names())
def test_int64_that_does_not_fit_into_32_bits(rules, profile):
    rules(profile)
    with pytest.warns(NeuronRuleWarning, match="int64 runs as int32 on neuron, and 2147483648 does not fit") as told:
        torch.tensor([1, 2**31]).to(D)
    line = here(-1)
    assert f"at {line}; rule int64 of profile {profile}" in the_only(told)
    with pytest.warns(NeuronRuleWarning, match="-2147483649 does not fit"):
        torch.zeros(7, dtype=torch.int64, device=D).fill_(-(2**31) - 1)
    rules(profile, "raise")
    for _ in range(2):
        with pytest.raises(NeuronRuleError, match="2147483648 does not fit"):
            torch.zeros(5, dtype=torch.int64, device=D).fill_(2**31)


def test_int64_that_fits(rules):
    book = rules(strictness="raise")
    assert torch.tensor([2**31 - 1, -(2**31)]).to(D).cpu().tolist() == [2**31 - 1, -(2**31)]
    torch.tensor([[1, 2**31], [3, 4]])[:, 0].to(D)  # what is moved fits, though what lies between does not
    torch.zeros(2, dtype=torch.int64, device=D).fill_(2**31 - 1)
    torch.zeros(2, device=D).fill_(2**40)  # a float
    torch.tensor([2**40]).to(D, torch.float32)
    assert not book.events


@pytest.mark.parametrize("profile", profiles.names())
def test_a_64_bit_cast_waits_for_the_host(rules, profile):
    from neuron_sim import counts, reset_counts

    rules(profile)
    reset_counts()
    x = torch.ones(3, device=D)
    with pytest.warns(NeuronRuleWarning, match="a cast from Float to Long goes through the host") as told:
        x.long()
    line = here(-1)
    assert f"at {line}; rule cast64 of profile {profile}" in the_only(told)
    assert counts().host_syncs["cast64"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x.int().to(torch.bfloat16)
        torch.ones(3, dtype=torch.int64).to(D, torch.float32)
    assert counts().host_syncs["cast64"] == 1


@pytest.mark.parametrize(
    "call, op",
    [
        (lambda x: x[x > 0], "aten::index.Tensor"),
        (lambda x: x.nonzero(), "aten::nonzero"),
        (lambda x: x.masked_select(x > 0), "aten::masked_select"),
        (lambda x: x.unique(), "aten::_unique2"),
        (lambda x: x.int().repeat_interleave(x.int()), "aten::repeat_interleave.Tensor"),
    ],
)
def test_data_dependent_shapes(rules, call, op):
    x = torch.ones(3, device=D)
    rules("sdk-2.33")
    with pytest.raises(NeuronRuleError, match=f"Dynamic shapes detected in the model.*{op} returns") as refused:
        call(x)
    assert f"{op} at {__file__}:" in str(refused.value)
    assert "rule dynamic_shape of profile sdk-2.33" in str(refused.value)
    rules("beta-2.10")
    with pytest.warns(NeuronRuleWarning, match="Dynamic shapes detected"):
        assert len(call(x)) in (1, 3)
    rules("beta-2.10", "raise")
    with pytest.raises(NeuronRuleError, match="Dynamic shapes"):
        call(x)


@pytest.mark.parametrize(
    "settings, is_refused",
    [
        ({"TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": False}, False),
        ({"TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": True}, True),
        ({"TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS": True}, True),
    ],
)
@pytest.mark.parametrize("profile", profiles.names())
def test_the_fallback_settings(rules, profile, settings, is_refused):
    off = {"TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": False}
    rules(profile, settings=off | settings)
    x = torch.ones(3, device=D)
    if is_refused:
        with pytest.raises(NeuronRuleError, match="Dynamic shapes"):
            x.nonzero()
    else:
        with pytest.warns(NeuronRuleWarning, match="Dynamic shapes"):
            x.nonzero()
    with pytest.warns(NeuronRuleWarning, match="aten::roll has no kernel"):
        x.roll(1)  # an operator that the device does not have runs on the host under every setting


def test_shapes_that_only_look_dynamic(rules):
    book = rules(strictness="raise")
    x, index = torch.arange(4.0, device=D), torch.tensor([2, 0], device=D)
    assert x[index].cpu().tolist() == [2, 0]
    assert torch.where(x > 1, x, 0.0).cpu().tolist() == [0, 0, 2, 3]
    x[x > 2] = 7  # writing through a mask has a static shape
    assert x.repeat_interleave(2).shape == (8,)
    repeats = torch.tensor([1, 2, 1, 0], dtype=torch.int32, device=D)
    assert x.repeat_interleave(repeats, output_size=4).shape == (4,)
    loss = torch.nn.functional.ctc_loss(
        torch.randn(5, 1, 4).log_softmax(-1).to(D), torch.tensor([[1, 2]], device=D), (5,), (2,)
    )
    assert loss.shape == ()
    assert not book.events


@pytest.mark.parametrize("profile", profiles.names())
@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.clone(memory_format=torch.channels_last),
        lambda _: torch.empty(1, 2, 3, 3, device=D, memory_format=torch.channels_last),
        lambda _: torch.nn.Conv2d(2, 2, 1).to(D).to(memory_format=torch.channels_last),
    ],
)
def test_memory_formats(rules, profile, call):
    rules(profile)
    with pytest.raises(NeuronRuleError, match=r"memory format ChannelsLast is not supported on neuron") as refused:
        call(torch.ones(1, 2, 3, 3, device=D))
    assert f"{__file__}:" in str(refused.value)
    assert f"rule memory_format of profile {profile}" in str(refused.value)


def test_memory_formats_that_pass(rules):
    book = rules(strictness="raise")
    x = torch.ones(1, 2, 3, 3)
    assert x.to(D).contiguous().clone(memory_format=torch.preserve_format).is_contiguous()
    assert x.to(memory_format=torch.channels_last).to(D).stride() == x.to(memory_format=torch.channels_last).stride()
    assert torch.nn.functional.conv2d(x.to(D), torch.ones(1, 2, 2, 2, device=D)).shape == (1, 1, 2, 2)
    assert not book.events


def test_a_generator_of_the_device(rules):
    rules("sdk-2.33")
    with pytest.warns(NeuronRuleWarning, match="is not available on neuron") as told:
        torch.Generator(device=D)
    line = here(-1)
    assert f"at {line}; rule generator of profile sdk-2.33" in the_only(told)
    rules("sdk-2.33", "raise")
    with pytest.raises(NeuronRuleError, match="is not available on neuron"):
        torch.Generator(device=D)
    book = rules("beta-2.10", "raise")
    torch.Generator(device=D)
    rules("sdk-2.33", "raise")
    torch.Generator()
    assert not book.events


@pytest.mark.parametrize("profile", profiles.names())
def test_what_the_backend_does_not_test(rules, profile):
    rules(profile)
    x = torch.ones(1, 2, 5, 5, device=D)
    with pytest.warns(NeuronRuleWarning, match="aten::convolution with transposed=True has no test") as told:
        torch.nn.functional.conv_transpose2d(x, torch.ones(2, 1, 2, 2, device=D))
    line = here(-1)
    assert f"at {line}; rule untested of profile {profile}" in the_only(told)
    with pytest.warns(NeuronRuleWarning, match="aten::convolution with three spatial dimensions"):
        torch.nn.functional.conv3d(x[None], torch.ones(1, 1, 1, 2, 2, device=D))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.nn.functional.conv2d(x, torch.ones(1, 2, 2, 2, device=D))


def test_a_line_inside_a_library_is_told_beside_the_users(rules, tmp_path, monkeypatch):
    library = tmp_path / "site-packages/somelib"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("def deep(x):\n    return x.roll(1)\n")
    monkeypatch.syspath_prepend(library.parent)
    import somelib

    book = rules()
    with pytest.warns(NeuronRuleWarning) as told:
        somelib.deep(torch.arange(3, device=D))
    line = here(-1)
    assert f"aten::roll at {line} (in somelib/__init__.py:2)" in the_only(told)
    (event,) = book.events
    assert event.where.via == "somelib/__init__.py:2"
