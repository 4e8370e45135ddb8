"""Axes: refining and unifying keep sizes, and what cannot be is a conflict."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.plan.derive.axes import (
    Axis,
    Conflict,
    block,
    concatenate,
    equate,
    find,
    leaves,
    local_size,
    reshape,
    segment,
    split_at,
    split_minor,
    unify,
)


def total(axis: Axis) -> int:
    axis = find(axis)
    if axis.kind is None:
        return axis.size
    return (sum if axis.kind == "cat" else math.prod)(total(part) for part in axis.parts)


@given(st.integers(2, 12), st.integers(2, 12), st.data())
def test_cuts_and_factors_keep_sizes(major: int, minor: int, data: st.DataObject) -> None:
    axis = Axis(major * minor)
    outer, inner = split_minor(axis, minor)
    assert (find(outer).size, find(inner).size, total(axis)) == (major, minor, major * minor)
    cut = data.draw(st.integers(1, major - 1)) * minor
    left, right = split_at(axis, cut)
    assert (total(left), total(right)) == (cut, major * minor - cut)


def test_a_fused_projection_is_seen_through_a_view() -> None:
    weight = Axis(3 * 5 * 8)
    three, heads, width = reshape([weight], [3, 5, 8])
    assert [find(axis).size for axis in (three, heads, width)] == [3, 5, 8]
    assert local_size(weight, {find(heads): 2}) == 3 * 2 * 8


def test_halves_of_a_concatenation_follow_their_parts() -> None:
    heads, columns = Axis(6), Axis(10)
    fused = concatenate([heads, columns])
    assert find(segment(fused, 6, 16)) is columns
    assert local_size(fused, {heads: 3, columns: 5}) == 8


def test_unifying_refines_both() -> None:
    first, second = Axis(24), Axis(24)
    split_minor(first, 4)
    split_at(second, 8)
    unify(first, second)
    assert total(first) == total(second) == 24


def test_what_is_blocked_stays_so_in_its_parts() -> None:
    axis = Axis(12, "it is sorted")
    assert {leaf.blocked for part in split_minor(axis, 4) for leaf in leaves(part)} == {"it is sorted"}
    other = Axis(12)
    block(unify(axis, other), "another reason")
    assert all(leaf.blocked == "it is sorted" for leaf in leaves(other))


def test_what_cannot_be_the_same_is_blocked() -> None:
    first, second = Axis(12), Axis(10)
    with pytest.raises(Conflict, match="12 elements against 10"):
        unify(first, second)
    equate(first, second, "add")
    assert first.blocked == "add: 12 elements against 10"
    with pytest.raises(Conflict, match="5 elements viewed as 12"):
        reshape([Axis(12), Axis(5)], [5, 12])


def test_an_axis_cannot_contain_itself() -> None:
    axis = Axis(12)
    outer, _ = split_minor(axis, 1)
    assert outer is axis
    left, _ = split_at(axis, 6)
    with pytest.raises(Conflict):
        unify(left, axis)
