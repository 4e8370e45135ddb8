"""The bundled picture: recognisable, the same at every degree, and reproducible from what it says of itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.command import difference, environment, pixels, vitrail

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The picture made by one process, unsharded."""
    folder = tmp_path_factory.mktemp("whole")
    done = vitrail("generate", "-p", "a red apple", "-o", "apple.png", "--device", "cpu", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "apple.png\n"
    return folder / "apple.png"


def test_the_picture_is_the_golden_one(whole: Path) -> None:
    # Other processors round otherwise: a few steps of 255 are allowed against a picture from another machine.
    assert difference(whole, GOLDEN / "a-red-apple-0.png") <= 8
    colours = pixels(whole).reshape(-1, 3)
    red = (colours[:, 0] > 150) & (colours[:, 1] < 100) & (colours[:, 2] < 100)
    assert red.mean() > 0.25, "a red apple is red"


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_the_same_picture_at_any_degree(whole: Path, tmp_path: Path, degree: int) -> None:
    done = vitrail("generate", "-p", "a red apple", "--tp", str(degree), "--device", "cpu", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert difference(whole, tmp_path / report["images"][0]["path"]) <= 1
    assert [rank["rank"] for rank in report["ranks"]] == list(range(degree))
    alone = sum(p.stat().st_size for p in (MODEL / "transformer").glob("*.safetensors")) * 2  # bf16 on disk
    for rank in report["ranks"]:
        assert rank["bytes"]["transformer"] < alone / degree * 1.1
        # Four steps of the transformer, and once the encoder's 27 layers, its table and its head.
        assert rank["collectives"] == 4 * (2 * 4 + 4 + 1 + 4) + 27 * 2 + 2
        assert rank["bytes"]["text_encoder"] < 3_300_000 / degree * 1.1
        assert rank["collective_bytes"] > 0
    assert set(report["seconds"]) == {"load", "encode", "denoise", "decode", "save"}
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning:")]
    assert len(warnings) == int(degree > (os.cpu_count() or 1)), "one warning when ranks share cores"


def test_bfloat16_is_close(tmp_path: Path) -> None:
    for degree in ("1", "2"):
        arguments = ("--dtype", "bfloat16", "--tp", degree, "-o", f"{degree}.png", "--device", "cpu")
        done = vitrail("generate", "-p", "a red apple", *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    # bfloat16 keeps 8 bits: partial sums round apart, on edges by up to a tenth of the range, on average by little.
    off = np.abs(pixels(tmp_path / "1.png") - pixels(tmp_path / "2.png"))
    assert off.mean() <= 1.0
    assert off.max() <= 32


def test_under_torchrun_it_is_the_same_job(whole: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "vitrail", "generate"]
    done = subprocess.run(
        [*command, "-p", "-", "-o", "apple.png", "--device", "cpu"],
        cwd=tmp_path,
        input="a red apple\n",
        capture_output=True,
        text=True,
        timeout=180,
        env=environment(OMP_NUM_THREADS="1"),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "apple.png\n", "rank 0 alone prints"
    assert difference(whole, tmp_path / "apple.png") <= 1


def test_metadata_and_reproduction(whole: Path, tmp_path: Path) -> None:
    info = Image.open(whole).info
    assert info["prompt"] == "a red apple"
    assert (info["seed"], info["steps"], info["model"]) == ("0", "4", "bundled")
    assert set(json.loads(info["versions"])) == {"vitrail", "torch", "diffusers", "transformers"}
    arguments = (
        "-p",
        "a dog",
        "-p",
        "a cat",
        "-n",
        "2",
        "--seed",
        "5",
        "--steps",
        "2",
        "--height",
        "80",
        "-o",
        "pets/",
    )
    done = vitrail("generate", *arguments, "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"pets/{name}.png" for name in ("a-dog-5", "a-dog-6", "a-cat-5", "a-cat-6")]
    assert Image.open(tmp_path / "pets/a-dog-6.png").size == (64, 80)
    again = vitrail("generate", "--like", "pets/a-cat-6.png", "-o", "again.png", "--device", "cpu", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert difference(tmp_path / "pets/a-cat-6.png", tmp_path / "again.png") == 0
    assert difference(tmp_path / "pets/a-cat-6.png", tmp_path / "pets/a-dog-6.png") > 50


def test_the_progress_bar_is_rank_zeros_and_on_stderr(tmp_path: Path) -> None:
    done = vitrail("generate", "-p", "a robot", "--tp", "2", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("a robot:   0%") == 1, "one bar, not one a rank"
    assert "a robot: 100%" in done.stderr
    assert done.stdout == "vitrail.png\n"


MODEL = Path(__file__).parent.parent.parent / "src" / "vitrail" / "bundled" / "model"
