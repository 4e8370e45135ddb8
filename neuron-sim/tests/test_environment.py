"""Environment variables, instance types, and what a process sees of a machine."""

import pytest

from neuron_sim import ConfigurationError, env, instances
from neuron_sim.runtime import read_machine


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for variable in env.ALL:
        monkeypatch.delenv(variable.name, raising=False)


@pytest.mark.parametrize(
    "text, value",
    [
        ("24GiB", 24 << 30),
        ("512 MiB", 512 << 20),
        ("1e9", 10**9),
        ("4096", 4096),
        ("1.5gb", 1_500_000_000),
        ("2t", 2 * 10**12),
    ],
)
def test_bytes(text, value):
    assert env.parse_bytes(text) == value


@pytest.mark.parametrize("text", ["lots", "24 GiBs", "-1", "0", "", "1..2GB", "nan", "inf", "1e999"])
def test_no_bytes(text):
    with pytest.raises(ValueError, match=r"bytes|positive|float|convert|infinity"):
        env.parse_bytes(text)


@pytest.mark.parametrize("text, cores", [("0", (0,)), ("0-2", (0, 1, 2)), ("3, 5-6", (3, 5, 6))])
def test_cores(text, cores):
    assert env.parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", "a", "2-0", "1,1", "0-2,2", "-1", "1-", "0;1"])
def test_no_cores(text):
    with pytest.raises(ValueError, match=r"core|range|twice"):
        env.parse_cores(text)


@pytest.mark.parametrize(
    "name, text",
    [
        ("NEURON_SIM", "yes please"),
        ("NEURON_SIM_MEMORY", "much"),
        ("NEURON_SIM_MEMORY", "1e999"),
        ("NEURON_SIM_STRICT", "very"),
        ("NEURON_RT_VISIBLE_CORES", "0..3"),
        ("NEURON_RT_NUM_CORES", "0"),
        ("NEURON_LOGICAL_NC_CONFIG", "3"),
        ("NEURON_LAUNCH_BLOCKING", "maybe"),
        ("TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT", "soon"),
        ("TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT", "-1"),
        ("TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT", "inf"),
        ("TORCH_NEURONX_DISABLE_NEFF_CACHE", "2"),
        ("TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION", "perhaps"),
        ("TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS", "perhaps"),
    ],
)
def test_a_malformed_value_says_variable_value_and_what_is_accepted(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    variable = next(v for v in env.ALL if v.name == name)
    with pytest.raises(ConfigurationError) as refused:
        variable.read()
    assert str(refused.value).startswith(f"{name}={text!r} cannot be read")
    assert str(refused.value).endswith(f"accepted: {variable.accepts}")
    assert text in env.problem()


def test_nothing_set_is_no_problem():
    assert env.problem() is None
    assert len(read_machine().cores) == 64
    assert read_machine().bytes_per_core == 24 << 30


@pytest.mark.parametrize(
    "variables, cores, gib",
    [
        ({"NEURON_SIM_INSTANCE": "trn1.2xlarge"}, 2, 16),
        ({"NEURON_SIM_INSTANCE": "trn1.32xlarge"}, 32, 16),
        ({"NEURON_SIM_INSTANCE": "trn2.3xlarge"}, 4, 24),
        ({"NEURON_SIM_INSTANCE": "trn2.3xlarge", "NEURON_LOGICAL_NC_CONFIG": "1"}, 8, 12),
        ({"NEURON_SIM_INSTANCE": "inf2.48xlarge"}, 24, 16),
        ({"NEURON_SIM_INSTANCE": "trn3:4"}, 16, 36),
        ({"NEURON_RT_VISIBLE_CORES": "4-7"}, 4, 24),
        ({"NEURON_RT_NUM_CORES": "3", "NEURON_SIM_MEMORY": "1GiB"}, 3, 1),
    ],
)
def test_machines(monkeypatch, variables, cores, gib):
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    machine = read_machine()
    assert (len(machine.cores), machine.bytes_per_core) == (cores, gib << 30)


@pytest.mark.parametrize(
    "variables, words",
    [
        ({"NEURON_RT_VISIBLE_CORES": "64"}, "NEURON_RT_VISIBLE_CORES asks for core 64, but trn2.48xlarge has 64"),
        ({"NEURON_RT_NUM_CORES": "65"}, "NEURON_RT_NUM_CORES asks for core 64"),
        ({"NEURON_LOGICAL_NC_CONFIG": "1"}, "which can use 127 at most"),
        ({"NEURON_SIM_INSTANCE": "p5"}, "unknown instance type 'p5'"),
    ],
)
def test_machines_that_are_not(monkeypatch, variables, words):
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigurationError, match=words):
        read_machine()


@pytest.mark.parametrize("name", instances.names())
def test_every_instance_is_whole(name):
    instance = instances.instance(name)
    assert instance.name == name
    assert name.startswith(instance.family)
    assert instance.logical_cores(instance.logical_nc_config) >= 1
    assert instance.host_bytes
