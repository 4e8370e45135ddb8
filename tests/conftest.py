"""Fixtures shared by all tests. ``ranks`` is the pool of gloo ranks, started once a session and size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")

from support.pool import Pools


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """``ranks(2)(function, *arguments)`` runs ``function(*arguments)`` on 2 ranks and gives their results in order."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def bundled() -> Path:
    from vitrail.bundled import model_folder

    return model_folder()
