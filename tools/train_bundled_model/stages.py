"""Stages of the run: each seeded by itself, its result kept in a folder and skipped when that folder is there."""

from __future__ import annotations

import random
import shutil
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch


class Work:
    """The work folder of one run."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.seed = seed

    def stage(self, name: str, build: Callable[[Path, random.Random], None]) -> Path:
        """The folder of a stage's result, built first if it is not there.

        The result is built under another name and renamed when complete, so that a run that was cut short is taken up
        at the stage it was in. Every stage starts from random numbers of its own, whatever ran before it.
        """
        done = self.folder / name
        if done.is_dir():
            print(f"{name}: kept from an earlier run", flush=True)
            return done
        partial = self.folder / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        started, worked = time.monotonic(), time.process_time()
        seed = zlib.crc32(f"{name} {self.seed}".encode())
        torch.manual_seed(seed)
        build(partial, random.Random(seed))
        partial.rename(done)
        passed, used = time.monotonic() - started, time.process_time() - worked
        print(f"{name}: done in {passed:.0f} s, {used:.0f} s of processor time", flush=True)
        return done


class Meter:
    """Running means of a stage's losses, printed now and then."""

    def __init__(self, name: str, steps: int, every: int = 100) -> None:
        self._name, self._steps, self._every = name, steps, every
        self._means: dict[str, float] = {}
        self._started = time.monotonic()

    def add(self, step: int, **values: float) -> None:
        for key, value in values.items():
            self._means[key] = 0.97 * self._means.get(key, value) + 0.03 * value
        if (step + 1) % self._every == 0 or step + 1 == self._steps:
            means = " ".join(f"{key} {value:.4f}" for key, value in self._means.items())
            print(f"{self._name} {step + 1}/{self._steps} {time.monotonic() - self._started:.0f} s {means}", flush=True)
