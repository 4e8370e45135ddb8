"""What this rank is doing right now, for the watchdog to read and for the counts of a run."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Activity:
    """``what`` is the collective or phase, ``module`` its module's name, ``seconds`` how long it has lasted."""

    what: str
    module: str
    seconds: float
    waiting: bool
    step: int
    collectives: int


class Flight:
    """The collective in the air, if any. Written by the forward, which must stay cheap; read by another thread."""

    __slots__ = ("_module", "_names", "bytes", "collectives", "since", "step", "waiting", "what")

    def __init__(self) -> None:
        self.what = "before the first step"
        self.waiting = False
        self.since = time.monotonic()
        self.step = 0
        self.collectives = 0
        self.bytes = 0
        self._module: nn.Module | None = None
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

    def name_modules(self, model: nn.Module) -> None:
        """Remember the names of ``model``'s modules, to be told by."""
        for name, module in model.named_modules():
            self._names[module] = name

    def take_off(self, what: str, module: nn.Module, payload: torch.Tensor) -> None:
        """A collective of the model's forward begins: it is counted."""
        self.collectives += 1
        self.bytes += payload.nbytes
        self.wait_in(what, module)

    def wait_in(self, what: str, module: nn.Module) -> None:
        self.what = what
        self._module = module
        self.since = time.monotonic()
        self.waiting = True

    def land(self) -> None:
        self.waiting = False

    def enter_step(self) -> None:
        self.step += 1
        self.phase("in a step, between collectives")

    def phase(self, what: str) -> None:
        self.what = what
        self._module = None
        self.since = time.monotonic()
        self.waiting = False

    def look(self) -> Activity:
        module = self._module
        name = "" if module is None else self._names.get(module, type(module).__name__)
        seconds = time.monotonic() - self.since
        what = self.what if self.waiting or module is None else f"on its way from the {self.what}"
        return Activity(what, name, seconds, self.waiting, self.step, self.collectives)


FLIGHT = Flight()
