"""``vitrail save``: folders that make the same picture, whole or in slices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command import difference, vitrail

PICTURE = (
    "-p",
    "a red apple",
    "--device",
    "cpu",
    "--steps",
    "4",
    "--guidance",
    "1.0",
    "--height",
    "64",
    "--width",
    "64",
)


@pytest.mark.parametrize("slices", [False, True])
def test_what_is_saved_makes_the_same_picture(slices: bool, tmp_path: Path) -> None:
    extra = ("--slices",) if slices else ()
    done = vitrail("save", "-o", "model", "--tp", "2", "--json", *extra, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["folder"] == "model"
    assert report["bytes"] > 2e7
    assert len({rank["bytes"] for rank in report["ranks"]}) == 1
    assert vitrail("generate", *PICTURE, "-o", "whole.png", cwd=tmp_path).returncode == 0
    degree = "3" if slices else "1"
    done = vitrail("generate", "model", *PICTURE, "--tp", degree, "-o", "saved.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert difference(tmp_path / "whole.png", tmp_path / "saved.png") <= 1


def test_mistakes_are_told(tmp_path: Path) -> None:
    done = vitrail("save", "-o", "model", "--slices", cwd=tmp_path)
    assert (done.returncode, "--slices needs ranks" in done.stderr) == (2, True)
    (tmp_path / "file").write_text("")
    done = vitrail("save", "-o", "file", cwd=tmp_path)
    assert "is a file" in done.stderr
    assert "Traceback" not in done.stderr
