"""How the device is found: autoload, the stand-in for torch_neuronx, and what others ask before they use it."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import neuron_sim
from neuron_sim import boot

Run = Callable[..., "subprocess.CompletedProcess[str]"]

SEEN = "print(torch.neuron.is_available(), torch_neuronx.__version__)"
NO_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
PACKAGE = Path(neuron_sim.__file__).parent


@pytest.mark.parametrize("variables", [{}, NO_AUTOLOAD], ids=["autoload", "no autoload"])
@pytest.mark.parametrize("order", ["torch, torch_neuronx", "torch_neuronx, torch"])
def test_either_import_order(python: Run, order: str, variables: dict[str, str]) -> None:
    assert python(f"import {order}; {SEEN}", **variables).stdout == "True 0.0.0+sim\n"


def test_torch_alone_registers_the_device(python: Run) -> None:
    program = "import torch; print(torch.ones(2).to('neuron').device, torch.accelerator.current_accelerator())"
    assert python(program).stdout == "neuron:0 neuron\n"


def test_without_autoload_torch_alone_does_not(python: Run) -> None:
    assert python("import torch; print(hasattr(torch, 'neuron'))", **NO_AUTOLOAD).stdout == "False\n"


@pytest.mark.parametrize("variables", [{}, NO_AUTOLOAD], ids=["autoload", "no autoload"])
def test_what_others_import_is_there(python: Run, variables: dict[str, str]) -> None:
    program = """
import torch_neuronx, torch
from torch_neuronx.neuron_dynamo_backend import set_model_name
set_model_name("m")
torch_neuronx.clear_op_tracking()
x = torch.ones(2, device="neuron") + 1
print("aten::add.Tensor" in torch_neuronx.get_executed_ops(), torch_neuronx.get_fallback_ops())
x.normal_()
print(torch_neuronx.get_fallback_ops())
torch_neuronx.clear_op_tracking()
print(torch_neuronx.get_executed_ops())
"""
    assert python(program, "-W", "ignore", **variables).stdout.split("\n")[:3] == ["True []", "['aten::normal_']", "[]"]


def test_availability_checks_say_yes_with_diffusers_first(python: Run) -> None:
    pytest.importorskip("diffusers")
    pytest.importorskip("accelerate")
    program = """
from diffusers.utils import is_torch_neuronx_available
from transformers.utils.import_utils import is_torch_neuron_available
from accelerate.utils.imports import is_neuron_available
print(is_torch_neuronx_available(), is_torch_neuron_available(True), is_neuron_available(True))
"""
    assert python(program).stdout == "True True True\n"


def test_metadata_by_name_only(python: Run) -> None:
    program = """
from importlib import metadata
print(metadata.version("torch_neuronx"), metadata.version("torch-neuronx"))
print([d.name for d in metadata.distributions() if "neuronx" in d.name])
import sys
print("torch" in sys.modules)
"""
    assert python(program).stdout.split("\n")[:3] == ["0.0.0+sim 0.0.0+sim", "[]", "False"]


def test_switched_off(python: Run) -> None:
    program = "import torch, importlib.util as u; print(hasattr(torch, 'neuron'), u.find_spec('torch_neuronx'))"
    done = python(program, NEURON_SIM="0")
    assert done.stdout == "False None\n"
    assert done.stderr == ""


@pytest.mark.parametrize("kind", ["module", "distribution"])
def test_the_real_package_wins(python: Run, tmp_path: Path, kind: str) -> None:
    if kind == "module":
        (tmp_path / "torch_neuronx").mkdir()
        (tmp_path / "torch_neuronx/__init__.py").write_text("__version__ = 'real'\n")
    else:
        info = tmp_path / "torch_neuronx-2.10.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-neuronx\nVersion: 2.10.0\n")
    program = "import torch; print(torch._C._get_privateuse1_backend_name(), hasattr(torch, 'neuron'))"
    done = python(program, PYTHONPATH=str(tmp_path))
    assert done.stdout == "privateuseone False\n"
    assert done.stderr == ""
    if kind == "module":
        assert python("import torch_neuronx as t; print(t.__version__)", PYTHONPATH=str(tmp_path)).stdout == "real\n"


def test_a_finder_appended_later_wins_too(python: Run) -> None:
    program = """
import sys, importlib.util as u
from importlib.machinery import ModuleSpec
class Later:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return ModuleSpec(name, None, origin="real") if name == "torch_neuronx" else None
sys.meta_path.append(Later)
print(u.find_spec("torch_neuronx").origin)
import torch
print(hasattr(torch, "neuron"))
"""
    assert python(program).stdout == "real\nFalse\n"


def _other_torch(package: Path) -> None:
    note = package / "_core_built_for.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"torch": "2.12.0+cpu"}))


def _no_core(package: Path) -> None:
    for core in package.glob("_core*.so"):
        core.unlink()


def _truncated_core(package: Path) -> None:
    for core in package.glob("_core*.so"):
        core.write_bytes(core.read_bytes()[:1000])


def _not_a_library(package: Path) -> None:
    for core in package.glob("_core*.so"):
        core.write_bytes(b"x" * core.stat().st_size)


def _unreadable_note(package: Path) -> None:
    (package / "_core_built_for.json").write_text("{")


def _broken_module(package: Path) -> None:
    (package / "registration.py").write_text("def (")


@pytest.mark.parametrize(
    "harm, words",
    [
        (_other_torch, "was built for torch 2.12.0+cpu"),
        (_no_core, "core is missing"),
        (_truncated_core, "is damaged"),
        (_not_a_library, "does not load"),
        (_unreadable_note, "cannot be read"),
        (_broken_module, "SyntaxError"),
    ],
)
def test_import_torch_survives(python: Run, tmp_path: Path, harm: Callable[[Path], None], words: str) -> None:
    package = tmp_path / "neuron_sim"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "csrc"))
    harm(package)
    program = "import torch; print(torch.ones(2).sum().item(), hasattr(torch, 'neuron'))"
    done = python(program, PYTHONPATH=str(tmp_path))
    assert done.stdout == "2.0 False\n"
    assert done.stderr.count("NeuronSimWarning") == 1
    assert words in done.stderr
    as_errors = python(program, "-W", "error", PYTHONPATH=str(tmp_path))
    assert as_errors.stdout == "2.0 False\n"


def test_a_malformed_variable_warns_at_import_and_raises_at_use(python: Run) -> None:
    program = """
import torch
print(torch.neuron.is_available())
try:
    torch.ones(1, device="neuron")
except ValueError as error:
    print(error)
"""
    done = python(program, NEURON_SIM_MEMORY="lots")
    assert done.stdout.startswith("False\nNEURON_SIM_MEMORY='lots' cannot be read")
    assert "accepted: a positive number of bytes" in done.stdout
    assert done.stderr.count("NeuronSimWarning") == 1


def test_other_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {"/dev/nvidiactl"}
    monkeypatch.setattr(os.path, "exists", lambda path: path in nodes)
    monkeypatch.setattr("sys.platform", "linux")
    cuda = SimpleNamespace(version=SimpleNamespace(cuda="13.0", hip=None, xpu=None))
    cpu = SimpleNamespace(version=SimpleNamespace(cuda=None, hip=None, xpu=None))
    xpu = SimpleNamespace(version=SimpleNamespace(cuda=None, hip=None, xpu="2025"))
    assert boot.other_accelerator(cuda) == "CUDA"
    assert boot.other_accelerator(cpu) is None
    assert boot.other_accelerator(xpu) is None
    nodes.add("/dev/dri")
    assert boot.other_accelerator(xpu) == "XPU"


@pytest.mark.parametrize("wish, there", [("auto", "False"), ("1", "True")])
def test_beside_another_accelerator_only_on_request(python: Run, wish: str, there: str) -> None:
    program = """
from neuron_sim import boot
boot.other_accelerator = lambda torch: "CUDA"
import torch
print(hasattr(torch, "neuron"))
"""
    done = python(program, NEURON_SIM=wish)
    assert done.stdout == f"{there}\n"
    assert done.stderr == ""


def test_another_backend_in_the_place(python: Run) -> None:
    program = """
import torch
torch.utils.rename_privateuse1_backend("other")
import torch_neuronx
print(torch._C._get_privateuse1_backend_name())
"""
    done = python(program, **NO_AUTOLOAD)
    assert done.stdout == "other\n"
    assert "another backend, 'other'" in done.stderr


def test_start_of_the_interpreter_stays_light(python: Run) -> None:
    program = (
        "import sys; print(sorted(m for m in sys.modules if m.split('.')[0] in ('neuron_sim', 'typing', 'torch')))"
    )
    assert python(program).stdout == "['neuron_sim', 'neuron_sim._finder']\n"


def test_importing_torch_reads_only_what_it_needs(python: Run) -> None:
    program = "import torch, sys; print(sorted(m for m in sys.modules if m.startswith('neuron_sim.')))"
    loaded = python(program).stdout
    for lazy in ("runtime", "policy", "profiles", "instances", "location", "doctor", "cli", "counting", "distributed"):
        assert f"neuron_sim.{lazy}'" not in loaded
