"""A wheel, installed into an empty environment, makes the picture outside the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from support.command import difference, environment

ROOT = Path(__file__).parent.parent.parent


def run(*words: str, cwd: Path) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=400, env=environment(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_works_in_an_empty_environment(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "tests", "benchmarks", "tools")
    shutil.copytree(ROOT, source, ignore=ignore)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path / "dist"), str(source), cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    run(sys.executable, "-m", "venv", str(tmp_path / "empty"), cwd=tmp_path)
    python = str(tmp_path / "empty" / "bin" / "python")
    constraints = str(ROOT / "constraints.txt")
    run(python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "-c", constraints, str(wheel), cwd=tmp_path)
    run(python, "-m", "pip", "check", cwd=tmp_path)
    command = str(tmp_path / "empty" / "bin" / "vitrail")
    assert run(command, "generate", "--tp", "2", "--device", "cpu", "-o", "w.png", cwd=tmp_path) == "w.png\n"
    assert difference(tmp_path / "w.png", ROOT / "tests" / "golden" / "a-red-apple-0.png") <= 8
    shutil.rmtree(tmp_path / "empty")
