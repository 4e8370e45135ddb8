"""Plans on models: the shards they come to, and every way they do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import (
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
)
from diffusers.hooks.tensor_parallel import PackedColwiseParallel, PackedRowwiseParallel, resolve_tp_shard_specs
from support.models import FLUX2, SD3
from torch import nn

from vitrail.errors import PlanError
from vitrail.layout import Shard, share, split
from vitrail.plan import Axis, Plan, Rule, from_diffusers, resolve, valid_degrees
from vitrail.plan.catalog import lookup
from vitrail.plan.document import Cut


def meta(cls: Any, **config: Any) -> nn.Module:
    with torch.device("meta"):
        model = cls(**config)
    assert isinstance(model, nn.Module)
    return model


class Block(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.heads = 4
        self.q = nn.Linear(6, 8)
        self.out = nn.Linear(8, 6)
        self.up = nn.Linear(6, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Tiny(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (12, 12)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for width in widths)
        self.head = nn.Linear(6, 5)


def plan(**changes: Any) -> Plan:
    axes = {"heads": Axis(4, 2, "attention heads"), "ff": Axis()}
    rules = (
        Rule("blocks.*.q", "colwise", ("heads",)),
        Rule("blocks.*.out", "rowwise", ("heads",)),
        Rule("blocks.*.up", "colwise", ("ff", "ff")),
        Rule("head", "gathered"),
    )
    return Plan("Tiny", **{"axes": axes, "rules": rules, "attributes": {"blocks.*.heads": "heads"}, **changes})


def test_shards_styles_and_attributes() -> None:
    resolved = resolve(plan(), Tiny(), 2)
    assert resolved.shards["blocks.0.q.weight"] == Shard((8, 6), 0, share([(8, split(4, 2), 2)]))
    assert resolved.shards["blocks.0.q.bias"] == Shard((8,), 0, share([(8, split(4, 2), 2)]))
    assert resolved.shards["blocks.1.out.weight"] == Shard((6, 8), 1, share([(8, split(4, 2), 2)]))
    assert "blocks.1.out.bias" not in resolved.shards, "a rowwise bias is added after the reduce: replicated"
    assert resolved.shards["blocks.0.up.weight"].ranges == (((0, 3), (6, 9)), ((3, 6), (9, 12)))
    assert resolved.shards["head.weight"].ranges == (((0, 3),), ((3, 5),)), "gathered columns need not divide"
    assert resolved.attributes[("blocks.0", "heads")] == (2, 2)
    assert resolved.styles["head"] == "gathered"


def test_a_rank_holds_what_the_shards_say() -> None:
    model = Tiny()
    resolved = resolve(plan(), model, 2)
    sharded = set(resolved.shards)
    whole = sum(p.numel() for name, p in model.named_parameters() if name not in sharded)
    assert resolved.parameter_numel(model, 0) == whole + sum(s.numel(0) for s in resolved.shards.values())


def test_degrees_that_would_do() -> None:
    assert valid_degrees(plan(), Tiny()) == [1, 2, 3, 4]  # as many as there are heads
    with pytest.raises(PlanError, match=r"over 5 ranks: heads \(attention heads\) has 4 units, fewer than 5") as caught:
        resolve(plan(), Tiny(), 5)
    assert caught.value.hint == "degrees that would do: 1 to 4"
    with pytest.raises(PlanError, match="a degree of 0 is not possible"):
        resolve(plan(), Tiny(), 0)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"rules": (Rule("blocks.*.k", "colwise", ("heads",)),)},
            "names module 'blocks.*.k', which Tiny does not have",
        ),
        ({"rules": (Rule("blocks.0", "colwise", ("heads",)),)}, "shards 'blocks.0', which is a Block"),
        ({"axes": {"heads": Axis(4, 3), "ff": Axis()}}, "'blocks.0.q.weight' is 8, but 'heads.3' comes to 12"),
        ({"axes": {"heads": Axis("num_heads", 2), "ff": Axis()}}, "'heads' is sized by 'num_heads'.*gives as None"),
        ({"attributes": {"blocks.*.tails": "heads"}}, "names attribute 'blocks.*.tails', which Tiny does not have"),
        (
            {"attributes": {"blocks.*.heads": "ff"}},
            "blocks.0.heads is 4, but 'ff' comes to 6 .ff = 6 from 'blocks.0.up.weight'",
        ),
        ({"rules": (Rule("head", "gathered"), Rule("*", "gathered"))}, "two rules match module 'head'|is a ModuleList"),
        (
            {
                "rules": (Rule("blocks.0.q", "colwise", ("heads", "ff", "more")),),
                "axes": {"heads": Axis(4, 1), "ff": Axis(), "more": Axis()},
                "attributes": {},
            },
            "more than one axis of unknown size",
        ),
        (
            {"inputs": {"blocks.*": {"mask": (Cut(1, ("heads",)),)}}},
            "cuts the input 'mask' of 'blocks.0', which its forward does not take; it takes x",
        ),
        ({"inputs": {"tails.*": {"x": (Cut(1, ("heads",)),)}}}, "cuts inputs of module 'tails"),
        (
            {"rules": (Rule("head", "colwise", (2, 1)),), "attributes": {}},
            r"5 wide, which proportions \[2, 1\] do not divide",
        ),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        resolve(plan(**changes), Tiny(), 2)


def test_blocks_may_differ_in_width_under_one_axis() -> None:
    shards = resolve(plan(), Tiny((12, 16)), 2).shards
    assert shards["blocks.0.up.weight"].ranges == (((0, 3), (6, 9)), ((3, 6), (9, 12)))
    assert shards["blocks.1.up.weight"].ranges == (((0, 4), (8, 12)), ((4, 8), (12, 16)))


def test_units_that_the_degree_does_not_divide_are_shared_out_raggedly() -> None:
    resolved = resolve(plan(), Tiny(), 3)
    assert [resolved.shards["blocks.0.q.weight"].local_shape(rank) for rank in range(3)] == [(4, 6), (2, 6), (2, 6)]
    assert resolved.attributes[("blocks.0", "heads")] == (2, 1, 1)


def test_optional_rules_may_match_nothing() -> None:
    rules = (*plan().rules, Rule("blocks.*.extra", "gathered", optional=True))
    assert "head" in resolve(plan(rules=rules), Tiny(), 2).styles


def test_a_plan_of_another_class_or_of_nothing_is_refused() -> None:
    foreign = Plan("Other", dict(plan().axes), plan().rules)
    with pytest.raises(PlanError, match=r"the plan for Other \(caller\) is not for Tiny"):
        resolve(foreign, Tiny(), 2)
    with pytest.raises(PlanError, match="shards nothing of Tiny"):
        resolve(plan(rules=(Rule("extra", "gathered", optional=True),), attributes={}), Tiny(), 2)


def test_a_forward_that_was_replaced_is_refused() -> None:
    model = Tiny()
    model.head.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(PlanError, match="shards 'head', whose forward was replaced: it would bypass the collective"):
        resolve(plan(), model, 2)


def test_a_linear_subclass_is_refused() -> None:
    class Squared(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) ** 2

    model = Tiny()
    model.head = Squared(6, 5)
    with pytest.raises(PlanError, match="shards 'head', which is a Squared; it can only shard Linear"):
        resolve(plan(), model, 2)


def test_tied_weights_are_refused() -> None:
    model = Tiny()
    model.blocks[1].q.weight = model.blocks[0].q.weight  # type: ignore[union-attr]
    with pytest.raises(PlanError, match=r"blocks.0.q.weight is tied to blocks.1.q.weight"):
        resolve(plan(), model, 2)


FLUX = dict(
    num_layers=1,
    num_single_layers=1,
    attention_head_dim=8,
    num_attention_heads=8,
    joint_attention_dim=16,
    pooled_projection_dim=8,
    in_channels=4,
    axes_dims_rope=(2, 2, 4),
)
QWEN = dict(
    num_layers=1,
    attention_head_dim=8,
    num_attention_heads=8,
    joint_attention_dim=16,
    in_channels=4,
    out_channels=4,
    axes_dims_rope=(2, 2, 4),
)


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize(
    "cls, config",
    [(Flux2Transformer2DModel, FLUX2), (FluxTransformer2DModel, FLUX), (QwenImageTransformer2DModel, QWEN)],
)
def test_diffusers_own_plans_give_diffusers_own_shards(cls: Any, config: dict[str, Any], degree: int) -> None:
    model = meta(cls, **config)
    mine = resolve(from_diffusers(cls._tp_plan, model), model, degree).shards
    theirs = resolve_tp_shard_specs(model, cls._tp_plan, degree)
    assert set(mine) == {name for name, spec in theirs.items() if spec.dim is not None}
    for name, spec in theirs.items():
        if spec.dim is not None:
            parts = [(size, split(size, degree), 1) for size in spec.block_sizes]
            assert mine[name].ranges == share(parts), name


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize(
    "cls, config",
    [(Flux2Transformer2DModel, FLUX2), (FluxTransformer2DModel, FLUX), (QwenImageTransformer2DModel, QWEN)],
)
def test_the_catalog_agrees_with_diffusers_where_both_shard(cls: Any, config: dict[str, Any], degree: int) -> None:
    model = meta(cls, **config)
    catalogued = lookup(model)
    assert catalogued is not None
    mine = resolve(catalogued, model, degree).shards
    theirs = resolve(from_diffusers(cls._tp_plan, model), model, degree).shards
    assert {name: mine[name] for name in theirs} == dict(theirs)
    assert set(mine) - set(theirs), "the modulations are sharded too"


def test_published_sizes_resolve_without_weights() -> None:
    klein = dict(
        num_layers=5, num_single_layers=20, num_attention_heads=24, joint_attention_dim=7680, guidance_embeds=False
    )
    model = meta(Flux2Transformer2DModel, **klein)
    catalogued = lookup(model)
    assert catalogued is not None
    total = sum(p.numel() for p in model.parameters())
    assert resolve(catalogued, model, 8).parameter_numel(model, 0) / (total / 8) < 1.01


def test_sd3_rescales_the_heads_that_its_processor_divides_by() -> None:
    model = meta(SD3Transformer2DModel, **SD3)
    catalogued = lookup(model)
    assert catalogued is not None
    attributes = resolve(catalogued, model, 4).attributes
    assert attributes[("transformer_blocks.0.attn", "heads")] == (2,) * 4
    assert attributes[("transformer_blocks.1.attn2", "heads")] == (2,) * 4


@pytest.mark.parametrize(
    "flat, message",
    [
        ({"transformer_blocks.*.*.to_q": "colwise"}, "has more than one '\\*'"),
        ({"transformer_blocks.*.attn.to_z": "colwise"}, "the model has no 'transformer_blocks.0.attn.to_z'"),
        ({"transformer_blocks.0.attn.*": "colwise"}, "must stand for the elements of a ModuleList"),
        ({"proj_out": "sideways"}, "the style of 'proj_out' is 'sideways'"),
        ({"proj_out": PackedColwiseParallel()}, "without blocks: pass them to it"),
        ({"proj_out": PackedRowwiseParallel([5, 6])}, "proportions \\[5, 6\\] do not divide"),
    ],
)
def test_bad_plans_in_diffusers_form(flat: dict[str, Any], message: str) -> None:
    model = meta(Flux2Transformer2DModel, **FLUX2)
    with pytest.raises(PlanError, match=message):
        resolve(from_diffusers(flat, model), model, 2)


def test_heads_must_divide_in_diffusers_form_too() -> None:
    model = meta(Flux2Transformer2DModel, **{**FLUX2, "num_attention_heads": 6, "mlp_ratio": 2.0})
    with pytest.raises(PlanError, match="over 4 ranks: heads6 .attention heads. has 6 units") as caught:
        resolve(from_diffusers(Flux2Transformer2DModel._tp_plan, model), model, 4)
    assert caught.value.hint == "degrees that would do: 1, 2, 3, 6"
