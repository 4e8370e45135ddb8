"""Runs diffusers' own Neuron tensor-parallel worker, unmodified, from a checkout of diffusers.

    python tools/diffusers_neuron_worker.py CHECKOUT [--ranks 2 4] [--models flux flux2 qwenimage]

The worker (tests/models/transformers/_neuron_tp_worker.py there) shards a tiny model over the device's cores and compares
its output with the unsharded one. It uses the checkout's diffusers, not the installed one. Needs a `neuron` device: a
Trainium machine, or neuron-sim. The exit code is 1 when a run failed, 2 when CHECKOUT is not such a checkout.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

WORKER = Path("tests/models/transformers/_neuron_tp_worker.py")
MODELS = ("flux", "flux2", "qwenimage")
TIMEOUT = 300


def run(checkout: Path, model: str, ranks: int) -> tuple[bool, str]:
    """One run of the worker: whether it passed, and what it said of the difference or of its failure."""
    spec = f"tests.models.transformers.test_models_transformer_{model}:make_neuron_tp_spec"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    try:
        done = subprocess.run(
            [*command, str(WORKER), spec],
            cwd=checkout,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return False, f"not done after {TIMEOUT} s"
    if done.returncode == 0 and "[rank0] PASS" in done.stdout:
        found = re.search(r"max_abs_diff=\S+", done.stdout)
        return True, found[0] if found else ""
    errors = re.findall(r"^(?:\[rank0\]: )?(\w*(?:Error|Exception)\b.*)$", done.stderr, re.MULTILINE)
    return False, errors[0] if errors else (done.stderr.strip().splitlines() or ["no output"])[-1]


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
