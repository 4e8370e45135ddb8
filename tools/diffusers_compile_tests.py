"""Runs diffusers' own tests of compilation from a checkout, with `torch.compile`'s backend set to neuron.

    python tools/diffusers_compile_tests.py CHECKOUT [--models flux flux2 …] [-v]

Its Klein test that compiles for Neuron, pointed at the bundled model, and its compile mixin's tests of graph breaks and
of repeated blocks for the models named (default: all). It uses the checkout's diffusers, not the installed one, which
needs `httpx`, and a `neuron` device: Trainium, or neuron-sim. Prints run, passed and skipped: a skip is no pass.
Exit code 1 when one failed, 2 when CHECKOUT is not such a checkout.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

KLEIN = "tests/pipelines/flux2/test_pipeline_flux2_klein.py"
MODELS = Path("tests/models/transformers")
MIXIN = "test_torch_compile_recompilation_and_graph_break or test_torch_compile_repeated_blocks"
NEURON = "NEURON_BACKEND_FOR_TESTS"


def run(checkout: Path, tests: list[str], select: str, verbose: bool) -> dict[str, int]:
    """Run pytest in the checkout with this file as a plugin; how many tests ended in which way."""
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(checkout / "src"), str(checkout)]),
        "DIFFUSERS_TEST_DEVICE": "neuron",
        "RUN_COMPILE": "yes",
        "HF_HUB_OFFLINE": "1",
        NEURON: "1",
    }
    command = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, "-q", "-rA", "--no-header", "-W", "ignore"]
    done = subprocess.run(
        [*command, *tests, "-k", select], cwd=checkout, env=environment, capture_output=True, text=True
    )
    counts = dict.fromkeys(("passed", "failed", "skipped", "error"), 0)
    for outcome, name in re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) (.*)$", done.stdout, re.MULTILINE):
        number = int(found[1]) if (found := re.match(r"\[(\d+)\]", name)) else 1
        counts[outcome.lower()] += number
        if verbose or outcome not in ("PASSED",):
            print(f"  {outcome.lower()}: {name}", flush=True)
    if not any(counts.values()):
        print(done.stdout[-3000:] + done.stderr[-3000:])
        counts["error"] = 1
    return counts


def pytest_configure() -> None:
    """As a plugin: `torch.compile` without a backend takes neuron."""
    if not os.environ.get(NEURON):
        return
    import torch

    original = torch.compile

    def compile(model: Any = None, **options: Any) -> Any:
        options.setdefault("backend", "neuron")
        return original(model, **options)

    torch.compile = compile  # type: ignore[assignment]
    of_modules = torch.nn.Module.compile

    def compile_module(self: Any, *arguments: Any, **options: Any) -> None:
        options.setdefault("backend", "neuron")
        of_modules(self, *arguments, **options)

    torch.nn.Module.compile = compile_module  # type: ignore[method-assign]


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """As a plugin: the published checkpoint is the bundled one."""
    from vitrail.bundled import model_folder

    for item in items:
        if getattr(getattr(item, "cls", None), "ckpt_id", None):
            item.cls.ckpt_id = str(model_folder())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of github.com/huggingface/diffusers")
    parser.add_argument("--models", nargs="+", help="such as flux2 (default: all)")
    parser.add_argument("-v", "--verbose", action="store_true", help="name every test")
    chosen = parser.parse_args()
    checkout = chosen.checkout.resolve()
    if not (checkout / KLEIN).is_file():
        print(f"{checkout} is no checkout of diffusers with {KLEIN}", file=sys.stderr)
        return 2
    files = sorted((checkout / MODELS).glob("test_models_transformer_*.py"))
    if chosen.models:
        files = [checkout / MODELS / f"test_models_transformer_{name}.py" for name in chosen.models]
    is_bad = False
    for title, tests, select in (
        ("the Klein pipeline, compiled for neuron", [KLEIN], "neuron_compile"),
        (f"the compile mixin, {len(files)} files", [str(file.relative_to(checkout)) for file in files], MIXIN),
    ):
        print(title, flush=True)
        counts = run(checkout, tests, select, chosen.verbose)
        total = sum(counts.values())
        print(f"  run {total - counts['skipped']}, passed {counts['passed']}, skipped {counts['skipped']}", flush=True)
        is_bad = is_bad or bool(counts["failed"] + counts["error"])
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
