"""Fewer heads of keys than ranks: the query heads that share one are shared out, and the keys replicated."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import vitrail
from vitrail.apply.prove import compare, randomised
from vitrail.errors import PlanError
from vitrail.plan import Axis, Plan, resolve, valid_degrees
from vitrail.plan.owned import beyond, most, owned, possible

AXES = {"kv": Axis(), "group": Axis(within="kv")}


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 40))
def test_every_query_head_has_one_rank_and_its_key_head_lies_there(units: int, parts: int, degree: int) -> None:
    sizes = {"kv": units, "group": parts}
    limit = most(AXES, sizes)
    assert limit == units * parts
    if not possible(AXES, sizes, degree):
        assert degree > units
        return
    assert degree <= limit
    seen: list[tuple[int, int]] = []
    for own in owned(AXES, sizes, degree):
        keys, queries = range(*own["kv"]), range(*own["group"])
        assert keys
        assert queries
        seen += [(key, query) for key in keys for query in queries]
    assert sorted(seen) == [(key, query) for key in range(units) for query in range(parts)]


def test_the_degrees_that_are_tried_are_of_each_kind() -> None:
    assert beyond(AXES, {"kv": 2, "group": 4}) == [3, 4, 8]
    assert beyond(AXES, {"kv": 5, "group": 2}) == [10]
    assert beyond(AXES, {"kv": 5, "group": 1}) == []


class Attention(nn.Module):
    def __init__(self, heads: int, kv_heads: int, width: int = 8, dim: int = 48) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, width
        self.groups = heads // kv_heads
        self.q, self.k, self.v, self.o = (
            nn.Linear(dim, heads * width),
            nn.Linear(dim, kv_heads * width),
            nn.Linear(dim, kv_heads * width),
            nn.Linear(heads * width, dim),
        )
        self.norm = nn.RMSNorm(width)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(*x.shape[:2], -1, self.width).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(self.mixed(self.norm(q), k, v).transpose(1, 2).flatten(2))


class Expanded(Attention):
    """As transformers does it, with its shortcut."""

    def repeated(self, x: Tensor, count: int) -> Tensor:
        batch, heads, length, width = x.shape
        if count == 1:
            return x
        return x[:, :, None].expand(batch, heads, count, length, width).reshape(batch, heads * count, length, width)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, self.repeated(k, self.groups), self.repeated(v, self.groups))


class Counted(Attention):
    """The group follows from two attributes, which change together."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        count = self.heads // self.kv_heads
        return F.scaled_dot_product_attention(q, k.repeat_interleave(count, 1), v.repeat_interleave(count, 1))


class Measured(Attention):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        count = q.shape[1] // k.shape[1]
        return F.scaled_dot_product_attention(q, k.repeat_interleave(count, 1), v.repeat_interleave(count, 1))


class NormAcrossKeys(Attention):
    """A replicated key head would be counted twice in the sums: no such degree is offered."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__(heads, kv_heads)
        self.across = nn.RMSNorm(kv_heads * self.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.across(self.k(x)), self.v(x)
        q, k, v = (t.view(*x.shape[:2], -1, self.width).transpose(1, 2) for t in (q, k, v))
        return self.o(self.mixed(q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, kind: type[Attention], heads: int, kv_heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(heads, kv_heads) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def derived(model: nn.Module) -> Plan:
    return vitrail.derive_plan(model, {"x": torch.randn(2, 7, 48)}, keep=False)


@pytest.mark.parametrize("kind", [Attention, Expanded, Counted, Measured])
def test_more_ranks_than_key_heads(kind: type[Attention]) -> None:
    model = Model(kind, 12, 3)
    plan = derived(model)
    assert {name: axis.within for name, axis in plan.axes.items()} == {"kv_heads": "", "group": "kv_heads"}
    assert plan.verified["degrees"] == [2, 3, 4, 6, 12]
    assert valid_degrees(plan, model) == [1, 2, 3, 4, 6, 9, 12]
    other, inputs = randomised(Model(kind, 16, 2)), torch.randn(1, 9, 48).double()
    for degree in (2, 3, 4, 8):
        assert compare(plan, other, [lambda: {"x": inputs}], degree).error <= 1e-9
    with pytest.raises(PlanError, match=r"kv_heads .* has 3 units of 4 parts, which cannot be shared out over 5"):
        resolve(plan, model, 5)


def test_padded_ranks_with_replicated_keys_are_right() -> None:
    model = randomised(Model(Attention, 10, 2))
    plan = derived(Model(Attention, 10, 2))
    inputs = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(1)).double()
    assert compare(plan, model, [lambda: {"x": inputs}], 4, pad=True).ok
    shapes = {resolve(plan, model, 4, pad=True).shards["blocks.0.q.weight"].local_shape(rank) for rank in range(4)}
    assert shapes == {(3 * 8, 48)}


def test_sums_over_replicated_heads_are_not_added_up() -> None:
    model = Model(NormAcrossKeys, 12, 3)
    plan = derived(model)
    assert not any(axis.within for axis in plan.axes.values())
    assert valid_degrees(plan, model) == [1, 2, 3]


def test_a_rank_holds_its_key_heads_once() -> None:
    model = Model(Attention, 12, 3)
    resolved = resolve(derived(model), model, 6)
    keys = resolved.shards["blocks.0.k.weight"]
    assert [keys.ranges[rank] for rank in range(6)] == [((8 * (rank // 2), 8 * (rank // 2) + 8),) for rank in range(6)]
    queries = resolved.shards["blocks.0.q.weight"]
    assert [queries.numel(rank) for rank in range(6)] == [2 * 8 * 48] * 6


@pytest.mark.parametrize(
    "axes, message",
    [
        ({"kv": {}, "group": {"within": "heads"}}, "'heads', which the plan does not declare"),
        ({"kv": {"within": "group"}, "group": {"within": "kv"}}, "within another itself"),
        ({"kv": {}, "a": {"within": "kv"}, "group": {"within": "kv"}}, "one axis can be within another"),
    ],
)
def test_pairs_that_make_no_sense_are_refused(axes: dict[str, dict[str, str]], message: str) -> None:
    document = {"vitrail_plan": 1, "model": "Model", "axes": axes, "modules": {}}
    with pytest.raises(PlanError, match=message):
        Plan.from_document(document)
