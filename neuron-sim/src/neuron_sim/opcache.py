"""Eager mode's compilations: what the real device would compile for each operator, and would find in its cache.

The core knows which calls it saw before (csrc/opcache.cpp) and tells of each new one once. The key holds what decides
the program: operator, shapes, dtypes, static arguments, the target and the compiler's settings. It holds no core, rank,
path or time, so that every rank and every run finds what one has compiled.
"""

import threading
from pathlib import Path
from typing import Any

from neuron_sim import env
from neuron_sim.keeping import Keeper
from neuron_sim.neffcache import NeffCache


def from_environment() -> NeffCache | None:
    """The cache that the environment names, or None when it is disabled. Raises `ConfigurationError`."""
    if env.DISABLE_NEFF_CACHE.read() or env.NEFF_DISABLE_CACHE.read():
        return None
    folder, locks = Path(env.NEFF_CACHE_DIR.read()), Path(env.NEFF_LOCAL_CACHE_DIR.read())
    return NeffCache(folder, locks, env.NEFF_LOCK_TIMEOUT.read())


def target() -> dict[str, Any]:
    """What programs are compiled for, as part of their keys."""
    from neuron_sim import policy, runtime

    machine = runtime.machine()
    return {
        "family": machine.instance.family,
        "logical_nc_config": machine.logical_nc_config,
        "release": policy.current().profile.name,
        "flags": env.CC_FLAGS.read(),
        "optlevel": env.OPT_LEVEL.read(),
    }


class OpCache:
    """Counts the operators' compilations and hits on disk."""

    def __init__(self, disk: NeffCache | None, programs_for: dict[str, Any]) -> None:
        self.keeper = Keeper(disk)
        self.target = programs_for
        self._lock = threading.Lock()
        self.compiled_by_op: dict[str, int] = {}
        self.disk_hits = 0

    @property
    def disk(self) -> NeffCache | None:
        """The cache on disk, or None where there is none or it failed."""
        return self.keeper.disk

    @property
    def compiles(self) -> int:
        """How many programs were compiled in this process."""
        return sum(self.compiled_by_op.values())

    @property
    def rewritten(self) -> int:
        """How many files of the cache were not what their names say."""
        return self.keeper.rewritten

    def compiled(self, op: str, signature: str) -> None:
        """A call ran whose program is not in memory: take it from the disk, or compile it and keep it."""
        with self._lock:
            purpose = {"kind": "operator", "call": signature, "target": self.target}
            _, found = self.keeper.find_or_make(purpose, lambda: b"")
            if found:
                self.disk_hits += 1
            else:
                self.compiled_by_op[op] = self.compiled_by_op.get(op, 0) + 1


_current: OpCache | None = None
_lock = threading.Lock()


def current() -> OpCache:
    """The cache in use, set up from the environment the first time."""
    global _current
    with _lock:
        if _current is None:
            _current = OpCache(from_environment(), target())
        return _current


def start_again() -> OpCache:
    """Forget what is in memory and read the environment again. For tests and tools."""
    global _current
    from neuron_sim import _core

    with _lock:
        _current = None
    _core.forget_signatures()
    return current()
