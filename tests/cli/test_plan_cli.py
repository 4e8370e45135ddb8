"""``vitrail plan`` and ``vitrail verify``: what they print, what they write, and every way they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vitrail.cli import main

MINE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 90)
        self.down = nn.Linear(90, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.up(x)))


class Mine(nn.Module):
    def __init__(self, width=35, heads=5):
        super().__init__()
        self.first = nn.Linear(9, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def vitrail_inputs(model):
    return [{"x": torch.randn(2, 12, 9)}, {"x": torch.randn(1, 7, 9)}]
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return f"{file}:Mine"


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = 0
    try:
        main(arguments)
    except SystemExit as ended:
        code = int(ended.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_the_bundled_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["plan", "--tp", "4", "--json"], capsys)
    report = json.loads(out)
    assert code == 0
    (model,) = report["models"]
    assert (model["model"], model["source"], model["full"]) == ("Flux2Transformer2DModel", "catalog", True)
    assert model["ratio"] < 1.01
    assert model["degrees"] == list(range(1, 9))
    assert {other["name"] for other in report["others"]} == {"text_encoder", "vae"}


def test_a_published_class_needs_no_weights(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["plan", "FluxTransformer2DModel", "--tp", "8"], capsys)
    assert code == 0
    assert "11,891,178,560" in out
    assert "catalog, full" in out
    assert "degrees that work: 1 to 24" in out
    code, out, _ = run(["plan", "FluxTransformer2DModel", "--explain", "transformer_blocks.3.attn.to_q"], capsys)
    assert code == 0
    assert "It is colwise (heads*head_dim): its output features are shared out" in out
    assert "contracted, and the partial sums added up, in transformer_blocks.*.attn.to_out.0" in out
    code, out, _ = run(["plan", "FluxTransformer2DModel", "--explain", "x_embedder"], capsys)
    assert "whole on every rank: its 196,608 elements are not worth a collective" in out


def test_a_class_of_ones_own(mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    code, out, err = run(["plan", mine, "--tp", "3", "-o", str(plan), "--json"], capsys)
    assert (code, err) == (0, "")
    (model,) = json.loads(out)["models"]
    assert (model["source"], model["full"], model["degrees"]) == ("derived", True, [1, 2, 3, 4, 5])
    assert json.loads(plan.read_text())["attributes"] == {"blocks.*.heads": "heads"}
    code, out, _ = run(["plan", mine, "--tp", "3", "--plan", str(plan)], capsys)
    assert code == 0
    assert "plan.json, full" in out
    config = tmp_path / "config.json"
    config.write_text('{"width": 96, "heads": 12}')
    code, out, _ = run(["plan", mine, "--tp", "7", "--config", str(config), "--json"], capsys)
    assert json.loads(out)["models"][0]["degrees"] == list(range(1, 13))


def test_verify_a_class_of_ones_own(mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["verify", mine, "--tp", "3", "--mutate", "--json"], capsys)
    assert code == 0, err
    report = json.loads(out)
    assert report["ok"]
    assert report["results"][0]["error"] <= 1e-9
    assert report["mutations"][0]["dropped"] == report["mutations"][0]["planned"] == 5
    assert report["mutations"][0]["unnoticed"] == []
    plan = tmp_path / "plan.json"
    run(["plan", mine, "-o", str(plan)], capsys)
    document = json.loads(plan.read_text())
    document["modules"]["blocks.*.qkv"]["parts"] = ["3*heads*head_dim"[2:] + "*3"]  # interleaved, which it is not
    plan.write_text(json.dumps(document))
    code, out, _ = run(["verify", mine, "--plan", str(plan)], capsys)
    assert code == 1
    assert "WRONG: Mine: relative error" in out
    assert "the first to differ is 'blocks.0.out' in block 'blocks.0'" in out


@pytest.mark.parametrize(
    "arguments, code, error, hint",
    [
        (
            ["plan", "FluxTransformer3DModel"],
            2,
            "has no class FluxTransformer3DModel",
            "did you mean FluxTransformer2DModel",
        ),
        (["plan", "UNet2DConditionModel"], 3, "UNet2DConditionModel is a U-Net", "run it unsharded"),
        (["plan", "nowhere/at_all"], 1, "there is no folder nowhere/at_all", "give a folder, a class"),
        (["plan", "missing.py:Model"], 2, "there is no file missing.py", None),
        (["plan", "missing.py"], 2, "names a file and no class", "missing.py:MyTransformer"),
        (
            ["plan", "FluxTransformer2DModel", "--tp", "25"],
            3,
            "has 24 units, fewer than 25",
            "degrees that would do: 1 to 24",
        ),
        (["plan", "FluxTransformer2DModel", "--tp", "0"], 2, "--tp 0: the degree must be at least 1", None),
        (["plan", "FluxTransformer2DModel", "--config", "no.json"], 2, "--config no.json: there is no such file", None),
        (["plan", "FluxTransformer2DModel", "--dtype", "int8"], 2, "--dtype int8: known are", None),
        (
            ["plan", "FluxTransformer2DModel", "--explain", "x_embeder"],
            3,
            "has no module 'x_embeder'",
            "did you mean x_embedder",
        ),
        (["verify", "--tp", "1"], 2, "comparing takes at least 2 ranks", None),
        (["verify", "FluxTransformer2DModel", "--dtype", "bfloat16"], 2, "a class has none", "leave --dtype out"),
    ],
)
def test_refusals(
    arguments: list[str], code: int, error: str, hint: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    given, out, err = run(arguments, capsys)
    assert (given, out) == (code, ""), err
    assert "Traceback" not in err
    lines = err.splitlines()
    assert lines[0].startswith("error: ")
    assert error in lines[0]
    if hint:
        assert any(line.startswith("hint: ") and hint in line for line in lines[1:])


def test_a_plan_that_cannot_run_is_told_before_ranks_start(
    mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    assert run(["plan", mine, "-o", str(plan)], capsys)[0] == 0
    document = json.loads(plan.read_text(encoding="utf-8"))
    document["attributes"] = {}
    plan.write_text(json.dumps(document), encoding="utf-8")
    code, out, err = run(["verify", mine, "--plan", str(plan)], capsys)
    assert (code, out) == (3, "")
    assert "plan.json does not run on Mine, over 2 ranks: " in err
    assert "Traceback" not in err


def test_padded_ranks_hold_equal_parts(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["plan", mine, "--tp", "3", "--pad", "--json"], capsys)
    assert code == 0, err
    assert len(set(json.loads(out)["models"][0]["rank_parameters"])) == 1


@pytest.mark.parametrize(
    "change, error",
    [
        ({"model": "Other"}, "the plan for Other (plan.json) is not for Mine"),
        ({"vitrail_plan": 2}, "has format 2; this vitrail reads format 1"),
        ({"modules": {"blocks.*.qkz": {"style": "gathered"}}}, "names module 'blocks.*.qkz', which Mine does not have"),
        ({"tensors": {"first.weight": {"dim": 2, "parts": ["heads"]}}}, "cuts dim 2 of 'first.weight'"),
        ({"held": {"nothing": {"dim": 0}}}, "holds tensor 'nothing', which Mine does not have"),
        ({"tensors": {"first.weight": {"parts": ["heads"]}}}, "needs the dimension that is cut ('dim', from 0)"),
        ({"attributes": {"blocks.*.heads": "heads*"}}, "'heads*' is not a formula"),
    ],
)
def test_plan_files_that_do_not_fit(
    change: dict[str, object], error: str, mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {
        "vitrail_plan": 1,
        "model": "Mine",
        "axes": {"heads": {}},
        "dims": {"head_dim": None},
        "modules": {
            "blocks.*.qkv": {"style": "colwise", "parts": ["3*heads*head_dim"]},
            "blocks.*.out": {"style": "rowwise", "parts": ["heads*head_dim"]},
        },
        "attributes": {"blocks.*.heads": "heads"},
    }
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({**document, **change}))
    code, _, err = run(["plan", mine, "--plan", str(plan)], capsys)
    assert code == 3
    assert error in " ".join(err.split())


@pytest.mark.parametrize(
    "text, error, hint",
    [
        ("import nothing_there", "cannot be imported: ModuleNotFoundError", None),
        ("class A: pass", "has no class Mine", None),
        (
            "import torch\nclass Mine(torch.nn.Module):\n  def __init__(self, width): super().__init__()",
            "cannot be made",
            "--config",
        ),
        (MINE + "\ndef vitrail_inputs(model):\n  return 7\n", "vitrail_inputs(model) in", None),
        (MINE + "\ndef vitrail_inputs(model):\n  return {'x': torch.randn(2, 3, 4)}\n", "Mine cannot be traced", None),
    ],
)
def test_files_that_do_not_serve(
    text: str, error: str, hint: str | None, mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(mine.rpartition(":")[0]).write_text(text)
    code, _, err = run(["plan", mine], capsys)
    assert code in (2, 3)
    assert "Traceback" not in err
    assert error in " ".join(err.split())
    if hint:
        assert hint in err
