"""A bound on the cache's size (NEURON_SIM_CACHE_LIMIT): the programs that were not used for longest go."""

import os
from pathlib import Path

from neuron_sim.neffcache import NeffCache

# Down to this share at once: removing one file for each that is written would read the whole folder every time.
_KEPT = 0.9


class Limiter:
    """Keeps one folder below a number of bytes. Methods may raise OSError."""

    def __init__(self, cache: NeffCache, limit: int) -> None:
        self._cache = cache
        self._limit = limit
        self._held: int | None = None

    def used(self, key: str) -> None:
        """A program was found and is used."""
        self._cache.touch(key)

    def wrote(self, size: int) -> None:
        """A program of so many bytes was written. Others may go, and it too if it is larger than the limit."""
        if self._held is None:
            self._held = sum(facts.st_size for _, facts in self._files())
        else:
            self._held += size
        if self._held > self._limit:
            self._held = self._make_room()

    def _make_room(self) -> int:
        files = sorted(self._files(), key=lambda found: found[1].st_mtime)
        held = sum(facts.st_size for _, facts in files)
        if held <= self._limit:
            return held  # another process made room
        for path, facts in files:
            if held <= self._limit * _KEPT:
                break
            path.unlink(missing_ok=True)
            held -= facts.st_size
        return held

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        found = []
        for path in self._cache.files():
            try:
                found.append((path, path.lstat()))
            except FileNotFoundError:
                continue  # another process removed it
        return found
