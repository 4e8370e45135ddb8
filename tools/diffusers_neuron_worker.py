"""Runs diffusers' own Neuron tensor-parallel worker, unmodified, from a checkout of diffusers.

    python tools/diffusers_neuron_worker.py CHECKOUT [--ranks 2 4] [--models flux flux2 qwenimage]

The worker (tests/models/transformers/_neuron_tp_worker.py there) shards a tiny model over the device's cores and
compares its output with the unsharded one. It uses the checkout's diffusers, not the installed one. It needs a `neuron`
device: a Trainium machine, or neuron-sim. The exit code is 1 when a run failed, 2 when CHECKOUT is not such a checkout.

The models are those of diffusers' own tests. Where one has too few attention heads for the degree, it gets as many as
there are ranks, and the line says so.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

WORKER = Path("tests/models/transformers/_neuron_tp_worker.py")
MODELS = ("flux", "flux2", "qwenimage")
TIMEOUT = 300


def run(checkout: Path, model: str, ranks: int) -> tuple[bool, str]:
    """One run of the worker: whether it passed, and what it said of the difference or of its failure."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    try:
        done = subprocess.run(
            [*command, str(WORKER), f"{Path(__file__).stem}:{model}"],
            cwd=checkout,
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": _path()},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return False, f"not done after {TIMEOUT} s"
    if done.returncode == 0 and "[rank0] PASS" in done.stdout:
        return True, ", ".join(re.findall(r"max_abs_diff=\S+|with \d+ heads for \d+", done.stdout))
    errors = re.findall(r"^(?:\[rank0\]: )?(\w*(?:Error|Exception)\b.*)$", done.stderr, re.MULTILINE)
    return False, errors[0] if errors else (done.stderr.strip().splitlines() or ["no output"])[-1]


def _path() -> str:
    """This folder before what PYTHONPATH has, so that the worker finds this module for its specs."""
    return os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))


def __getattr__(name: str) -> Callable[[], tuple[Any, dict[str, Any], dict[str, Any]]]:
    # The worker asks for "diffusers_neuron_worker:flux", a function that gives class, configuration and inputs.
    if name not in MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return lambda: spec(name)


def spec(model: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The model of diffusers' own test, with heads enough for the ranks of this run. Called in the worker."""
    module = import_module(f"tests.models.transformers.test_models_transformer_{model}")
    model_class, configuration, inputs = module.make_neuron_tp_spec()
    ranks, heads = int(os.environ["WORLD_SIZE"]), configuration["num_attention_heads"]
    if heads % ranks:
        configuration = {**configuration, "num_attention_heads": ranks}
        if os.environ["RANK"] == "0":
            print(f"with {ranks} heads for {heads}")
    return model_class, configuration, inputs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of github.com/huggingface/diffusers")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    chosen = parser.parse_args()
    if not (chosen.checkout / WORKER).is_file():
        print(f"error: {chosen.checkout} has no {WORKER}: give a checkout of diffusers", file=sys.stderr)
        return 2
    passed = failed = 0
    for model in chosen.models:
        for ranks in chosen.ranks:
            started = time.perf_counter()
            is_fine, said = run(chosen.checkout.resolve(), model, ranks)
            passed, failed = passed + is_fine, failed + (not is_fine)
            mark = "passed" if is_fine else "FAILED"
            print(f"{model:<10} {ranks} ranks  {mark}  {time.perf_counter() - started:5.1f} s  {said}", flush=True)
    print(f"{passed + failed} run, {passed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
