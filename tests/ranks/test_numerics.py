"""A sharded model gives the whole model's values: float64, against the unsharded model, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import Flux2Transformer2DModel, ParallelConfig, TensorParallelConfig
from support.models import error, flux2, flux2_inputs, sd3, sd3_inputs
from support.pool import Pools
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import vitrail
from vitrail.apply.flight import FLIGHT
from vitrail.plan import Axis, Plan, Rule

LIMIT = 1e-9


def config() -> TensorParallelConfig:
    return TensorParallelConfig(mesh=DeviceMesh("cpu", list(range(dist.get_world_size()))))


@torch.no_grad()
def run_flux2(batch: int, image: int, text: int) -> tuple[float, int, int]:
    model = flux2()
    inputs = flux2_inputs(batch, image, text)
    reference = model(**inputs)[0]
    vitrail.enable_parallelism(model, config=config())
    before = FLIGHT.collectives
    value = model(**inputs)[0]
    return error(value, reference), sum(p.numel() for p in model.parameters()), FLIGHT.collectives - before


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape", [(2, 6, 5), (1, 9, 3)])
def test_flux2(ranks: Pools, size: int, shape: tuple[int, int, int]) -> None:
    results = ranks(size)(run_flux2, *shape)
    whole = sum(p.numel() for p in flux2().parameters())
    for deviation, held, collectives in results:
        assert deviation <= LIMIT
        assert held < whole / size * 1.1
        # 2 blocks of 4 reduces, 2 of 1, 2 embedders, 7 gathered projections of which 4 together
        assert collectives == 2 * 4 + 2 * 1 + 2 + 4


@torch.no_grad()
def run_sd3(dual: tuple[int, ...]) -> float:
    model = sd3(dual_attention_layers=dual)
    inputs = sd3_inputs()
    reference = model(**inputs)[0]
    vitrail.enable_parallelism(model, config=config())
    return error(model(**inputs)[0], reference)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dual", [(), (0, 1)])
def test_sd3(ranks: Pools, size: int, dual: tuple[int, ...]) -> None:
    assert max(ranks(size)(run_sd3, dual)) <= LIMIT


@torch.no_grad()
def run_diffusers_form(kind: str) -> float:
    if kind == "flux2":
        model, inputs = flux2(), flux2_inputs()
        flat: dict[str, Any] = dict(Flux2Transformer2DModel._tp_plan)
    else:
        model, inputs = sd3(), sd3_inputs()
        colwise = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
        flat = {f"transformer_blocks.*.{name}": "colwise" for name in (*colwise, "ff.net.0.proj")}
        flat |= {f"transformer_blocks.*.{name}": "rowwise" for name in ("attn.to_out.0", "ff.net.2")}
        flat |= {f"transformer_blocks.{block}.attn.to_add_out": "rowwise" for block in (0, 1)}
    reference = model(**inputs)[0]
    vitrail.apply_tensor_parallel(model, ParallelConfig(tensor_parallel_config=config()), flat)
    return error(model(**inputs)[0], reference)


@pytest.mark.parametrize("kind", ["flux2", "sd3"])
def test_plans_in_diffusers_form(ranks: Pools, kind: str) -> None:
    assert max(ranks(2)(run_diffusers_form, kind)) <= LIMIT


class Odd(nn.Module):
    """Gathered columns that do not divide, and biases everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.up = nn.Linear(7, 8)
        self.down = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(torch.tanh(self.first(x)))))
        return result


@torch.no_grad()
def run_odd() -> tuple[float, list[int]]:
    torch.manual_seed(3)
    model = Odd().double()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    reference = model(x)
    calls: list[torch.Tensor] = []
    model.down.register_forward_hook(lambda module, arguments, output: calls.append(output))
    plan = Plan(
        "Odd",
        {"hidden": Axis()},
        (Rule("first", "gathered"), Rule("up", "colwise", ("hidden",)), Rule("down", "rowwise", ("hidden",))),
    )
    vitrail.apply_tensor_parallel(model, config(), plan)
    value = model(x)
    assert error(calls[0], reference) <= LIMIT, "a user's hook on a rowwise module sees the whole output"
    return error(value, reference), [p.numel() for p in model.parameters()]


@pytest.mark.parametrize("size", [2, 4])
def test_columns_that_do_not_divide_are_gathered_all_the_same(ranks: Pools, size: int) -> None:
    results = ranks(size)(run_odd)
    assert max(deviation for deviation, _ in results) <= LIMIT
    held = [sizes[0] for _, sizes in results]
    assert sum(held) == 7 * 6
    assert max(held) == -(-7 // size) * 6


@torch.no_grad()
def run_two_dimensional_mesh() -> tuple[float, int, tuple[int, ...], str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    model, inputs = flux2(), flux2_inputs(seed=dist.get_rank() // 2)  # the rows get different work
    reference = model(**inputs)[0]
    vitrail.enable_parallelism(model, config=TensorParallelConfig(mesh=mesh))
    sharding = vitrail.sharding_of(model)
    assert sharding is not None
    deviation = error(model(**inputs)[0], reference)
    return deviation, sharding.axis.index, sharding.axis.ranks, sharding.axis.name


def test_the_index_comes_from_the_mesh_axis_not_from_the_global_rank(ranks: Pools) -> None:
    results = ranks(4)(run_two_dimensional_mesh)
    assert max(result[0] for result in results) <= LIMIT
    assert [result[1:] for result in results] == [
        (0, (0, 1), "tp"),
        (1, (0, 1), "tp"),
        (0, (2, 3), "tp"),
        (1, (2, 3), "tp"),
    ]


@torch.no_grad()
def run_transposed_mesh() -> float:
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("tp", "data"))
    model, inputs = sd3(), sd3_inputs()
    reference = model(**inputs)[0]
    vitrail.enable_parallelism(model, config=TensorParallelConfig(mesh=mesh["tp"]))
    return error(model(**inputs)[0], reference)


def test_an_axis_whose_ranks_are_not_neighbours(ranks: Pools) -> None:
    assert max(ranks(4)(run_transposed_mesh)) <= LIMIT


@torch.no_grad()
def run_degree_one() -> tuple[bool, bool, float]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tp"))
    model, inputs = flux2(), flux2_inputs()
    reference = model(**inputs)[0]
    vitrail.enable_parallelism(model, config=TensorParallelConfig(mesh=mesh))
    untouched = vitrail.enable_parallelism(flux2(), config=TensorParallelConfig())
    deviation = error(model(**inputs)[0], reference)
    return vitrail.is_sharded(model), untouched._parallel_config is None, deviation


def test_a_degree_of_one_leaves_the_model_whole(ranks: Pools) -> None:
    for sharded, untouched, deviation in ranks(2)(run_degree_one):
        assert (sharded, untouched) == (False, True)
        assert deviation <= LIMIT


def run_compiled() -> tuple[float, float, int, int]:
    import torch._dynamo.testing

    torch._dynamo.reset()
    with torch.no_grad():
        model = flux2(num_layers=3, num_single_layers=3)
        inputs = flux2_inputs()
        reference = model(**inputs)[0]
        vitrail.enable_parallelism(model, config=config())
        counter = torch._dynamo.testing.CompileCounter()
        model.compile_repeated_blocks(backend=counter, fullgraph=True)
        by_blocks = error(model(**inputs)[0], reference)
        blocks = counter.frame_count
        torch._dynamo.reset()
        again = flux2(num_layers=3, num_single_layers=3)
        vitrail.enable_parallelism(again, config=config())
        whole = torch._dynamo.testing.CompileCounter()
        again.compile(backend=whole, fullgraph=True)
        return by_blocks, error(again(**inputs)[0], reference), blocks, whole.frame_count


def test_repeated_blocks_stay_one_graph(ranks: Pools) -> None:
    for by_blocks, whole, graphs, whole_graphs in ranks(2)(run_compiled):
        assert by_blocks <= LIMIT
        assert whole <= LIMIT
        assert graphs == 2, "one graph for the double blocks, one for the single ones"
        assert whole_graphs == 1


@torch.no_grad()
def run_dropped_collective() -> tuple[bool, int]:
    from vitrail.apply import collectives

    model, inputs = flux2(), flux2_inputs()
    reference = model(**inputs)[0]
    vitrail.enable_parallelism(model, config=config())
    original = collectives._ops.all_reduce_
    noticed, total = 0, 2 * 4 + 2 + 2
    for dropped in range(total):
        seen = iter(range(total))
        fake = lambda tensor, op, group: tensor if next(seen) == dropped else original(tensor, op, group)  # noqa: B023, E731
        collectives._ops.__dict__["all_reduce_"] = fake
        try:
            noticed += not error(model(**inputs)[0], reference) <= LIMIT
        finally:
            collectives._ops.__dict__["all_reduce_"] = original
    return noticed == total, noticed


def test_dropping_any_reduce_is_noticed(ranks: Pools) -> None:
    assert ranks(2)(run_dropped_collective) == [(True, 12)] * 2


def run_gradients() -> str:
    model, inputs = flux2(), flux2_inputs()
    vitrail.enable_parallelism(model, config=config())
    inputs["hidden_states"].requires_grad_(True)
    try:
        model(**inputs)
    except vitrail.errors.UnsupportedError as refused:
        return str(refused)
    return "nothing was refused"


def test_gradients_are_refused(ranks: Pools) -> None:
    for said in ranks(2)(run_gradients):
        assert "a sharded model computes no gradients" in said
        assert "hint: run it under torch.no_grad()" in said
