"""``vitrail compile`` and ``generate --compile``: what was compiled ahead is found, and makes the same picture."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from support.command import difference, vitrail

SIMULATED = pytest.mark.skipif(importlib.util.find_spec("neuron_sim") is None, reason="neuron-sim is not installed")


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("caches")
    return {
        "TORCH_NEURONX_NEFF_CACHE_DIR": str(folder / "neff"),
        "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": str(folder / "locks"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "PYTHONWARNINGS": "ignore",
    }


def graphs(report: dict[str, Any], key: str) -> list[int]:
    return [rank["graphs"][key] for rank in report["ranks"]]


@SIMULATED
@pytest.mark.parametrize("degree", [1, 2])
def test_what_was_compiled_ahead_is_found(degree: int, caches: dict[str, str], tmp_path: Path) -> None:
    there = ("--device", "neuron", "--dtype", "float32", "--tp", str(degree))
    size = ("--size", "64x64")
    done = vitrail("compile", *there, *size, "--json", cwd=tmp_path, **caches)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {region["component"] for region in report["regions"]} == {"text_encoder", "transformer", "vae"}
    [made] = report["sizes"]
    compiled = sum(phase["compiled"] for rank in made["ranks"] for phase in rank["graphs"].values())
    found = sum(phase["found"] for rank in made["ranks"] for phase in rank["graphs"].values())
    assert compiled >= 1  # the decoder is the same at every degree
    assert compiled + found >= 5 * degree
    again = vitrail("compile", *there, *size, cwd=tmp_path, **caches)
    assert "0 graphs compiled" in again.stdout
    assert f"will find every graph of these sizes in {caches['TORCH_NEURONX_NEFF_CACHE_DIR']}" in again.stdout

    picture = ("-p", "a red apple", "--height", "64", "--width", "64", "--json")
    done = vitrail("generate", *picture, *there, "--compile", "-o", "compiled.png", cwd=tmp_path, **caches)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(graphs(report, "compiled")) == set(graphs(report, "traced")) == {0}
    assert min(graphs(report, "found")) >= 5
    plain = vitrail("generate", *picture, "--device", "cpu", "--dtype", "float32", "-o", "plain.png", cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    assert difference(tmp_path / "compiled.png", tmp_path / "plain.png") <= 1


@SIMULATED
def test_a_cache_that_is_off_is_told(tmp_path: Path) -> None:
    done = vitrail(
        "compile", "--device", "neuron", "--size", "64x64", cwd=tmp_path, TORCH_NEURONX_DISABLE_NEFF_CACHE="1",
        PYTHONWARNINGS="ignore",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "will find nothing: TORCH_NEURONX_DISABLE_NEFF_CACHE is set" in done.stdout


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("compile", "--size", "big"), "--size big: not a size"),
        (("compile", "--size", "65x64"), "--size 65: this model makes multiples of"),
        (("compile", "--tp", "0", "--size", "64x64"), "the degree must be at least 1"),
        (("compile", "nowhere/at/all", "--size", "64x64"), "there is no folder nowhere/at/all"),
        (("generate", "-p", "x", "--whole"), "--whole says how to compile"),
        (("generate", "-p", "x", "--tp", "2", "--shard", "vae"), "unknown parts to shard: vae"),
    ],
)
def test_mistakes_are_told_in_a_line(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    done = vitrail(*arguments, cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
