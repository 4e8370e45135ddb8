"""NEURON_SIM_CODEGEN=aoti: libraries that a machine without a compiler loads, and that only their user's seal opens."""

import shutil

import pytest

from neuron_sim import env
from neuron_sim.compile import trust

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")

PROGRAM = """
import torch
from neuron_sim.compile import artifacts
torch.manual_seed(0)
torch.set_num_threads(1)
weight, x = torch.randn(4, 4), torch.randn(3, 4)
function = lambda x, w: (x[1:], torch.nn.functional.silu(x @ w) + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device))
expected = function(x, weight)
device_x = x.to("neuron")
with torch.no_grad():
    tail, found = torch.compile(function, backend="neuron", fullgraph=True)(device_x, weight.to("neuron"))
assert found.device.type == "neuron"
assert torch.allclose(found.cpu(), expected[1], atol=1e-5)
tail[0, 0] = 7
assert device_x[1, 0].item() == 7
print(artifacts.totals.compiled, artifacts.totals.disk_hits, artifacts.totals.aot_autograd)
"""


def test_a_library_is_loaded_without_a_compiler_and_only_with_the_seal(python, tmp_path):
    variables = {
        env.NEURON_SIM_CODEGEN.name: "aoti",
        env.NEFF_CACHE_DIR.name: str(tmp_path / "neff"),
        env.NEFF_LOCAL_CACHE_DIR.name: str(tmp_path / "locks"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "OMP_NUM_THREADS": "1",
    }
    mine, other = ({env.NEURON_SIM_SECRET_FILE.name: str(tmp_path / name)} for name in ("mine", "other"))
    nothing = {"PATH": str(tmp_path / "no-compiler"), "CXX": ""}
    assert python(PROGRAM, **variables, **mine).stdout == "1 0 1\n"
    shutil.rmtree(tmp_path / "inductor")
    assert python(PROGRAM, **variables, **mine, **nothing).stdout == "0 1 0\n"
    stranger = python(PROGRAM, **variables, **other, **nothing)
    assert "it is code, and without this user's seal" in stranger.stderr
    assert "a graph is compiled to data instead and runs slower: AOTInductor failed" in stranger.stderr
    assert stranger.stdout == "1 0 1\n"
    trusting = {env.NEURON_SIM_TRUST_CACHE.name: "1"}
    assert python(PROGRAM, **variables, **other, **nothing, **trusting).stdout == "0 1 0\n"


def test_a_secret_that_others_could_read_seals_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv(env.NEURON_SIM_SECRET_FILE.name, str(tmp_path / "secret"))
    sealed = trust.seal("key", b"code")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert trust.is_trusted("key", b"code", sealed)
    assert not trust.is_trusted("other", b"code", sealed)
    assert not trust.is_trusted("key", b"c0de", sealed)
    assert not trust.is_trusted("key", b"code", None)
    (tmp_path / "secret").chmod(0o644)
    assert not trust.is_trusted("key", b"code", sealed)
    assert trust.seal("key", b"code") is None
