"""Registers the device with PyTorch, or says why not. It never makes `import torch` fail.

Three ways lead here: PyTorch's autoload (`autoload`, an entry point of the group `torch.backends`), `import
torch_neuronx` when that is our stand-in, and `neuron_sim.register()`.
"""

import os
import sys
import warnings
from typing import TYPE_CHECKING, NamedTuple

from neuron_sim.errors import NeuronSimWarning

if TYPE_CHECKING:
    from types import ModuleType


class Status(NamedTuple):
    """Whether the device is registered, and why or why not. `is_expected` is false for what deserves a warning."""

    registered: bool
    reason: str
    is_expected: bool = True


_status: Status | None = None


def status() -> Status | None:
    """What the last attempt to register came to; None before the first."""
    return _status


def autoload() -> None:
    """Called by `import torch`. Registers the device or leaves everything as it was; one warning at most, no error."""
    _settle(explicit=False)


def register() -> bool:
    """Register the device if it is not yet, whatever TORCH_DEVICE_BACKEND_AUTOLOAD says; true if it is there."""
    import torch  # noqa: F401  first, because its autoload may come here and settle the matter

    return _settle(explicit=True).registered


def _settle(explicit: bool) -> Status:
    global _status
    if _status is not None and (_status.registered or not explicit):
        return _status
    is_news = _status is None
    try:
        _status = _attempt()
    except Exception as error:  # noqa: BLE001  whatever is wrong here, `import torch` must go on
        _status = Status(False, f"registering failed ({type(error).__name__}: {error})", is_expected=False)
    if is_news and not _status.registered and (explicit or not _status.is_expected):
        _tell(f"neuron-sim: the neuron device is not available: {_status.reason}")
    return _status


def _tell(message: str) -> None:
    from neuron_sim.location import user_location

    try:
        where = user_location()
        warnings.warn_explicit(message, NeuronSimWarning, where.file, where.line)
    except NeuronSimWarning:
        # Warnings are errors in this process; an error here would break `import torch` itself.
        print(f"warning: {message}", file=sys.stderr)


def _attempt() -> Status:
    from neuron_sim import env
    from neuron_sim.errors import ConfigurationError

    try:
        wish = env.NEURON_SIM.read()
    except ConfigurationError as error:
        return Status(False, str(error), is_expected=False)
    if wish == "0":
        return Status(False, "NEURON_SIM=0 turns it off")
    if real := real_backend():
        return Status(False, f"the real torch_neuronx is installed ({real})")
    import torch

    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        return Status(False, f"another backend, {taken!r}, has taken PyTorch's place for one", is_expected=False)
    if wish != "1" and (other := other_accelerator(torch)):
        return Status(
            False,
            f"this machine has {other}, which a second accelerator would displace; NEURON_SIM=1 registers it anyway",
        )
    if problem := core_problem(torch.__version__):
        return Status(False, problem, is_expected=False)
    from neuron_sim import registration

    registration.register_device()
    if problem := env.problem():
        _tell(f"neuron-sim: the neuron device cannot be used: {problem}")
    return Status(True, "registered")


def real_backend() -> str | None:
    """The real `torch_neuronx`, as a module or a distribution of any version but ours, if one is installed."""
    from importlib import metadata

    from neuron_sim import _finder
    from neuron_sim._metadata import StandInDistribution

    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        if find_spec is None or finder is _finder.StandInFinder:
            continue
        spec = find_spec(_finder.NAME, None, None)
        if spec is not None:
            return f"module at {spec.origin or spec.submodule_search_locations}"
    for distribution in metadata.Distribution.discover(name="torch-neuronx"):
        if not isinstance(distribution, StandInDistribution):
            return f"distribution {distribution.version}"
    return None


def other_accelerator(torch: "ModuleType") -> str | None:
    """CUDA, ROCm, XPU or MPS, if this torch was built for it and its driver is there.

    Drivers are looked for by their device nodes: asking the runtime could initialise it, which takes long and would
    leave the process unable to fork.
    """
    version = torch.version
    if getattr(version, "cuda", None) and any(map(os.path.exists, ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"))):
        return "CUDA"
    if getattr(version, "hip", None) and os.path.exists("/dev/kfd"):
        return "ROCm"
    if getattr(version, "xpu", None) and os.path.exists("/dev/dri"):
        return "XPU"
    if sys.platform == "darwin" and torch.backends.mps.is_available():
        return "MPS"
    return None


def core_problem(torch_version: str) -> str | None:
    """Why the C++ core cannot be loaded into this torch, or None. Looks before it loads: the wrong one may crash."""
    import json
    from pathlib import Path

    again = "install neuron-sim again: pip install --no-build-isolation --force-reinstall --no-deps ./neuron-sim"
    note = Path(__file__).with_name("_core_built_for.json")
    if not note.exists():
        return f"its C++ core was not built ({note} is missing); {again}"
    try:
        built = json.loads(note.read_text("utf-8"))
        core, size, built_for = note.with_name(built["file"]), built["bytes"], built["torch"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        return f"the note of what its C++ core was built for, {note}, cannot be read ({error}); {again}"
    if built_for.split("+")[0] != torch_version.split("+")[0]:
        return f"its C++ core was built for torch {built_for}, and this is torch {torch_version}; {again}"
    if not core.exists():
        return f"its C++ core is missing ({core}); {again}"
    if core.stat().st_size != size:
        return f"its C++ core is damaged ({core} has {core.stat().st_size} bytes, {size} were built); {again}"
    try:
        import neuron_sim._core  # noqa: F401
    except ImportError as error:
        return f"its C++ core does not load ({error}); {again}"
    return None
