"""The watchdog says who is missing, and where; and what it costs is counted, not timed."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from diffusers import TensorParallelConfig
from support.models import flux2, flux2_inputs
from support.pool import Pool
from torch.distributed.device_mesh import DeviceMesh

import vitrail
from vitrail.apply.flight import FLIGHT, Flight
from vitrail.apply.watchdog import report
from vitrail.layout import MeshAxis


class Collect(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@torch.no_grad()
def run_one_rank_lingers(inside: bool) -> list[str]:
    import os

    os.environ["VITRAIL_WATCHDOG_SECONDS"] = "1"
    os.environ["VITRAIL_CHECK_INPUTS"] = "off" if inside else "on"
    handler = Collect()
    logging.getLogger("vitrail.watchdog").addHandler(handler)
    try:
        model = flux2()
        group = DeviceMesh("cpu", list(range(dist.get_world_size())), mesh_dim_names=("tp",))
        vitrail.enable_parallelism(model, config=TensorParallelConfig(mesh=group))
        model(**flux2_inputs())
        if dist.get_rank() == 1:
            if inside:  # in the middle of a step, before the second block's reduce
                block = model.transformer_blocks[1]
                block.register_forward_pre_hook(lambda *_: time.sleep(6))
            else:
                time.sleep(6)
        model(**flux2_inputs())
        time.sleep(0.1)
    finally:
        logging.getLogger("vitrail.watchdog").removeHandler(handler)
        del os.environ["VITRAIL_WATCHDOG_SECONDS"], os.environ["VITRAIL_CHECK_INPUTS"]
    return handler.messages


@pytest.fixture(scope="module")
def impatient() -> Iterator[Pool]:
    """Ranks of their own: a watchdog is started once a process, with the patience that the environment then gives."""
    pool = Pool(2)
    yield pool
    pool.close()


def test_a_rank_that_does_not_come_is_named_with_the_line_it_is_at(impatient: Pool) -> None:
    first, second = impatient(run_one_rank_lingers, False)
    assert second == []
    assert "rank 0 waits in comparison of inputs of the model (step 2" in first[0]
    assert "rank 1 has not come: between steps for " in first[0]
    assert "test_watchdog.py:" in first[0]
    assert "in run_one_rank_lingers" in first[0]


def test_the_module_and_collective_that_others_wait_for_are_named(impatient: Pool) -> None:
    first, _ = impatient(run_one_rank_lingers, True)
    assert "rank 0 waits in all_reduce of transformer_blocks.1.attn.to_" in first[0]
    assert "rank 1 has not come: on its way from the all_reduce of transformer_blocks.0." in first[0]


AXIS = MeshAxis("tp", 3, 0, (0, 1, 2), "0", "cpu")


def state(**changes: object) -> dict[str, object]:
    base = dict(what="all_reduce", module="b.out", seconds=31.0, waiting=True, step=2, collectives=9, stack="")
    return {**base, **changes}


@pytest.mark.parametrize(
    "states, expected",
    [
        (
            {0: state(), 1: state()},
            "after 31 s, rank 0, 1 waits in all_reduce of b.out (step 2, collective 9). rank 2 ",
        ),
        ({0: state(), 1: state()}, "rank 2 does not answer: it has ended, or is stopped"),
        (
            {0: state(), 1: state(), 2: state(collectives=8, module="a.out")},
            "rank 2 waits elsewhere: in all_reduce of a.out, collective 8",
        ),
        ({0: state(), 1: state(), 2: state()}, "all ranks are there: the collective itself is slow"),
    ],
)
def test_the_report_in_words(states: dict[int, dict[str, object]], expected: str) -> None:
    assert expected in report(AXIS, states)


def test_the_flight_says_what_is_going_on() -> None:
    flight = Flight()
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    flight.name_modules(model)
    assert flight.look().what == "before the first step"
    flight.enter_step()
    flight.take_off("all_reduce", model[0], torch.zeros(2))
    assert (flight.look().what, flight.look().module, flight.look().waiting) == ("all_reduce", "0", True)
    flight.land()
    assert flight.look().what == "on its way from the all_reduce"
    assert (flight.look().step, flight.look().collectives, flight.bytes) == (1, 1, 8)
    assert FLIGHT is not flight
