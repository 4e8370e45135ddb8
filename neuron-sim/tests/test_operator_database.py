"""A part of PyTorch's operator database on the device; `tools/operators.py` runs the whole."""

import importlib.util
import re
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("expecttest")

TOOL = Path(__file__).parents[1] / "tools/operators.py"
PART = (
    "add|addr|amax|any|cat|conj_physical|cumsum|diag|gather|index_put|linalg.lu_solve|masked_fill|matmul|mode|mul|"
    "native_layer_norm|nn.functional.(batch_norm|conv2d|cross_entropy|gelu|group_norm|interpolate_.*|layer_norm|"
    "scaled_dot_product_attention|softmax.*)|nonzero|prod|sgn|sort|sum|t|topk|unfold|where"
)


@pytest.mark.parametrize("strictness", ["warn", "off"])
def test_a_part_of_the_database(rules, strictness):
    spec = importlib.util.spec_from_file_location("operators", TOOL)
    operators = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(operators)
    rules(strictness=strictness)
    dtypes = [torch.float32, torch.bfloat16, torch.int64] + ([torch.complex64] if strictness == "off" else [])
    outcome = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in operators.op_db:
            if re.fullmatch(PART, info.full_name):
                outcome[info.full_name] = operators.examine(info, dtypes, samples=1)
    assert len(outcome) > 30
    assert {name: found for name, found in outcome.items() if found[0] != "equal"} == {}
