"""`neuron-sim doctor`: what is installed, which profile applies, what the device sees, and what is wrong."""

import json
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import neuron_sim
from neuron_sim import env


@dataclass(frozen=True)
class Finding:
    """One line of the answer. `is_wrong` marks what the exit code tells."""

    name: str
    value: Any
    is_wrong: bool = False


def examine() -> list[Finding]:
    """Look at everything. Imports torch; starts nothing."""
    import torch

    from neuron_sim import boot, profiles, runtime
    from neuron_sim.errors import ConfigurationError

    boot.register()
    status = boot.status()
    note = Path(__file__).with_name("_core_built_for.json")
    built_for = json.loads(note.read_text("utf-8"))["torch"] if note.exists() else None
    pth = Path(sysconfig.get_path("platlib"), "neuron_sim.pth")
    findings = [
        Finding("neuron-sim", neuron_sim.__version__),
        Finding("python", sys.version.split()[0]),
        Finding("torch", torch.__version__),
        Finding("core built for torch", built_for, is_wrong=built_for is None),
        Finding("torch_neuronx stand-in", str(pth) if pth.exists() else f"{pth} is missing", is_wrong=not pth.exists()),
        Finding("autoload with torch", torch._is_device_backend_autoload_enabled()),
        Finding("device", status.reason if status else "not tried", is_wrong=not (status and status.registered)),
    ]
    try:
        machine = runtime.read_machine()
        rules = profiles.profile(env.NEURON_SIM_PROFILE.read())
        findings += [
            Finding("profile", f"{rules.name}: {rules.describes}"),
            Finding("profiles known", profiles.names()),
            Finding("strictness", env.NEURON_SIM_STRICT.read()),
            _cache(),
            Finding("instance", machine.instance.name),
            Finding("chips", machine.instance.chips),
            Finding("physical cores in a logical one", machine.logical_nc_config),
            Finding("logical cores visible", list(machine.cores)),
            Finding("bytes per core", machine.bytes_per_core),
        ]
    except ConfigurationError as error:
        findings.append(Finding("configuration", str(error), is_wrong=True))
    import os

    values = {variable.name: os.environ[variable.name] for variable in env.ALL if variable.is_set()}
    findings.append(Finding("environment", values))
    return findings


def _cache() -> Finding:
    from neuron_sim import opcache

    disk = opcache.from_environment()
    if disk is None:
        return Finding("compiled programs", "not kept on disk")
    if disk.folder.exists() and not disk.folder.is_dir():
        return Finding("compiled programs", f"{disk.folder} is no folder", is_wrong=True)
    return Finding("compiled programs", f"{disk.folder}, {len(disk.files())} files")


def run(as_json: bool) -> int:
    """Print the findings. Returns 1 when something is wrong, else 0."""
    findings = examine()
    if as_json:
        print(json.dumps({finding.name.replace(" ", "_"): finding.value for finding in findings}, indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            mark = "✗" if finding.is_wrong else " "
            print(f"{mark} {finding.name:<{width}}  {_text(finding.value)}")
    return int(any(finding.is_wrong for finding in findings))


def _text(value: Any) -> str:
    if isinstance(value, list):
        items = [str(item) for item in value]
        return ", ".join(items) if len(items) <= 8 else f"{items[0]} to {items[-1]} ({len(items)})"
    if isinstance(value, dict):
        return " ".join(f"{key}={text}" for key, text in value.items()) or "nothing set"
    return str(value)
