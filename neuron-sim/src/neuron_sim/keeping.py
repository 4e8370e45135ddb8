"""Programs found on disk or made and kept there, by operators and graphs alike. A cache that fails is told once, and
then done without."""

import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from neuron_sim import env
from neuron_sim.cachelimit import Limiter
from neuron_sim.errors import NeuronSimWarning
from neuron_sim.location import user_location
from neuron_sim.neffcache import Entry, EntryError, NeffCache, UntrustedError


class Keeper:
    """A cache folder, or none, and what was wrong with it so far. `disk` becomes None when it cannot be used."""

    def __init__(self, disk: NeffCache | None) -> None:
        self.disk = disk
        limit = env.NEURON_SIM_CACHE_LIMIT.read()
        self._limiter = Limiter(disk, limit) if disk is not None and limit is not None else None
        self._lock = threading.Lock()
        self._told: set[str] = set()
        self._spoilt: set[str] = set()

    @property
    def rewritten(self) -> int:
        """How many files of the cache were not what their names say."""
        return len(self._spoilt)

    def find_or_make(
        self,
        purpose: dict[str, Any],
        make: Callable[[], bytes],
        check: Callable[[Entry], None] | None = None,
        seal: Callable[[str, bytes], str | None] | None = None,
    ) -> tuple[Entry, bool]:
        """The program for a purpose, and whether it was found rather than made.

        Of several processes that want one program, one makes it and the others wait for it. `check` may raise
        `EntryError` for an entry that is found and is of no use; it is made and written again. `seal` signs what is
        made, from key and payload. Raises what `make` does.
        """
        made: Entry | None = None
        key = Entry(purpose).key
        if self.disk is None:
            return Entry(purpose, make()), False
        disk = self.disk
        try:
            if found := self.find(key, check):
                return found, True
            with disk.locked(key) as is_held:
                if not is_held:
                    self.tell(
                        "lock",
                        f"another process held a lock in {disk.locks} for longer than {disk.lock_timeout:g} s "
                        f"({env.NEFF_LOCK_TIMEOUT.name}); compiling without it",
                    )
                elif found := self.find(key, check):
                    return found, True  # compiled by who held the lock
                made = _made(purpose, make)
                if seal is not None:
                    made = replace(made, seal=seal(key, made.payload))
                disk.write(made)
                if self._limiter is not None:
                    self._limiter.wrote(disk.path(key).lstat().st_size)
        except _MakingError as error:
            raise error.cause from None
        except OSError as error:
            self.disk = None
            self.tell(
                "disk",
                f"the cache cannot be used and nothing more is kept: {error}; name folders that can be written in "
                f"{env.NEFF_CACHE_DIR.name} and {env.NEFF_LOCAL_CACHE_DIR.name}, or set "
                f"{env.DISABLE_NEFF_CACHE.name}=1",
            )
        return made or Entry(purpose, make()), False

    def find(self, key: str, check: Callable[[Entry], None] | None = None) -> Entry | None:
        """The program of a key, or None; also for a file that is not it, which is told. May raise OSError."""
        if self.disk is None:
            return None
        try:
            entry = self.disk.read(key)
            if entry is not None and check is not None:
                check(entry)
        except EntryError as error:
            self.useless(key, error)
            return None
        if entry is not None and self._limiter is not None:
            self._limiter.used(key)
        return entry

    def useless(self, key: str, error: EntryError) -> None:
        """A file cannot be used: count it where it is not what its name says, and tell the first."""
        if self.disk is None:
            return
        if isinstance(error, UntrustedError):
            self.tell(
                "untrusted", f"a file of the cache is not loaded and is written again: {self.disk.path(key)}: {error}"
            )
            return
        self._spoilt.add(key)
        self.tell(
            "entry",
            f"a file of the cache is not what its name says and is written again: {self.disk.path(key)}: {error}; "
            "`neuron-sim cache verify` looks at the others",
        )

    def tell(self, what: str, message: str) -> None:
        """Warn, once for each `what`."""
        with self._lock:
            if what in self._told:
                return
            self._told.add(what)
        where = user_location()
        warnings.warn_explicit(f"neuron-sim: {message}", NeuronSimWarning, where.file, where.line)


class _MakingError(Exception):
    """Tells what `make` raised from what the disk raised: both may be an OSError."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _made(purpose: dict[str, Any], make: Callable[[], bytes]) -> Entry:
    try:
        return Entry(purpose, make())
    except Exception as error:
        raise _MakingError(error) from error
