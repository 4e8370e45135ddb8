"""Catalogued classes on real ranks, at degrees that do not divide their heads: what the simulation promised holds."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from diffusers import TensorParallelConfig
from support.pool import Pools
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import vitrail
from vitrail.apply.prove import randomised, relative_error
from vitrail.apply.trial import trial_of
from vitrail.apply.wide import Wide
from vitrail.plan import catalog

LIMIT = 1e-9
# Norms over all heads, rotary inputs that span them, linear attention in convolutions, a gathered table, routed
# experts, dual attention, attention masks over heads, grouped key heads.
CLASSES = (
    "WanTransformer3DModel",
    "LTXVideoTransformer3DModel",
    "SanaTransformer2DModel",
    "AuraFlowTransformer2DModel",
    "HiDreamImageTransformer2DModel",
    "PriorTransformer",
    "Lumina2Transformer2DModel",
    "HunyuanDiT2DModel",
)


def config() -> TensorParallelConfig:
    return TensorParallelConfig(mesh=DeviceMesh("cpu", list(range(dist.get_world_size()))))


@torch.no_grad()
def run_class(name: str) -> tuple[float, int]:
    trial = trial_of(catalog.probes(name)[0])
    whole = randomised(trial.model)
    sharded = vitrail.enable_parallelism(randomised(trial.model), config=config())
    worst = 0.0
    for arguments in trial.arguments:
        with Wide():
            worst = max(worst, relative_error(sharded(**arguments()), whole(**arguments())))
    return worst, sum(parameter.numel() for parameter in sharded.parameters())


@pytest.mark.parametrize("name", CLASSES)
def test_ragged_heads_on_three_ranks(ranks: Pools, name: str) -> None:
    results = ranks(3)(run_class, name)
    model = trial_of(catalog.probes(name)[0]).model
    total = sum(parameter.numel() for parameter in model.parameters())
    assert max(error for error, _ in results) <= LIMIT
    assert sum(held for _, held in results) < total * 1.1


@torch.no_grad()
def run_compiled(name: str) -> tuple[float, int, int]:
    import torch._dynamo.testing

    trial = trial_of(catalog.probes(name)[0])
    arguments = trial.arguments[0]
    outputs, graphs = [], []
    for sharded in (False, True):
        torch._dynamo.reset()
        model = randomised(trial.model)
        if sharded:
            vitrail.enable_parallelism(model, config=config())
        counter = torch._dynamo.testing.CompileCounter()
        model.compile_repeated_blocks(backend=counter, fullgraph=True)  # type: ignore[operator]
        outputs.append(model(**arguments()))
        graphs.append(counter.frame_count)
    return relative_error(*outputs), graphs[0], graphs[1]


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "QwenImageTransformer2DModel", "WanTransformer3DModel"])
def test_sharding_costs_repeated_blocks_no_graph(ranks: Pools, name: str) -> None:
    for error, whole, sharded in ranks(2)(run_compiled, name):
        assert error <= LIMIT
        assert sharded == whole


class Mine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 20)
        self.down = nn.Linear(20, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(torch.relu(self.up(x)))
        return made


@torch.no_grad()
def run_mine(folder: str) -> tuple[float, str, list[int]]:
    import os

    os.environ["VITRAIL_CACHE"] = folder
    torch.manual_seed(4)
    model = Mine().double()
    x = torch.randn(3, 6, dtype=torch.float64)
    reference = model(x)
    vitrail.enable_parallelism(model, config=config())
    sharding = vitrail.sharding_of(model)
    assert sharding is not None
    return relative_error(model(x), reference), sharding.resolved.plan.source, [p.numel() for p in model.parameters()]


def test_the_first_rank_derives_and_the_others_receive(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("cache")
    for error, source, held in ranks(2)(run_mine, str(folder)):
        assert error <= LIMIT
        assert source == "derived"
        assert held == [60, 10, 60, 6]
    assert len(list((folder / "plans").glob("*.json"))) == 1


@torch.no_grad()
def run_some_ranks_first() -> list[float]:
    """Ranks 0 and 1 shard a model by themselves, then all three do: with unlike numbers of groups behind them."""
    meshes = {degree: DeviceMesh("cpu", list(range(degree))) for degree in (2, 3)}
    errors = []
    for mesh in meshes.values():
        if mesh.get_coordinate() is None:
            continue
        torch.manual_seed(4)
        model = Mine().double()
        x = torch.randn(3, 6, dtype=torch.float64)
        reference = model(x)
        vitrail.enable_parallelism(model, config=TensorParallelConfig(mesh=mesh))
        errors.append(relative_error(model(x), reference))
    return errors


def test_some_ranks_may_have_sharded_before_the_others(ranks: Pools) -> None:
    results = ranks(3)(run_some_ranks_first)
    assert [len(errors) for errors in results] == [2, 2, 1]
    assert max(error for errors in results for error in errors) <= LIMIT


@torch.no_grad()
def run_joined() -> float:
    """A ControlNet that borrows modules of the transformer beside it, both sharded, as its pipeline joins them."""
    from vitrail.apply.classes import model_class

    trial = trial_of(catalog.probes("ZImageControlNetModel")[0])
    borrows = catalog.probes("ZImageControlNetModel")[0].borrows
    assert borrows is not None
    join = model_class("ZImageControlNetModel").from_transformer
    partner = randomised(model_class(borrows.model)(**borrows.config), seed=1)
    own = randomised(trial.subject)
    whole = join(randomised(trial.subject), randomised(partner, seed=1))
    for model in (own, partner):
        vitrail.enable_parallelism(model, config=config())
    joined = join(own, partner)
    worst = 0.0
    for arguments in (*trial.arguments, *trial.arguments):
        with Wide():
            worst = max(worst, relative_error(joined(**arguments()), whole(**arguments())))
    return worst


def test_a_controlnet_that_borrows_from_a_sharded_transformer(ranks: Pools) -> None:
    assert max(ranks(2)(run_joined)) <= LIMIT
