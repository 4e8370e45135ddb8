"""The documents say what is so: generated parts are current, every snippet of the README runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import difference, environment

from vitrail import env
from vitrail.plan import Plan

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
HUB_ID = "black-forest-labs/FLUX.2-klein-4B"  # cannot be reached here: the bundled model stands in


def snippets(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def environment_page() -> str:
    lines = ["# Environment variables", "", "Generated from `vitrail/env.py`.", ""]
    lines += [f"- `{variable.name}` (default: {variable.default!r}): {variable.help}" for variable in env.VARIABLES]
    return "\n".join(lines) + "\n"


def test_the_environment_page_is_current() -> None:
    page = ROOT / "docs" / "reference" / "environment.md"
    if os.environ.get("VITRAIL_WRITE_DOCS"):
        page.write_text(environment_page(), encoding="utf-8")
    assert page.read_text(encoding="utf-8") == environment_page(), "run pytest with VITRAIL_WRITE_DOCS=1"


def test_the_plan_page_shows_a_plan() -> None:
    page = (ROOT / "docs" / "reference" / "plan.md").read_text(encoding="utf-8")
    found = re.search(r"```json\n(.*?)```", page, re.DOTALL)
    assert found is not None
    assert Plan.from_json(found[1]).model == "MyTransformer"


def test_the_readme_is_one_screen_of_prose() -> None:
    assert len(README.splitlines()) < 70


@pytest.mark.parametrize(
    "line", [line for block in snippets("bash") for line in block.splitlines() if "vitrail generate" in line]
)
def test_every_command_of_the_readme_runs(line: str, tmp_path: Path, bundled: Path) -> None:
    words = [str(bundled) if word == HUB_ID else word for word in shlex.split(line)]
    if words[0] == "vitrail":
        words = [sys.executable, "-m", *words]
    if words[0] == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=180, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    if "apple.png" in words:
        assert difference(tmp_path / "apple.png", ROOT / "tests" / "golden" / "a-red-apple-0.png") <= 8
    else:
        assert (tmp_path / "vitrail.png").exists()


def test_the_python_of_the_readme_runs(tmp_path: Path, bundled: Path) -> None:
    (snippet,) = snippets("python")
    assert HUB_ID in snippet
    # The bundled model has no business at the pipeline's own 1024 x 1024.
    small = snippet.replace("pipe(\n", "pipe(\n    height=64,\n    width=64,\n")
    assert small != snippet
    (tmp_path / "picture.py").write_text(small.replace(HUB_ID, str(bundled)), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "picture.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=180, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "lighthouse.png").exists()


def test_the_make_commands_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in re.findall(r"^make (\w+)", "\n".join(snippets("bash")), re.MULTILINE):
        assert f"\n{command}:" in makefile
