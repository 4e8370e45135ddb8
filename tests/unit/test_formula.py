"""Formulas: read as written, and their ranges are those of the indices they stand for."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.layout import Formula, Range, join, split

NAMES = {"a": 3, "b": 4, "c": 5}


def formulas(depth: int = 3) -> st.SearchStrategy[Formula]:
    leaf = st.one_of(
        st.sampled_from([Formula("name", name) for name in NAMES]),
        st.integers(1, 4).map(lambda number: Formula("number", number=number)),
    )
    return st.recursive(
        leaf,
        lambda inner: st.tuples(st.sampled_from(["cat", "prod"]), st.lists(inner, min_size=2, max_size=3)).map(
            lambda made: join(made[0], made[1])
        ),
        max_leaves=6,
    )


def indices(formula: Formula, owned: dict[str, Range]) -> list[int]:
    """The same as `Formula.ranges`, element by element."""
    if formula.kind in ("name", "number"):
        start, stop = owned.get(formula.name, (0, formula.size(NAMES)))
        return list(range(start, stop))
    if formula.kind == "cat":
        result, offset = [], 0
        for part in formula.parts:
            result += [offset + index for index in indices(part, owned)]
            offset += part.size(NAMES)
        return result
    lists = [indices(part, owned) for part in formula.parts]
    sizes = [part.size(NAMES) for part in formula.parts]
    found = []
    for chosen in itertools.product(*lists):
        index = 0
        for own, size in zip(chosen, sizes, strict=True):
            index = index * size + own
        found.append(index)
    return found


@given(formulas())
def test_what_is_written_is_read(formula: Formula) -> None:
    assert Formula.parse(str(formula)).size(NAMES) == formula.size(NAMES)
    assert str(Formula.parse(str(formula))) == str(formula)


@given(formulas(), st.integers(1, 3))
def test_ranges_are_the_indices(formula: Formula, degree: int) -> None:
    cuts = {"a": split(NAMES["a"], degree), "b": split(NAMES["b"], degree)}
    for rank in range(degree):
        owned = {name: cut[rank] for name, cut in cuts.items()}
        spelled = [index for start, stop in formula.ranges(NAMES, owned) for index in range(start, stop)]
        assert spelled == indices(formula, owned)


@pytest.mark.parametrize(
    "text, message",
    [
        ("heads*", "a name or number is missing"),
        ("(heads + 2", "a bracket is not closed"),
        ("heads heads", "unexpected 'heads'"),
        ("heads / 2", "unexpected '/'"),
        ("", "a name or number is missing"),
    ],
)
def test_what_is_no_formula_is_quoted(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"is not a formula: {message}"):
        Formula.parse(text)
