"""What is refused, in words, and that nothing was changed by then."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, Flux2Transformer2DModel, ParallelConfig, TensorParallelConfig
from support.models import flux2, flux2_inputs, sd3, sd3_inputs
from support.pool import Pools, RanksFailed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import vitrail
from vitrail.errors import VitrailError


def config() -> TensorParallelConfig:
    return TensorParallelConfig(mesh=DeviceMesh("cpu", list(range(dist.get_world_size()))))


def said(function: Any, *arguments: Any, **keywords: Any) -> str:
    """The class and text of what ``function`` raises."""
    try:
        function(*arguments, **keywords)
    except VitrailError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def run_takes_slice_for_whole(folder: str) -> list[str]:
    model = flux2()
    vitrail.enable_parallelism(model, config=config())
    block: Any = model.transformer_blocks[0]
    return [
        said(model.state_dict),
        said(model.load_state_dict, {}),
        said(model.save_pretrained, folder),
        said(copy.deepcopy, model),
        said(pickle.dumps, model),
        said(torch.save, model, io.BytesIO()),
        said(block.state_dict),
        said(block.attn.to_q.state_dict),
        said(block.load_state_dict, {}),
        said(copy.deepcopy, block),
        said(pickle.dumps, block.ff),
        said(nn.ModuleList([block]).state_dict),
    ]


def test_a_sharded_model_never_passes_for_a_whole_one(ranks: Pools, tmp_path: Any) -> None:
    for messages in ranks(2)(run_takes_slice_for_whole, str(tmp_path / "saved")):
        for message in messages:
            assert message.startswith("ShardedModelError: ")
            assert "is sharded: this rank holds only its slice" in message
            assert "hint:" in message
    assert not (tmp_path / "saved").exists(), "nothing was half-written"


def run_keeps_its_names() -> tuple[Any, ...]:
    model = flux2()
    vitrail.enable_parallelism(model, config=config())
    return (
        type(model).__name__,
        type(model).__module__,
        isinstance(model, Flux2Transformer2DModel),
        all(isinstance(m, nn.Linear) for m in (model.x_embedder, model.transformer_blocks[0].attn.to_q)),
        vitrail.is_sharded(model),
        model._parallel_config.context_parallel_config is None,
        model._parallel_config.tensor_parallel_config._tp_degree,
        model.transformer_blocks[0].attn.processor._parallel_config is None,
    )


def test_a_sharded_model_keeps_its_names_and_carries_diffusers_configuration(ranks: Pools) -> None:
    home = "diffusers.models.transformers.transformer_flux2"
    expected = ("Flux2Transformer2DModel", home, True, True, True, True, 2, True)
    assert ranks(2)(run_keeps_its_names) == [expected] * 2


def run_before_anything_is_changed() -> list[str]:
    messages = []
    for plan, changes in (
        ({"transformer_blocks.*.attn.to_z": "colwise"}, {}),
        (None, {"num_attention_heads": 1, "axes_dims_rope": (4, 4, 4, 4)}),
    ):
        model = flux2(**changes)
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        messages.append(said(vitrail.apply_tensor_parallel, model, config(), plan))
        assert type(model) is Flux2Transformer2DModel
        assert model._parallel_config is None
        assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    return messages


def test_rejected_before_anything_is_changed(ranks: Pools) -> None:
    for module, degree in ranks(2)(run_before_anything_is_changed):
        assert module.startswith("PlanError: ")
        assert "the model has no 'transformer_blocks.0.attn.to_z'" in module
        assert "PlanError: Flux2Transformer2DModel cannot be sharded over 2 ranks" in degree
        assert "hint: degrees that would do: 1 to 1" in degree


class Unforeseeable(nn.Module):
    """What it does depends on values, which no tracing sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.first(x)
        return made if float(made.sum()) > 0 else -made


def run_configurations() -> list[str]:
    unnamed = init_device_mesh("cpu", (1, dist.get_world_size()))
    context = ContextParallelConfig(ulysses_degree=2)
    with torch.device("meta"):
        on_meta = Flux2Transformer2DModel(num_layers=1, num_single_layers=1)
    sharded = vitrail.enable_parallelism(flux2(), config=config())
    fused = flux2()
    fused.fuse_qkv_projections()
    hooked = flux2()
    hooked.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    quantised = flux2()
    quantised.is_quantized = True
    return [
        said(vitrail.enable_parallelism, flux2(), config=context),
        said(vitrail.enable_parallelism, flux2(), config=ParallelConfig(context_parallel_config=context)),
        said(vitrail.enable_parallelism, flux2(), config=ParallelConfig()),
        said(vitrail.enable_parallelism, flux2(), config={"tp": 2}),
        said(vitrail.enable_parallelism, flux2(), config=TensorParallelConfig(mesh=unnamed)),
        said(vitrail.enable_parallelism, flux2(), config=TensorParallelConfig(tp_degree=4)),
        said(vitrail.enable_parallelism, flux2(), config=config(), device="cuda"),
        said(vitrail.enable_parallelism, sharded, config=config()),
        said(vitrail.enable_parallelism, on_meta, config=config()),
        said(vitrail.enable_parallelism, quantised, config=config()),
        said(vitrail.enable_parallelism, Unforeseeable(), config=config()),
        said(vitrail.enable_parallelism, fused, config=config()),
        said(vitrail.enable_parallelism, hooked, config=config()),
        said(vitrail.enable_parallelism, "flux", config=config()),
        said(vitrail.apply_tensor_parallel, flux2(), config(), ["colwise"]),
        said(vitrail.enable_parallelism, flux2(rope_theta=2000 + dist.get_rank()), config=config()),
    ]


def test_configurations_that_cannot_be(ranks: Pools) -> None:
    expected = [
        "UnsupportedError: context parallelism is not supported; pass a TensorParallelConfig",
        "UnsupportedError: context parallelism is not supported; only tensor_parallel_config is",
        "UsageError: the ParallelConfig has no tensor_parallel_config",
        "UsageError: expected diffusers' TensorParallelConfig or ParallelConfig, not dict",
        "UsageError: the mesh has 2 dimensions, unnamed, and none is called 'tp'",
        "UsageError: tp_degree is 4, but the process group has 2 ranks",
        "UsageError: the mesh is on 'cpu', but device='cuda' was asked for",
        "UnsupportedError: this Flux2Transformer2DModel is sharded already",
        "UsageError: parameter time_guidance_embed.timestep_embedder.linear_1.weight is on the meta device",
        "UnsupportedError: this Flux2Transformer2DModel is quantised",
        "UnsupportedError: no inputs could be guessed for Unforeseeable.forward(x); the last try",
        "UnsupportedError: this Flux2Transformer2DModel has fused projections",
        "PlanError: the plan for Flux2Transformer2DModel (catalog) shards 'time_guidance_embed.timestep_embedder.",
        "UsageError: expected a model, not str",
        "UsageError: a plan is a vitrail.Plan or a dict in diffusers' form, not list",
        "DisagreementError: the ranks hold different models: the model's configuration on rank 1",
    ]
    for messages in ranks(2)(run_configurations):
        for message, beginning in zip(messages, expected, strict=True):
            assert message.startswith(beginning)


def run_different_weights() -> str:
    return said(vitrail.enable_parallelism, flux2(seed=dist.get_rank()), config=config())


def run_one_different_value() -> str:
    model = flux2()
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.transformer_blocks[0].attn.to_q.weight[100, 3] += 0.5  # in rows that rank 1 keeps, between samples
    return said(vitrail.enable_parallelism, model, config=config())


def test_one_different_value_is_told(ranks: Pools) -> None:
    for message in ranks(2)(run_one_different_value):
        assert "transformer_blocks.0.attn.to_q.weight on rank 1 is not that of rank 0" in message


def test_ranks_with_different_weights_are_told(ranks: Pools) -> None:
    for message in ranks(2)(run_different_weights):
        assert message.startswith("DisagreementError: the ranks hold different models: time_guidance_embed.")
        assert "on rank 1 is not that of rank 0" in message


@torch.no_grad()
def run_different_inputs(kind: str) -> list[str]:
    rank = dist.get_rank()
    if kind == "sd3":
        model, inputs = sd3(), sd3_inputs(size=16 if rank == 0 else 8)
    else:
        model, inputs = flux2(), flux2_inputs(text=900 if kind == "large" else 5)
        if rank == 1:
            changes: dict[str, Any] = {
                "value": {"timestep": inputs["timestep"] + 0.25},
                "dtype": {"timestep": inputs["timestep"].float()},
                "scalar": {"num_ref_tokens": 3},
                "absent": {"guidance": None},
                "large": {"encoder_hidden_states": inputs["encoder_hidden_states"].flip(0)},
            }
            inputs |= changes[kind]
    vitrail.enable_parallelism(model, config=config())
    return [said(model, **inputs)]


@pytest.mark.parametrize(
    "kind, argument",
    [
        ("value", r"timestep: float64[2] (values "),
        ("dtype", r"timestep: float64[2]"),
        ("scalar", r"num_ref_tokens: not given on rank 0; 3 on rank 1"),
        ("absent", r"guidance: float64[2]"),
        ("sd3", r"hidden_states: float64[2, 4, 16, 16]"),
        ("large", r"encoder_hidden_states: float64[2, 900, 20] (values from "),
    ],
)
def test_ranks_given_different_inputs_name_rank_and_argument(ranks: Pools, kind: str, argument: str) -> None:
    for (message,) in ranks(2)(run_different_inputs, kind):
        assert message.startswith("DisagreementError: step ")
        assert "the ranks were given different inputs" in message
        assert argument in message
        assert "on rank 0" in message
        assert "on rank 1" in message


@torch.no_grad()
def run_another_prompt_on_one_rank() -> list[str]:
    model = flux2()
    vitrail.enable_parallelism(model, config=config())
    messages = []
    for seed in (1, 2 + dist.get_rank()):  # the second picture's prompt is not the same on all ranks
        inputs = flux2_inputs(seed=seed)
        for step in range(3):
            inputs["timestep"] = torch.full((2,), 1.0 - step / 3, dtype=torch.float64)
            inputs["hidden_states"] = inputs["hidden_states"].clone()
            messages.append(said(model, **inputs))
            if "DisagreementError" in messages[-1]:
                return messages
    return messages


def test_a_later_picture_of_another_prompt_on_one_rank_is_told(ranks: Pools) -> None:
    for messages in ranks(2)(run_another_prompt_on_one_rank):
        assert messages[:3] == ["nothing was raised"] * 3
        assert "encoder_hidden_states: float64[2, 5, 20] (values from" in messages[3]


@torch.no_grad()
def run_positional_and_by_name() -> str:
    model, inputs = flux2(), flux2_inputs()
    vitrail.enable_parallelism(model, config=config())
    first = inputs.pop("hidden_states")
    return said(model, first, **inputs) if dist.get_rank() else said(model, hidden_states=first, **inputs)


def test_positional_and_named_arguments_are_the_same(ranks: Pools) -> None:
    assert ranks(2)(run_positional_and_by_name) == ["nothing was raised"] * 2


@torch.no_grad()
def run_changing_inputs() -> int:
    model = flux2()
    vitrail.enable_parallelism(model, config=config())
    for image in (6, 6, 9, 4):
        inputs = flux2_inputs(image=image)
        inputs["timestep"] = inputs["timestep"] / image
        model(**inputs)
    return 4


def test_equal_inputs_that_change_are_fine(ranks: Pools) -> None:
    assert ranks(2)(run_changing_inputs) == [4, 4]


def run_fails_on(rank: int, how: str) -> str:
    if dist.get_rank() == rank:
        if how == "raise":
            raise RuntimeError("the sky fell")
        import os

        os._exit(7)
    return "fine"


def test_the_pool_tells_every_ranks_failure() -> None:
    pools = Pools()
    try:
        with pytest.raises(RanksFailed, match=r"1 of 2 ranks failed\n--- rank 1 of 2(.|\n)*the sky fell"):
            pools(2)(run_fails_on, 1, "raise")
        with pytest.raises(RanksFailed, match=r"rank 0 of 2\ndied with exit code 7"):
            pools(2)(run_fails_on, 0, "exit")
        assert pools(2)(run_fails_on, 5, "raise") == ["fine", "fine"]
    finally:
        pools.close()
