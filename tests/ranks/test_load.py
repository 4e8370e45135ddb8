"""Ranks that read only their slice: right values, few bytes, memory of their own, and errors that name the tensor."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import Flux2Transformer2DModel, SD3Transformer2DModel, TensorParallelConfig
from safetensors.torch import load_file, save_file
from support.models import error, flux2, flux2_inputs, sd3, sd3_inputs
from support.pool import Pools
from torch.distributed.device_mesh import DeviceMesh

import vitrail
from vitrail.apply.checkpoint import Checkpoint
from vitrail.errors import VitrailError
from vitrail.plan import resolve
from vitrail.plan.catalog import lookup

LIMIT = 1e-9


def config() -> TensorParallelConfig:
    return TensorParallelConfig(mesh=DeviceMesh("cpu", list(range(dist.get_world_size()))))


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single")
    flux2().save_pretrained(folder / "transformer")
    return folder


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("indexed")
    sd3().save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


@torch.no_grad()
def run_single(folder: str, dtype: torch.dtype | None) -> tuple[float, list[str], bool, bool, bool]:
    model = vitrail.from_pretrained(
        Flux2Transformer2DModel, folder, subfolder="transformer", parallel_config=config(), dtype=dtype
    )
    inputs = flux2_inputs()
    reference_model = flux2()
    if dtype is None:
        reference_model = reference_model.float()
        tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        inputs |= {name: value.float() for name, value in tensors.items() if value.is_floating_point()}
    reference = reference_model(**inputs)[0]
    owned = all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    return (
        error(model(**inputs)[0].double(), reference.double()),
        sorted({str(p.dtype) for p in model.parameters()}),
        owned,
        model.training,
        model.config._name_or_path == folder,
    )


def test_a_single_file_in_float64(ranks: Pools, single: Path) -> None:
    for deviation, dtypes, owned, training, named in ranks(2)(run_single, str(single), torch.float64):
        assert deviation <= LIMIT
        assert dtypes == ["torch.float64"]
        assert owned, "every rank owns its shard's storage"
        assert not training
        assert named


def test_dtype_conversion_to_the_default(ranks: Pools, single: Path) -> None:
    for deviation, dtypes, *_ in ranks(2)(run_single, str(single), None):
        assert deviation <= 1e-5
        assert dtypes == ["torch.float32"]


@torch.no_grad()
def run_indexed(folder: str) -> tuple[float, int]:
    requested = []
    original = Checkpoint.__exit__

    def counted(self: Checkpoint, *arguments: Any) -> None:
        requested.append(self.reading.requested)
        original(self, *arguments)

    Checkpoint.__exit__ = counted  # type: ignore[method-assign]
    try:
        model = vitrail.from_pretrained(SD3Transformer2DModel, folder, parallel_config=config(), dtype=torch.float64)
    finally:
        Checkpoint.__exit__ = original  # type: ignore[method-assign]
    inputs = sd3_inputs()
    return error(model(**inputs)[0], sd3()(**inputs)[0]), requested[0]


@pytest.mark.parametrize("size", [2, 4])
def test_an_indexed_checkpoint_reads_each_ranks_bytes_alone(ranks: Pools, indexed: Path, size: int) -> None:
    results = ranks(size)(run_indexed, str(indexed))
    model = sd3()
    plan = lookup(model)
    assert plan is not None
    resolved = resolve(plan, model, size)
    for rank, (deviation, requested) in enumerate(results):
        assert deviation <= LIMIT
        buffers = sum(value.nbytes for name, value in model.state_dict().items() if name == "pos_embed.pos_embed")
        assert requested == resolved.parameter_numel(model, rank) * 8 + buffers


def run_variant_and_keep(folder: str) -> tuple[list[str], list[str]]:
    class Kept(Flux2Transformer2DModel):
        _keep_in_fp32_modules = ("norm_q",)
        config_name = "config.json"

    plan = lookup(flux2())
    model = vitrail.from_pretrained(
        Kept,
        folder,
        subfolder="transformer",
        parallel_config=config(),
        torch_dtype=torch.bfloat16,
        variant="fp64",
        plan=plan,
    )
    kept = {str(p.dtype) for name, p in model.named_parameters() if "norm_q" in name}
    return sorted(kept), sorted({str(p.dtype) for name, p in model.named_parameters() if "norm_q" not in name})


def test_variants_and_modules_kept_in_float32(ranks: Pools, tmp_path: Path) -> None:
    flux2().save_pretrained(tmp_path / "transformer", variant="fp64")
    for kept, others in ranks(2)(run_variant_and_keep, str(tmp_path)):
        assert kept == ["torch.float32"]
        assert others == ["torch.bfloat16"]


def run_bad(folder: str, arguments: dict[str, Any]) -> str:
    try:
        vitrail.from_pretrained(
            Flux2Transformer2DModel, folder, subfolder="transformer", parallel_config=config(), **arguments
        )
    except VitrailError as refused:
        return f"{type(refused).__name__}: {refused}"
    return "nothing was raised"


def truncate(folder: Path) -> None:
    file = folder / "diffusion_pytorch_model.safetensors"
    os.truncate(file, file.stat().st_size - 1000)


def cut_header(folder: Path) -> None:
    os.truncate(folder / "diffusion_pytorch_model.safetensors", 100)


def no_safetensors(folder: Path) -> None:
    (folder / "diffusion_pytorch_model.safetensors").write_bytes(b"\x04\0\0\0\0\0\0\0none")


def remove_tensor(folder: Path) -> None:
    file = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    del tensors["single_transformer_blocks.1.attn.to_out.weight"]
    save_file(tensors, file)


def other_shape(folder: Path) -> None:
    file = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["x_embedder.weight"] = torch.zeros(3, 3)
    save_file(tensors, file)


def remove_weights(folder: Path) -> None:
    (folder / "diffusion_pytorch_model.safetensors").unlink()


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def index_without_file(folder: Path) -> None:
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    index = {"weight_map": {"x_embedder.weight": "part-1.safetensors", "proj_out.weight": "part-1.safetensors"}}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))


def pickled_weights(folder: Path) -> None:
    (folder / "diffusion_pytorch_model.safetensors").rename(folder / "diffusion_pytorch_model.bin")


@pytest.mark.parametrize(
    "damage, arguments, messages",
    [
        (
            truncate,
            {},
            ["CheckpointError: ", "diffusion_pytorch_model.safetensors is truncated: tensor '", "ends at byte"],
        ),
        (cut_header, {}, ["is truncated or no safetensors file: a header of"]),
        (no_safetensors, {}, ["is not a safetensors file: its header is not JSON"]),
        (remove_tensor, {}, ["lacks 1 of ", "the first 'single_transformer_blocks.1.attn.to_out.weight'"]),
        (other_shape, {}, ["tensor 'x_embedder.weight' has shape (3, 3)", "makes it (128, 12)"]),
        (remove_weights, {}, ["has neither diffusion_pytorch_model.safetensors nor"]),
        (remove_config, {}, ["there is no model configuration at "]),
        (index_without_file, {}, ["part-1.safetensors is missing", "it holds tensor 'x_embedder.weight' and 1 more"]),
        (pickled_weights, {}, ["UnsupportedError: ", "only diffusion_pytorch_model.bin: a slice needs them"]),
        (
            None,
            {"variant": "fp16"},
            ["has neither diffusion_pytorch_model.fp16.safetensors", "is that another variant?"],
        ),
        (
            None,
            {"device_map": "auto"},
            ["UnsupportedError: device_map='auto' cannot be combined with sharding on load"],
        ),
        (
            None,
            {"dtyp": torch.float16},
            ["UsageError: from_pretrained got 'dtyp', which Flux2Transformer2DModel does not"],
        ),
        (None, {"dtype": torch.int8}, ["UsageError: dtype must be a floating-point torch.dtype, not torch.int8"]),
        (None, {"dtype": "bfloat16"}, ["UsageError: dtype must be a floating-point torch.dtype, not 'bfloat16'"]),
    ],
)
def test_files_that_are_wrong_are_named(
    ranks: Pools,
    single: Path,
    tmp_path: Path,
    damage: Callable[[Path], None] | None,
    arguments: dict[str, Any],
    messages: list[str],
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(single, folder)
    if damage:
        damage(folder / "transformer")
    for said in ranks(2)(run_bad, str(folder), arguments):
        for message in messages:
            assert message in said


def run_within_limit(folder: str) -> tuple[int, int]:
    import gc
    import resource

    def data() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))

    vitrail.from_pretrained  # noqa: B018 - everything is imported before the level is taken
    mesh = config()
    size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    gc.collect()
    before = data()
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (before + size // 2, limits[1]))
    try:
        model = vitrail.from_pretrained(Flux2Transformer2DModel, folder, parallel_config=mesh, dtype=torch.bfloat16)
        held = sum(parameter.nbytes for parameter in model.parameters())
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    return held, size


def test_a_rank_with_half_the_files_memory_loads_its_quarter(ranks: Pools, tmp_path: Path) -> None:
    wide = dict(num_attention_heads=8, attention_head_dim=128, axes_dims_rope=(32, 32, 32, 32), mlp_ratio=3.0)
    deep = dict(num_layers=2, num_single_layers=4, in_channels=64, joint_attention_dim=512, guidance_embeds=False)
    with torch.device("meta"):
        model = Flux2Transformer2DModel(**deep, **wide)
    model.save_config(tmp_path)
    tensors = {name: torch.zeros(value.shape, dtype=torch.bfloat16) for name, value in model.state_dict().items()}
    save_file(tensors, tmp_path / "diffusion_pytorch_model.safetensors")
    assert (tmp_path / "diffusion_pytorch_model.safetensors").stat().st_size > 150e6
    for held, size in ranks(4)(run_within_limit, str(tmp_path)):
        assert held < size * 0.27


def run_pipeline(folder: str | None) -> tuple[str, bool, int, float]:
    pipeline: Any = vitrail.load_pipeline(folder, tp=2, device="cpu", dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline(
        prompt="a red apple",
        height=64,
        width=64,
        num_inference_steps=4,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).images[0]
    with pytest.raises(vitrail.errors.ShardedModelError, match=r"Flux2KleinPipeline is sharded.*save_pretrained"):
        pipeline.save_pretrained("nowhere")
    return (
        type(pipeline).__name__,
        vitrail.is_sharded(pipeline.transformer),
        dist.get_world_size(),
        float(image.mean()),
    )


@pytest.mark.parametrize("size", [2, 4])
def test_load_pipeline_gives_an_ordinary_pipeline(ranks: Pools, size: int) -> None:
    results = ranks(size)(run_pipeline, None)
    assert {result[:3] for result in results} == {("Flux2KleinPipeline", True, size)}
    assert len({result[3] for result in results}) == 1, "all ranks, in both rows, have the same picture"
