"""A sharded save is the unsharded one, tensor for tensor; slices reload at any degree; a save is whole or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from diffusers import Flux2Transformer2DModel, TensorParallelConfig
from safetensors.torch import load_file
from support.encoders import CASES, call
from support.models import error, flux2, flux2_inputs
from support.pool import Pools
from torch.distributed.device_mesh import DeviceMesh

import vitrail
from vitrail.errors import CheckpointError


def config() -> TensorParallelConfig:
    return TensorParallelConfig(mesh=DeviceMesh("cpu", list(range(dist.get_world_size()))))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()}


def same(first: Path, second: Path) -> None:
    ours, theirs = tensors(first), tensors(second)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)
    listed = [sorted(path.name for path in folder.iterdir()) for folder in (first, second)]
    assert listed[0] == listed[1]
    for index in first.glob("*.index.json"):
        assert json.loads(index.read_text()) == json.loads((second / index.name).read_text())


def save_flux2(source: str, folder: str, size: str, sharded: bool) -> None:
    model = vitrail.from_pretrained(Flux2Transformer2DModel, source, parallel_config=config(), dtype=torch.float64)
    vitrail.save_pretrained(model, folder, sharded=sharded, max_shard_size=size)


@torch.no_grad()
def reload_flux2(folder: str) -> tuple[float, int]:
    model = vitrail.from_pretrained(Flux2Transformer2DModel, folder, parallel_config=config(), dtype=torch.float64)
    return error(model(**flux2_inputs())[0], flux2()(**flux2_inputs())[0]), sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("size", ["10GB", "200KB"])
def test_a_sharded_model_saves_as_the_whole_one(size: str, ranks: Pools, tmp_path: Path) -> None:
    flux2().save_pretrained(tmp_path / "whole", max_shard_size=size)
    ranks(3)(save_flux2, str(tmp_path / "whole"), str(tmp_path / "ours"), size, False)
    same(tmp_path / "ours", tmp_path / "whole")
    assert [path.name for path in tmp_path.iterdir() if "unfinished" in path.name] == []
    reloaded = Flux2Transformer2DModel.from_pretrained(tmp_path / "ours", torch_dtype=torch.float64)
    assert error(reloaded(**flux2_inputs())[0], flux2()(**flux2_inputs())[0]) < 1e-6


def test_slices_reload_at_the_same_and_other_degrees(ranks: Pools, tmp_path: Path) -> None:
    flux2().save_pretrained(tmp_path / "whole")
    ranks(3)(save_flux2, str(tmp_path / "whole"), str(tmp_path / "slices"), "10GB", True)
    files = sorted(path.name for path in (tmp_path / "slices").iterdir())
    assert files == [
        "config.json",
        *[f"vitrail_shard-0000{n}-of-00003.safetensors" for n in (1, 2, 3)],
        "vitrail_shards.json",
    ]
    held = sum(one.numel() for one in flux2().parameters())
    for degree in (2, 3):
        for worst, count in ranks(degree)(reload_flux2, str(tmp_path / "slices")):
            assert worst < 1e-9
            assert count < 0.75 * held


def save_encoder(source: str, name: str, folder: str) -> None:
    cls = getattr(transformers, name.split(",")[0])
    whole = cls.from_pretrained(source, dtype=torch.float64).eval()
    plan = vitrail.derive_plan(whole, [call(2, 7), call(3, 11)], keep=False)
    model = vitrail.from_pretrained(cls, source, parallel_config=config(), plan=plan, dtype=torch.float64)
    vitrail.save_pretrained(model, folder)


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM, tied", "CLIPTextModel", "T5EncoderModel"])
def test_an_encoder_saves_as_transformers_saves_it(name: str, ranks: Pools, tmp_path: Path) -> None:
    torch.manual_seed(0)
    CASES[name]().double().save_pretrained(tmp_path / "whole")
    ranks(2)(save_encoder, str(tmp_path / "whole"), name, str(tmp_path / "ours"))
    same(tmp_path / "ours", tmp_path / "whole")


def save_pipeline(folder: str, sharded: bool) -> None:
    pipeline = vitrail.load_pipeline(tp=2)
    vitrail.save_pretrained(pipeline, folder, sharded=sharded)


def picture(folder: str | None, tp: int) -> Any:
    pipeline = vitrail.load_pipeline(folder, tp=tp)
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(
        prompt="a red apple", height=64, width=64, num_inference_steps=1, guidance_scale=1.0, output_type="np",
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    return torch.from_numpy(made.images[0])


@pytest.mark.parametrize("sharded", [False, True])
def test_a_pipeline_saves_and_loads(sharded: bool, ranks: Pools, tmp_path: Path) -> None:
    folder = str(tmp_path / "pipeline")
    ranks(2)(save_pipeline, folder, sharded)
    wanted = picture(None, 1)
    degrees = (2, 3) if sharded else (2,)
    for degree in degrees:
        for made in ranks(degree)(picture, folder, degree):
            assert (made - wanted).abs().max() < 1e-4
    if not sharded:
        assert (picture(folder, 1) - wanted).abs().max() < 1e-4


def save_into_a_full_disk(folder: str) -> str:
    from vitrail.apply.writer import Writer

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    original, Writer.write = Writer.write, full  # type: ignore[method-assign,assignment]
    try:
        save_pipeline(folder, False)
    except CheckpointError as failure:
        return failure.message
    finally:
        Writer.write = original  # type: ignore[method-assign]
    return "nothing happened"


def test_a_full_disk_leaves_the_old_folder_and_tells_every_rank(ranks: Pools, tmp_path: Path) -> None:
    folder = tmp_path / "pipeline"
    folder.mkdir()
    (folder / "precious").write_text("old")
    for message in ranks(2)(save_into_a_full_disk, str(folder)):
        assert "could not be saved" in message
        assert "No space left on device" in message
    assert [path.name for path in folder.iterdir()] == ["precious"]
    assert [path.name for path in tmp_path.iterdir()] == ["pipeline"]
