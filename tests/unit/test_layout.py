"""Shards as index ranges: they reassemble exactly, and the bytes on disk are the bytes in memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitrail.layout import MeshAxis, Shard, assemble, normalise, share, split, take
from vitrail.layout.ranges import length


@st.composite
def shards(draw: st.DrawFn) -> Shard:
    """Shards of 1 to 3 dimensions, in parts of units of any width, ragged, some owned by several ranks."""
    degree = draw(st.integers(1, 5))
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        units, width = draw(st.integers(0, 7)), draw(st.integers(1, 3))
        owners = list(split(units, degree))
        if draw(st.booleans()):  # ranks that share units, as grouped key and value heads fewer than ranks do
            pairs = [owners[rank // 2 * 2 : rank // 2 * 2 + 2] for rank in range(degree)]
            owners = [(pair[0][0], pair[-1][1]) for pair in pairs]
        parts.append((units * width, owners, width))
    shape = draw(st.lists(st.integers(1, 4), min_size=0, max_size=2))
    dim = draw(st.integers(0, len(shape)))
    shape.insert(dim, sum(size for size, _, _ in parts))
    return Shard(tuple(shape), dim, share(parts))


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)


@given(shards())
def test_parts_reassemble_exactly(shard: Shard) -> None:
    whole = numbered(shard.shape)
    parts = [take(whole, shard, rank) for rank in range(shard.degree)]
    assert torch.equal(assemble(parts, shard), whole)


@given(shards())
def test_every_element_is_owned_once_or_replicated_alike(shard: Shard) -> None:
    whole = numbered(shard.shape)
    owned = [take(whole, shard, rank).flatten().tolist() for rank in range(shard.degree)]
    assert all(len(set(mine)) == len(mine) for mine in owned)
    assert set().union(*owned) == set(whole.flatten().tolist())
    assert [len(mine) for mine in owned] == [shard.numel(rank) for rank in range(shard.degree)]


@given(shards(), st.sampled_from([1, 2, 4]))
def test_spans_are_the_local_tensors_bytes(shard: Shard, itemsize: int) -> None:
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[itemsize]
    whole = numbered(shard.shape).to(dtype)
    data = whole.numpy().tobytes()
    for rank in range(shard.degree):
        spans = list(shard.spans(rank, itemsize))
        assert (
            b"".join(data[start : start + size] for start, size in spans) == take(whole, shard, rank).numpy().tobytes()
        )
        assert all(size > 0 for _, size in spans)
        assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(spans)), "adjacent spans are one"


@given(st.integers(0, 200), st.integers(1, 12))
def test_split_is_even_and_ordered(size: int, degree: int) -> None:
    pieces = split(size, degree)
    assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])]
    assert pieces[-1][1] == size
    lengths = [stop - start for start, stop in pieces]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def test_38_heads_on_4_ranks() -> None:
    assert [stop - start for start, stop in split(38, 4)] == [10, 10, 9, 9]


def test_fused_projection_takes_each_ranks_q_k_and_v() -> None:
    part = (8, split(4, 2), 2)
    assert share([part, part, part]) == (((0, 4), (8, 12), (16, 20)), ((4, 8), (12, 16), (20, 24)))


def test_neighbouring_ranges_merge() -> None:
    assert normalise([(0, 2), (2, 4), (4, 4), (6, 7)]) == ((0, 4), (6, 7))
    assert length(((0, 4), (6, 7))) == 5


@pytest.mark.parametrize("ranges", [[(2, 1)], [(-1, 2)], [(0, 3), (2, 4)], [(4, 6), (0, 2)]])
def test_bad_ranges_are_refused(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="range"):
        normalise(ranges)


def test_an_index_nobody_owns_is_refused() -> None:
    with pytest.raises(ValueError, match="nobody owns index 2 of dim 0"):
        Shard((5, 3), 0, (((0, 2),), ((3, 5),)))


def test_ranges_outside_the_dimension_are_refused() -> None:
    with pytest.raises(ValueError, match=r"exceed the 5 indices of dim 0"):
        Shard((5,), 0, (((0, 2),), ((2, 6),)))


def test_a_shard_owns_its_storage() -> None:
    whole = numbered((6, 4))
    shard = Shard((6, 4), 0, tuple(((start, stop),) for start, stop in split(6, 3)))
    local = take(whole, shard, 1)
    assert local.untyped_storage().nbytes() == local.nbytes
    whole.zero_()
    assert int(local.sum()) > 0


def test_taking_from_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(6, 4\) cannot be taken from a tensor of shape \(4, 6\)"):
        take(numbered((4, 6)), Shard.whole((6, 4), 2), 0)


def test_a_mesh_axis_checks_its_index() -> None:
    with pytest.raises(ValueError, match="mesh axis 'tp'"):
        MeshAxis("tp", 2, 2, (0, 1), "0", "cpu")
