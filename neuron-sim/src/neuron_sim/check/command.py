"""`neuron-sim check MODEL`: says what will happen to a model on an instance. Exit code 3 when it is refused."""

import dataclasses
import json
import os
import sys
import time
from typing import Any

from neuron_sim import env
from neuron_sim.check.options import Options
from neuron_sim.errors import ConfigurationError


def run(options: Options, mode: str = "both", as_json: bool = False) -> int:
    """Check and print; returns the exit code. Raises `ConfigurationError`, in one line, for what cannot be checked."""
    started = time.monotonic()
    _register()
    from neuron_sim.check import vitrail_api

    vitrail_api.load()
    from neuron_sim.check import document, judge, parts, text, trace
    from neuron_sim.policy import Rulebook
    from neuron_sim.profiles import profile
    from neuron_sim.report.text import wants_colour

    settings = {variable.name: variable.read() for variable in env.RULE_SETTINGS}
    chosen = {name: value for name, value in settings.items() if value is not None}
    rulebook = Rulebook(profile(options.profile), env.NEURON_SIM_STRICT.read(), chosen)
    kind: trace.Mode = "eager" if mode == "eager" else "compiled" if mode == "compiled" else "both"
    traced = [trace.trace(part, rulebook, options, kind) for part in parts.of(options)]
    found: dict[str, Any] = document.of(options, traced, rulebook, kind, time.monotonic() - started)
    verdicts = judge.judge(found, kind, options.no_fallbacks)
    if as_json:
        found["verdict"] = dataclasses.asdict(verdicts["all"])
        found["verdicts"] = {name: dataclasses.asdict(v) for name, v in verdicts.items() if name != "all"}
        print(json.dumps(found, indent=2), flush=True)
    else:
        print(text.render(found, verdicts, wants_colour(sys.stdout)), flush=True)
    return verdicts["all"].exit_code


def _register() -> None:
    """The device, for models that ask what they are on; also beside CUDA, as nothing else runs in this process."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from neuron_sim import boot

    if boot.register() or boot.real_backend():
        return
    os.environ[env.NEURON_SIM.name] = "1"
    if not boot.register():
        status = boot.status()
        raise ConfigurationError(f"the neuron device is not there: {status.reason if status else 'not registered'}")
