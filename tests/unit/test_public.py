"""The public root is exactly what it says, and costs nothing until it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import vitrail


def test_the_public_names() -> None:
    assert set(vitrail.__all__) == {
        "ParallelConfig",
        "Plan",
        "TensorParallelConfig",
        "__version__",
        "apply_tensor_parallel",
        "compile_pipeline",
        "derive_plan",
        "enable_parallelism",
        "errors",
        "from_pretrained",
        "is_sharded",
        "load_pipeline",
        "model_folder",
        "save_pretrained",
        "sharding_of",
    }
    assert all(getattr(vitrail, name) is not None for name in vitrail.__all__)
    assert set(dir(vitrail)) == set(vitrail.__all__)
    with pytest.raises(AttributeError, match="module 'vitrail' has no attribute 'shard_everything'"):
        vitrail.shard_everything  # noqa: B018


def test_importing_vitrail_imports_no_torch() -> None:
    code = "import sys, vitrail; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_errors_are_value_errors_with_exit_codes() -> None:
    codes = {name: getattr(vitrail.errors, name).exit_code for name in vitrail.errors.__all__}
    assert codes == {
        "VitrailError": 1,
        "UsageError": 2,
        "UnsupportedError": 3,
        "PlanError": 3,
        "CheckpointError": 1,
        "ShardedModelError": 1,
        "DisagreementError": 1,
        "RankError": 1,
    }
    assert all(issubclass(getattr(vitrail.errors, name), ValueError) for name in vitrail.errors.__all__)
    assert str(vitrail.errors.PlanError("no", hint="try")) == "no\nhint: try"
