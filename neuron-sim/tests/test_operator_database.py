"""A part of PyTorch's operator database on the device; `tools/operators.py` runs the whole."""

import importlib
import json
import sys
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("expecttest")

TOOLS = Path(__file__).parents[1] / "tools"
PART = (
    "add|addr|amax|any|cat|conj_physical|cumsum|diag|double|gather|index_put|linalg.lu_solve|masked_fill|matmul|mode|mul|"
    "native_layer_norm|nn.functional.(batch_norm|conv2d|cross_entropy|gelu|group_norm|interpolate.*|layer_norm|"
    "scaled_dot_product_attention|softmax.*)|nonzero|norm|prod|sgn|sort|sum|t|topk|unfold|where"
)


@pytest.fixture
def comparison(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    return importlib.import_module("comparison")


@pytest.mark.parametrize("configuration", ["sdk-2.33:raise", "sdk-2.33:off"])
def test_a_part_of_the_database(rules, comparison, configuration):
    profile, _, strictness = configuration.partition(":")
    rules(profile, strictness)
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcomes = [comparison.examine(info, dtypes, samples=1) for info in comparison.operators(f"^({PART})$")]
    assert len(outcomes) > 35
    assert [outcome for outcome in outcomes if outcome.verdict == "failing"] == []
    listed = json.loads((TOOLS / "expected_rejections.json").read_text())[configuration]
    for outcome in outcomes:
        # With fewer samples, fewer rules may apply than the list has.
        assert set(outcome.rules) <= set(listed.get(outcome.name, {}).get("rules", [])), outcome
    on_host = {outcome.name for outcome in outcomes if outcome.on_host}
    if strictness == "raise":
        assert {"linalg.lu_solve", "nn.functional.group_norm", "nn.functional.interpolate.nearest", "norm"} <= on_host
        assert not on_host & {"add", "matmul", "nn.functional.layer_norm"}
    else:
        assert not on_host
    assert sum(outcome.norms_compared for outcome in outcomes) >= 5


def test_the_committed_result_is_of_the_committed_list():
    result = json.loads((TOOLS / "operators.json").read_text())
    expected = json.loads((TOOLS / "expected_rejections.json").read_text())
    assert result["configurations"].keys() == expected.keys()
    for configuration, found in result["configurations"].items():
        assert found["problems"] == []
        assert found["summary"]["failing"] == 0
        assert found["summary"]["equal"] >= 615
        assert all(entry["why"] for entry in expected[configuration].values())
        assert found["rejected"] == {name: entry["rules"] for name, entry in expected[configuration].items()}


def test_a_crash_is_an_outcome(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(TOOLS)
    operators = importlib.import_module("operators")
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, sys, json\n"
        "for name in sys.stdin.read().split():\n"
        "    print('>', name, flush=True)\n"
        "    if name == 'bad': os.abort()\n"
        "    print(json.dumps({'name': name, 'verdict': 'equal'}), flush=True)\n"
    )
    monkeypatch.setattr(operators, "__file__", str(script))
    found = operators.run("sdk-2.33:raise", ["one", "bad", "two"], samples=1)
    assert {name: outcome["verdict"] for name, outcome in found.items()} == {
        "one": "equal",
        "bad": "failing",
        "two": "equal",
    }
    assert sys.path[0] == str(TOOLS)
