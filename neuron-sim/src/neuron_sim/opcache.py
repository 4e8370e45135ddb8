"""Eager mode's compilations: what the real device would compile for each operator, and would find in its cache.

The core knows which calls it saw before (csrc/opcache.cpp) and tells of each new one once. The key holds what decides
the program: operator, shapes, dtypes, static arguments, the target and the compiler's settings. It holds no core, rank,
path or time, so that every rank and every run finds what one has compiled.
"""

import threading
import warnings
from pathlib import Path
from typing import Any

from neuron_sim import env
from neuron_sim.errors import NeuronSimWarning
from neuron_sim.location import user_location
from neuron_sim.neffcache import Entry, EntryError, NeffCache


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
    """Counts compilations and hits on disk. A cache that fails is told once, and then done without."""

    def __init__(self, disk: NeffCache | None, programs_for: dict[str, Any]) -> None:
        self.disk = disk
        self._target = programs_for
        self._lock = threading.Lock()
        self._told: set[str] = set()
        self.compiled_by_op: dict[str, int] = {}
        self.disk_hits = 0
        self._spoilt: set[str] = set()

    @property
    def compiles(self) -> int:
        """How many programs were compiled in this process."""
        return sum(self.compiled_by_op.values())

    @property
    def rewritten(self) -> int:
        """How many files of the cache were not what their names say."""
        return len(self._spoilt)

    def compiled(self, op: str, signature: str) -> None:
        """A call ran whose program is not in memory: take it from the disk, or compile it and keep it."""
        entry = Entry({"kind": "operator", "call": signature, "target": self._target})
        with self._lock:
            found = self.disk is not None and self._find_or_keep(self.disk, entry)
            if found:
                self.disk_hits += 1
            else:
                self.compiled_by_op[op] = self.compiled_by_op.get(op, 0) + 1

    def _find_or_keep(self, disk: NeffCache, entry: Entry) -> bool:
        try:
            if self._is_there(disk, entry):
                return True
            with disk.locked(entry.key) as is_held:
                if not is_held:
                    self._tell(
                        "lock",
                        f"another process held a lock in {disk.locks} for longer than {disk.lock_timeout:g} s "
                        f"({env.NEFF_LOCK_TIMEOUT.name}); compiling without it",
                    )
                elif self._is_there(disk, entry):
                    return True  # compiled by who held the lock
                disk.write(entry)
        except OSError as error:
            self.disk = None
            self._tell(
                "disk",
                f"the cache cannot be used and nothing more is kept: {error}; name folders that can be written in "
                f"{env.NEFF_CACHE_DIR.name} and {env.NEFF_LOCAL_CACHE_DIR.name}, or set "
                f"{env.DISABLE_NEFF_CACHE.name}=1",
            )
        return False

    def _is_there(self, disk: NeffCache, entry: Entry) -> bool:
        try:
            return disk.read(entry.key) is not None
        except EntryError as error:
            self._spoilt.add(entry.key)
            self._tell(
                "entry",
                f"a file of the cache is not what its name says and is written again: {disk.path(entry.key)}: {error}; "
                "`neuron-sim cache verify` looks at the others",
            )
            return False

    def _tell(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            where = user_location()
            warnings.warn_explicit(f"neuron-sim: {message}", NeuronSimWarning, where.file, where.line)


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
