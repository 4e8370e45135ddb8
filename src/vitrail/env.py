"""Every environment variable vitrail reads, declared once.

The declarations are data: ``docs/reference/environment.md`` is generated from them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable: ``read()`` gives its parsed value, or ``default`` when it is unset or empty."""

    name: str
    default: T
    parse: Callable[[str], T]
    help: str

    def read(self) -> T:
        text = os.environ.get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise UsageError(
                f"environment variable {self.name}={text!r} cannot be read: {error}",
                hint=f"{self.name}: {self.help} Unset it for the default ({self.default}).",
            ) from None


def _switch(text: str) -> bool:
    values = {"1": True, "on": True, "true": True, "0": False, "off": False, "false": False}
    if text.lower() not in values:
        raise ValueError("expected on or off")
    return values[text.lower()]


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError("expected a number of seconds above 0")
    return value


def _rank(text: str) -> int | None:
    value = int(text)
    if value < 0:
        raise ValueError("expected an integer from 0")
    return value


WATCHDOG_SECONDS = Variable(
    "VITRAIL_WATCHDOG_SECONDS",
    30.0,
    _positive,
    "How long a rank may wait in one collective before the watchdog names who is missing.",
)
TIMEOUT_SECONDS = Variable(
    "VITRAIL_TIMEOUT_SECONDS",
    1800.0,
    _positive,
    "How long a collective may take before the process group gives up and the run fails.",
)
CHECK_INPUTS = Variable(
    "VITRAIL_CHECK_INPUTS",
    True,
    _switch,
    "Whether a sharded model compares its inputs over the ranks at every step.",
)
CACHE = Variable(
    "VITRAIL_CACHE", "", str, "The folder that keeps derived sharding plans. The default is ~/.cache/vitrail."
)
DEBUG = Variable("VITRAIL_DEBUG", False, _switch, "Whether errors come with the traceback of where they arose.")
ERROR_FILE = Variable(
    "TORCHELASTIC_ERROR_FILE", "", str, "Where a rank leaves its error; set by torch's elastic launcher."
)
RANK = Variable("RANK", None, _rank, "This process's rank; set by torchrun. When set, vitrail joins that run.")
WORLD_SIZE = Variable("WORLD_SIZE", None, _rank, "The number of ranks; set by torchrun.")
LOCAL_RANK = Variable("LOCAL_RANK", None, _rank, "This process's rank on its machine; set by torchrun.")
OMP_NUM_THREADS = Variable(
    "OMP_NUM_THREADS", None, _rank, "CPU threads of one rank; the default shares the cores out over the ranks."
)
NEFF_CACHE_DIR = Variable(
    "TORCH_NEURONX_NEFF_CACHE_DIR", "/tmp/neff_cache", str, "Where a neuron device keeps compiled programs; its own."
)
DISABLE_NEFF_CACHE = Variable(
    "TORCH_NEURONX_DISABLE_NEFF_CACHE", False, _switch, "Whether a neuron device keeps no programs; its own."
)
NEFF_DISABLE_CACHE = Variable("TORCH_NEURONX_NEFF_DISABLE_CACHE", False, _switch, "The same, by its other name.")

VARIABLES: tuple[Variable[Any], ...] = (
    WATCHDOG_SECONDS,
    TIMEOUT_SECONDS,
    CHECK_INPUTS,
    CACHE,
    DEBUG,
    RANK,
    WORLD_SIZE,
    LOCAL_RANK,
    OMP_NUM_THREADS,
    ERROR_FILE,
    NEFF_CACHE_DIR,
    DISABLE_NEFF_CACHE,
    NEFF_DISABLE_CACHE,
)
