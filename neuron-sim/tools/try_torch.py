"""Builds neuron-sim against another release of torch, in an environment of its own, and runs its tests there.

    python tools/try_torch.py 2.14.1                      all tests
    python tools/try_torch.py 2.14.1 --pip "--index-url …" -- -k test_device

What is behind `--` goes to pytest. A release's default wheel for Linux brings gigabytes of CUDA with it; name the index
of a build for the CPU in --pip, or set PIP_INDEX_URL. The folder (--folder, default: a new one) is kept, and used again
when it is named again. Exit code: pytest's; 2 when torch or neuron-sim cannot be installed.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]


def main() -> int:
    """Install and test. Returns the exit code."""
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="a release of torch, such as 2.14.1")
    parser.add_argument("--pip", default="", help="more arguments for the pip that installs torch")
    parser.add_argument("--folder", type=Path, help="where to make the environment")
    chosen = parser.parse_args(given[:split])

    folder = chosen.folder or Path(tempfile.mkdtemp(prefix=f"neuron-sim-torch-{chosen.version}-"))
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    steps = [
        [*pip, f"torch=={chosen.version}", *shlex.split(chosen.pip)],
        [*pip, "setuptools>=77", "wheel", "numpy"],
        [*pip, "--no-build-isolation", f"{HERE}[test]"],
    ]
    for step in steps:
        print("+", shlex.join(step), file=sys.stderr, flush=True)
        # The core is compiled by one compiler at a time unless told otherwise: each takes 2 GB.
        if subprocess.run(step, env={"MAX_JOBS": "1", **os.environ}).returncode:
            print(f"try_torch: that failed; the environment is {folder}", file=sys.stderr)
            return 2
    tests = [str(python), "-m", "pytest", "-q", *given[split + 1 :]]
    code = subprocess.run(tests, cwd=HERE).returncode
    print(f"try_torch: torch {chosen.version} in {folder}: pytest returned {code}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
