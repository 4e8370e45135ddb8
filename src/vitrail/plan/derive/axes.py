"""Axes: what the dimensions of a recorded forward's tensors are, and which of them are the same.

Every tensor dimension is an `Axis`. Operations *unify* axes, or *refine* one into a concatenation (``cat``: the halves
of a gated projection) or a product (``prod``, major first: heads x head width). Weights share axes with activations, so
the layout of a fused projection is known once its output has been split.

An axis that cannot be cut is *blocked*, with the reason; refining a blocked axis gives blocked parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

Kind = Literal["same", "cat", "prod"]


class Conflict(Exception):
    """Two axes cannot be the same, or an axis cannot be split as asked: the caller blocks them."""


class Axis:
    """One dimension, of ``size`` elements. After `find`, ``parts`` is empty (a leaf) or what it consists of."""

    __slots__ = ("blocked", "kind", "parts", "size")

    def __init__(self, size: int, blocked: str | None = None) -> None:
        self.size = int(size)
        self.blocked = blocked
        self.kind: Kind | None = None
        self.parts: tuple[Axis, ...] = ()

    def bind(self, kind: Kind, parts: Sequence[Axis]) -> None:
        assert self.kind is None, "only a leaf can be refined"
        self.kind, self.parts = kind, tuple(parts)

    def __repr__(self) -> str:
        axis = find(self)
        if axis.kind is None:
            return f"{axis.size}{'!' if axis.blocked else ''}"
        return "(" + {"cat": " + ", "prod": " * "}[axis.kind].join(map(repr, axis.parts)) + ")"


ONE = Axis(1, "a dimension of one element")


def fresh(size: int, blocked: str | None = None) -> Axis:
    return ONE if size == 1 else Axis(size, blocked)


def find(axis: Axis) -> Axis:
    """The axis that stands for this one."""
    while axis.kind == "same":
        axis = axis.parts[0]
    return axis


def leaves(axis: Axis) -> Iterator[Axis]:
    """The parts that are not refined further, major first."""
    axis = find(axis)
    if axis.kind is None:
        yield axis
    else:
        for part in axis.parts:
            yield from leaves(part)


def block(axis: Axis, why: str) -> None:
    """Mark an axis as one that cannot be cut. The first reason stays."""
    for leaf in leaves(axis):
        leaf.blocked = leaf.blocked or why


def terms(axis: Axis) -> list[Axis]:
    """What ``axis`` is a concatenation of (itself, if nothing)."""
    axis = find(axis)
    return [term for part in axis.parts for term in terms(part)] if axis.kind == "cat" else [axis]


def factors(axis: Axis) -> list[Axis]:
    """What ``axis`` is a product of, major first (itself, if nothing)."""
    axis = find(axis)
    return [factor for part in axis.parts for factor in factors(part)] if axis.kind == "prod" else [axis]


def concatenate(parts: Sequence[Axis]) -> Axis:
    if len(parts) == 1:
        return parts[0]
    axis = Axis(sum(find(part).size for part in parts))
    if not parts:
        return axis
    axis.bind("cat", parts)
    return axis


def multiply(parts: Sequence[Axis]) -> Axis:
    parts = [part for part in parts if find(part).size != 1]
    if not parts:
        return ONE
    if len(parts) == 1:
        return parts[0]
    axis = Axis(math.prod(find(part).size for part in parts))
    axis.bind("prod", parts)
    return axis


def split_minor(axis: Axis, minor: int) -> tuple[Axis, Axis]:
    """``axis`` as a product (major, minor), where minor has ``minor`` elements."""
    axis = find(axis)
    if minor == 1:
        return axis, ONE
    if minor == axis.size:
        return ONE, axis
    if minor == 0 or axis.size % minor:
        raise Conflict(f"{axis.size} is not divided by {minor}")
    if axis.kind is None:
        pair = Axis(axis.size // minor, axis.blocked), Axis(minor, axis.blocked)
        axis.bind("prod", pair)
        return pair
    if axis.kind == "prod":
        majors, minors, left = factors(axis), list[Axis](), minor
        while left > 1:
            last = find(majors.pop())
            if left % last.size == 0:
                minors.insert(0, last)
                left //= last.size
            elif last.size % left == 0:
                outer, inner = split_minor(last, left)
                majors.append(outer)
                minors.insert(0, inner)
                left = 1
            else:
                raise Conflict(f"a factor of {last.size} cannot be cut at {left}")
        return multiply(majors), multiply(minors)
    parts = terms(axis)
    if any(find(part).size % minor for part in parts):
        raise Conflict(f"a concatenation cannot be divided by {minor}")
    pairs = [split_minor(part, minor) for part in parts]
    for _, inner in pairs[1:]:
        unify(pairs[0][1], inner)
    majors = [major if find(major).size > 1 else Axis(1, "a dimension of one element") for major, _ in pairs]
    return concatenate(majors), pairs[0][1]


def split_at(axis: Axis, offset: int) -> tuple[Axis, Axis]:
    """``axis`` as a concatenation of its first ``offset`` elements and the rest; neither may be empty."""
    axis = find(axis)
    assert 0 < offset < axis.size
    if axis.kind is None:
        pair = Axis(offset, axis.blocked), Axis(axis.size - offset, axis.blocked)
        axis.bind("cat", pair)
        return pair
    if axis.kind == "cat":
        right, left, missing = terms(axis), list[Axis](), offset
        while missing:
            first = find(right.pop(0))
            if first.size <= missing:
                left.append(first)
                missing -= first.size
            else:
                before, after = split_at(first, missing)
                left.append(before)
                right.insert(0, after)
                missing = 0
        return concatenate(left), concatenate(right)
    head, *tail = factors(axis)
    width = axis.size // find(head).size
    if offset % width:
        raise Conflict(f"a cut at {offset} falls inside a unit of {width}")
    before, after = split_at(head, offset // width)
    return multiply([before, *tail]), multiply([after, *tail])


def segment(axis: Axis, start: int, stop: int) -> Axis:
    """The elements ``start:stop`` of ``axis``."""
    size = find(axis).size
    if stop < size:
        axis, _ = split_at(axis, stop)
    if start > 0:
        _, axis = split_at(axis, start)
    return axis


def unify(first: Axis, second: Axis) -> Axis:
    """Declare two axes the same, refining both as far as the other is. Raises `Conflict` if they cannot be."""
    first, second = find(first), find(second)
    if first is second:
        return first
    if first.size != second.size:
        raise Conflict(f"{first.size} elements against {second.size}")
    if first.size == 1:
        return first
    if first.kind is not None and second.kind is None:
        first, second = second, first
    if first.kind is None:
        if second.kind is not None and any(leaf is first for leaf in leaves(second)):
            raise Conflict("an axis would contain itself")
        why = first.blocked
        first.bind("same", [second])
        if why:
            block(second, why)
        return second
    if "cat" in (first.kind, second.kind):
        if first.kind != "cat":
            first, second = second, first
        rest = second
        *heads, last = terms(first)
        for head in heads:
            head = find(head)
            if head.size == find(rest).size:
                raise Conflict("concatenations of different lengths")
            before, rest = split_at(rest, head.size)
            unify(head, before)
        unify(last, rest)
        return first
    rest = second
    major, *minors = factors(first)
    for factor in reversed(minors):
        rest, minor = split_minor(rest, find(factor).size)
        unify(factor, minor)
    unify(major, rest)
    return first


def equate(first: Axis, second: Axis, why: str) -> Axis:
    """`unify`, or block both with the reason where that is impossible."""
    try:
        return unify(first, second)
    except Conflict as conflict:
        block(first, f"{why}: {conflict}")
        block(second, f"{why}: {conflict}")
        return first


def reshape(axes: Sequence[Axis], shape: Sequence[int]) -> list[Axis]:
    """The axes of a tensor viewed in another shape. Raises `Conflict` where a cut does not fall between units."""
    stack = [find(axis) for axis in axes if find(axis).size != 1]
    result: list[Axis] = []
    for size in reversed(shape):
        parts: list[Axis] = []
        need = size
        while need > 1:
            if not stack:
                raise Conflict("sizes do not match")
            last = find(stack.pop())
            if need % last.size == 0:
                parts.insert(0, last)
                need //= last.size
            elif last.size % need == 0:
                major, minor = split_minor(last, need)
                parts.insert(0, minor)
                stack.append(major)
                need = 1
            else:
                raise Conflict(f"{last.size} elements viewed as {need}")
        result.insert(0, multiply(parts))
    return result


def local_size(axis: Axis, own: dict[Axis, int]) -> int:
    """The elements a rank has of ``axis``, when it has ``own[leaf]`` elements of the leaves that are sharded."""
    axis = find(axis)
    if axis.kind is None:
        return own.get(axis, axis.size)
    return (sum if axis.kind == "cat" else math.prod)(local_size(part, own) for part in axis.parts)
