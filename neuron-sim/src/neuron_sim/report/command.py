"""`neuron-sim report -- python script.py …`: run a program, tell what it did, judge it. Exit code 3 when refused."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from neuron_sim import env
from neuron_sim.errors import ConfigurationError
from neuron_sim.instances import instance
from neuron_sim.profiles import profile
from neuron_sim.report import merged, recorder, text, verdict


def run(
    program: Sequence[str],
    instance_name: str | None = None,
    as_json: bool = False,
    output: str | None = None,
    no_fallbacks: bool = False,
) -> int:
    """Run the program and write the report, to stdout or to `output`. Returns the exit code.

    Raises `ConfigurationError` when there is nothing to run, the instance is unknown, or the output cannot be written;
    all of that before the program starts.
    """
    if not program:
        raise ConfigurationError("there is no program to run; give one after --, as in: -- python script.py")
    name = instance_name or env.NEURON_SIM_INSTANCE.read()
    instance(name)
    profile(env.NEURON_SIM_PROFILE.read())
    if problem := env.problem():
        raise ConfigurationError(problem)
    if output is not None:
        _check_output(Path(output))
    with tempfile.TemporaryDirectory(prefix="neuron-sim-report-") as folder:
        exit_code = _run_program(program, name, folder)
        report = merged.merge(merged.read(file) for file in sorted(Path(folder).glob("process-*.json")))
    judged = verdict.judge(report, name, exit_code, no_fallbacks)
    colour = output is None and not as_json and text.wants_colour(sys.stdout)
    shown = _as_json(report, judged, exit_code) if as_json else text.render(report, judged, colour)
    if output is None:
        print(shown, flush=True)
    else:
        try:
            recorder.save(Path(output), shown + "\n")
        except OSError as error:
            raise ConfigurationError(f"the report cannot be written to {output}: {error}") from error
        print(f"verdict for {name}: {judged.word} (report in {output})", file=sys.stderr)
    return judged.exit_code


def _check_output(file: Path) -> None:
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigurationError(f"the report cannot be written to {file}: name a file in a folder that can be written")


def _run_program(program: Sequence[str], instance_name: str, folder: str) -> int:
    variables = {env.NEURON_SIM_REPORT.name: folder + os.sep, env.NEURON_SIM_INSTANCE.name: instance_name}
    try:
        started = subprocess.Popen(program, env=os.environ | variables)
    except OSError as error:
        raise ConfigurationError(f"{program[0]!r} cannot be run: {error}") from error
    while True:
        try:
            code = started.wait()
        except KeyboardInterrupt:
            continue  # the program was interrupted as well; what it did is still to be told
        return code if code >= 0 else 128 - code


def _as_json(report: merged.Report | None, judged: verdict.Verdict, exit_code: int) -> str:
    found = dict(report or {"format": recorder.FORMAT})
    found["program_exit_code"] = exit_code
    found["verdict"] = dataclasses.asdict(judged)
    return json.dumps(found, indent=2)
