"""Which cores can form a group."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_sim.instances import instance, names
from neuron_sim.topology import Torus

TORUS = Torus(4, 4)


def cores_of(chips, offsets=(0, 1, 2, 3)):
    return [chip * 4 + offset for chip in chips for offset in offsets]


@pytest.mark.parametrize(
    "chips",
    [[0], [0, 1], [0, 3], [0, 4], [0, 12], [0, 1, 2, 3], [1, 5, 9, 13], [0, 1, 4, 5], [3, 0, 15, 12], [2, 3, 6, 7]],
)  # fmt: skip
def test_routable_chips(chips):
    assert TORUS.problem(cores_of(chips), 4) is None


@pytest.mark.parametrize("chips", [[0, 2], [0, 5], [0, 1, 2], [0, 4, 8], [0, 1, 4], [0, 2, 4, 6], [0, 1, 2, 3, 4]])
def test_chips_that_are_not_routable(chips):
    assert "neither an adjacent pair, a full row or column, nor a rectangle" in TORUS.problem(cores_of(chips), 4)


def test_the_same_cores_of_each_chip():
    assert TORUS.problem([0, 1, 4, 5], 4) is None
    assert TORUS.problem([0, 4], 4) is None
    assert TORUS.problem([0, 1, 4, 6], 4) == (
        "it takes cores 0, 1 of chip 0 but 0, 2 of chip 1; a group takes the same cores of each of its chips"
    )
    assert "of chip 0 but 0, 1 of chip 1" in TORUS.problem(range(6), 4)


def shifted(chips, down, right):
    return {(chip // 4 + down) % 4 * 4 + (chip % 4 + right) % 4 for chip in chips}


@given(st.sets(st.integers(0, 15), min_size=1), st.integers(0, 3), st.integers(0, 3))
def test_every_chip_of_a_torus_is_like_every_other(chips, down, right):
    assert TORUS.is_routable(shifted(chips, down, right)) == TORUS.is_routable(chips)


@given(st.sets(st.integers(0, 15), min_size=1))
def test_rows_are_as_good_as_columns(chips):
    assert TORUS.is_routable({chip % 4 * 4 + chip // 4 for chip in chips}) == TORUS.is_routable(chips)


@given(st.sets(st.integers(0, 15), min_size=1), st.sets(st.integers(0, 3), min_size=1))
def test_cores_matter_only_by_being_the_same_on_each_chip(chips, offsets):
    assert (TORUS.problem(cores_of(chips, offsets), 4) is None) == TORUS.is_routable(chips)


def test_how_many_sets_of_chips_are_routable():
    found = [sum(TORUS.is_routable(chips) for chips in combinations(range(16), count)) for count in range(1, 17)]
    # 16 chips; 32 edges; 8 lines and 16 squares; 32 of 2 by 3; 8 of 2 by 4; 16 of 3 by 3; 8 of 3 by 4; all.
    assert found == [16, 32, 0, 24, 0, 32, 0, 8, 16, 0, 0, 8, 0, 0, 0, 1]


@given(st.sampled_from(names()), st.data())
def test_one_core_and_one_chip_are_always_a_group(name, data):
    machine = instance(name)
    core = data.draw(st.integers(0, machine.logical_cores(machine.logical_nc_config) - 1))
    assert machine.group_problem([core], machine.logical_nc_config) is None
    per_chip = machine.cores_per_chip // machine.logical_nc_config
    assert machine.group_problem(range(per_chip), machine.logical_nc_config) is None


@pytest.mark.parametrize("size", [1, 2, 4, 8, 12, 16, 32])
def test_degrees_of_trn1(size):
    problem = instance("trn1.32xlarge").group_problem(range(size), 1)
    if size in (1, 2, 8, 16, 32):
        assert problem is None
    else:
        assert problem == f"a group has 1, 2, 8, 16 cores, or a multiple of 32; this one has {size}"


@pytest.mark.parametrize("name", ["trn3:16", "inf2.48xlarge", "trn2.3xlarge"])
def test_instances_without_a_rule(name):
    assert instance(name).group_problem([0, 1, 3], 1) is None


def test_one_physical_core_in_a_logical_one():
    machine = instance("trn2.48xlarge")
    assert machine.group_problem(range(8), 1) is None
    assert machine.group_problem([0, 4], 1) is None  # one chip has eight
    assert machine.group_problem([0, 16], 2) is None  # chips 0 and 4, one below the other
    assert machine.group_problem([0, 8], 2) is not None
