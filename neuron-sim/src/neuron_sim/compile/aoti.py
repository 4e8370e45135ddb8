"""The optimising artifact (NEURON_SIM_CODEGEN=aoti): a library that AOTInductor compiles for this machine's processor.

It needs a C++ compiler once; the artifact needs none. It is code, and so it is loaded only from who is trusted
(`trust`). Tested on torch 2.13.
"""

import hashlib
import json
import platform
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from neuron_sim import _core
from neuron_sim.compile import torch_private
from neuron_sim.compile.graphdata import GraphData, UnsupportedGraphError
from neuron_sim.compile.program import Runner
from neuron_sim.compile.rebuilt import rebuild
from neuron_sim.neffcache import EntryError

FORMAT = "neuron-sim library 1"


@cache
def processor() -> str:
    """The processor that libraries are compiled for: architecture and instruction sets, as a hash."""
    facts = [platform.machine(), torch.backends.cpu.get_cpu_capability()]
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    for name in ("flags", "Features", "model name"):
        facts += sorted(next((line for line in lines if line.startswith(name)), "").partition(":")[2].split())
    return hashlib.sha256(" ".join(facts).encode()).hexdigest()[:16]


def target(groups: Sequence[str]) -> dict[str, Any]:
    """What else decides a library: processor, threads (they are compiled in), the process groups' names."""
    return {"processor": processor(), "threads": torch.get_num_threads(), "groups": list(groups)}


def compile_library(graph: GraphData) -> bytes:
    """The payload of a library for a graph: a line of JSON on inputs and results, and AOTInductor's package.

    Raises `UnsupportedGraphError` when AOTInductor cannot compile the graph, or there is no compiler.
    """
    data = graph.data
    for operation in data["operations"]:
        if operation["device"] and not operation["op"].startswith("_c10d_functional::"):
            raise UnsupportedGraphError(
                f"{operation['op']} draws random numbers, which come from the device's generator"
            )
    if any(output["slot"] < 0 for output in data["outputs"]):
        raise UnsupportedGraphError("a result is None")
    inputs = [
        torch.empty_strided(given["shape"], given["stride"], dtype=getattr(torch, given["dtype"]))
        for given in data["inputs"]
    ]
    rebuilt = rebuild(graph, [_host_group(name) for name in graph.groups])
    head = {
        "format": FORMAT,
        "inputs": data["inputs"],
        "on_device": [output["device"] for output in data["outputs"]],
        "groups": list(graph.groups),
    }
    with tempfile.TemporaryDirectory(prefix="neuron-sim-aoti-") as folder:
        try:
            package = torch_private.compile_ahead(rebuilt, inputs, str(Path(folder, "graph.pt2")))
        except Exception as error:  # Inductor's many kinds, a compiler's failure, an operator without a lowering
            first = str(error).strip().splitlines() or [""]
            raise UnsupportedGraphError(f"AOTInductor failed: {type(error).__name__}: {first[0]}") from error
        return json.dumps(head, sort_keys=True).encode() + b"\n" + Path(package).read_bytes()


def load_library(payload: bytes, core: int) -> tuple[Runner, list[dict[str, Any]]]:
    """A callable that runs a library, and the inputs it is for. The payload must be trusted: this runs its code.

    Raises `EntryError` when it cannot be loaded.
    """
    line, _, package = payload.partition(b"\n")
    try:
        head = json.loads(line)
        if head["format"] != FORMAT:
            raise EntryError(f"its library is of the format {head['format']!r}, not {FORMAT!r}")
        on_device, inputs, groups = head["on_device"], head["inputs"], head["groups"]
        for name in groups:
            _host_group(name)
        with tempfile.TemporaryDirectory(prefix="neuron-sim-aoti-") as folder:
            file = Path(folder, "graph.pt2")
            file.write_bytes(package)
            library = _core.Library(str(file), on_device, core)
    except EntryError:
        raise
    except (ValueError, KeyError, TypeError, RuntimeError, OSError) as error:
        raise EntryError(f"its library cannot be loaded: {error}") from error

    return library.run, inputs


def _host_group(name: str) -> str:
    """The name of a process group's twin for tensors of the host, which share its backend, rules and counts."""
    return torch_private.twin_for_host(name, f"neuron-sim:{name}")
