"""Shared by the tests: a rulebook for one test, a Python process of its own, waiting for memory to be given back."""

import gc
import inspect
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from neuron_sim import policy
from neuron_sim.profiles import profile

ROOT = Path(__file__).parents[1]

# Compiled programs of the tests are kept from those of the user, and gone afterwards.
_folder = tempfile.TemporaryDirectory(prefix="neuron-sim-tests-")
os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"] = f"{_folder.name}/neff"
os.environ["TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR"] = f"{_folder.name}/locks"
os.environ["NEURON_SIM_SECRET_FILE"] = f"{_folder.name}/secret"
os.environ.pop("NEURON_SIM_REPORT", None)


def here(ahead: int = 0) -> str:
    """`file:line` of the caller's line, or of one below or above it."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{frame.f_back.f_code.co_filename}:{frame.f_back.f_lineno + ahead}"


# `pytest --hypothesis-profile thorough` runs the thousand random programs.
settings.register_profile("quick", max_examples=150, deadline=None)
settings.register_profile("thorough", max_examples=1000, deadline=None)
settings.load_profile("quick")


@pytest.fixture
def rules() -> Iterator[Callable[..., policy.Rulebook]]:
    """Puts a rulebook in force until the test ends: `rules("beta-2.10", "raise")`."""
    before = policy.current()

    def use(
        name: str = "sdk-2.33", strictness: str = "warn", settings: dict[str, bool] | None = None
    ) -> policy.Rulebook:
        book = policy.Rulebook(profile(name), strictness, settings)
        torch.neuron.init()
        policy.use(book)
        return book

    yield use
    policy.use(before)


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program in a fresh interpreter with extra environment variables."""

    def run(program: str, *flags: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NEURON_")}
        done = subprocess.run(
            [sys.executable, *flags, "-c", program],
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=180,
        )
        if check:
            assert done.returncode == 0, done.stderr
        return done

    return run


def settle(core: int = 0, until: int = 0) -> int:
    """Bytes allocated on a core, once autograd's threads have let go of what they held (within 50 ms)."""
    if torch.neuron.memory_allocated(core) > until:
        gc.collect()
    deadline = time.monotonic() + 0.05
    while torch.neuron.memory_allocated(core) > until and time.monotonic() < deadline:
        time.sleep(0.002)
    return torch.neuron.memory_allocated(core)
