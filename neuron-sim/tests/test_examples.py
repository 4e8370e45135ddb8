"""The programs of `examples/` run on the device as they stand, and paint one picture."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("diffusers")
Image = pytest.importorskip("PIL.Image")

ROOT = Path(__file__).parents[2]
EXAMPLES = {"neuron_eager": 1, "neuron_compiled": 1, "neuron_tensor_parallel": 2, "tensor_parallel": 8}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Every example's picture, by name."""
    if not (ROOT / "examples").is_dir():
        pytest.skip("no examples beside this package")
    folder = tmp_path_factory.mktemp("pictures")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NEURON_", "LOCAL_RANK"))}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "ignore"}
    painted = {}
    for name, ranks in EXAMPLES.items():
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
        output = folder / f"{name}.png"
        done = subprocess.run(
            [sys.executable, *launcher, str(ROOT / "examples" / f"{name}.py"), str(output)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stdout.count(f"Saved {output}") == 1
        painted[name] = np.asarray(Image.open(output)).astype(float)
    return painted


@pytest.mark.timeout(600)
def test_every_example_paints_the_same_picture(pictures):
    # bfloat16, and sums over 1, 2 and 8 ranks in another order each.
    first, *others = pictures.values()
    assert first.shape == (64, 64, 3)
    assert first.std() > 30
    for other in others:
        assert np.abs(other - first).mean() < 2
