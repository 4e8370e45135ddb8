"""Text encoders whose ranks each read their slice: equal to the whole model, tied tables once, old names renamed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from diffusers import TensorParallelConfig
from safetensors.torch import load_file, save_file
from support.encoders import CASES, call
from support.pool import Pools
from torch.distributed.device_mesh import DeviceMesh

import vitrail
from vitrail.apply.prove import relative_error

LIMIT = 1e-9


def saved(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    CASES[name]().double().save_pretrained(folder, max_shard_size="60KB")
    return folder


@torch.no_grad()
def run(name: str, folder: str) -> tuple[float, float, bool]:
    cls = getattr(transformers, name.split(",")[0])
    config = TensorParallelConfig(mesh=DeviceMesh("cpu", list(range(dist.get_world_size()))))
    whole = cls.from_pretrained(folder, dtype=torch.float64).eval()
    plan = vitrail.derive_plan(whole, [call(2, 7), call(3, 11)], keep=False)
    model = vitrail.from_pretrained(cls, folder, parallel_config=config, plan=plan, dtype=torch.float64)
    worst = max(relative_error(model(**call(*sizes)), whole(**call(*sizes))) for sizes in ((2, 7), (1, 5)))
    share = sum(p.numel() for p in model.parameters()) / sum(p.numel() for p in whole.parameters())
    return worst, share, vitrail.is_sharded(model)


@pytest.mark.parametrize(
    "name", ["Qwen3ForCausalLM, tied", "T5EncoderModel", "CLIPTextModelWithProjection", "Gemma2Model"]
)
def test_a_sharded_encoder_equals_the_whole(name: str, ranks: Pools, tmp_path: Path) -> None:
    for worst, share, sharded in ranks(3)(run, name, str(saved(name, tmp_path))):
        assert sharded
        assert worst < LIMIT
        assert share < 0.4


def test_names_of_an_earlier_layout_are_renamed(ranks: Pools, tmp_path: Path) -> None:
    folder = saved("CLIPTextModel", tmp_path)
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors*"):
        if file.suffix == ".safetensors":
            tensors |= load_file(file)
        file.unlink()
    assert tensors
    earlier = {name if name.startswith("text_model.") else f"text_model.{name}": one for name, one in tensors.items()}
    save_file(earlier, folder / "model.safetensors", metadata={"format": "pt"})
    for worst, _, _ in ranks(2)(run, "CLIPTextModel", str(folder)):
        assert worst < LIMIT
