"""`neuron-sim cache export|import FILE`: programs in a tar file, and back.

Nothing is unpacked by its name, every program is checked, and code (`aoti`) is taken only from who is trusted.
"""

import dataclasses
import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from neuron_sim.errors import ConfigurationError
from neuron_sim.neffcache import Entry, EntryError, NeffCache, key_in, parse

_LARGEST = 4 << 30


@dataclass
class Outcome:
    """What became of an archive's programs. `refused` says why, by name in the archive."""

    taken: int = 0
    there_already: int = 0
    refused: dict[str, str] = field(default_factory=dict)


def export(cache: NeffCache, file: Path) -> Outcome:
    """Write every good program of a cache to a tar file. Raises OSError."""
    outcome = Outcome()
    with tarfile.open(file, "w:gz", compresslevel=1) as archive:
        for path in cache.files():
            name = path.relative_to(cache.folder).as_posix()
            try:
                cache.check(path)
            except EntryError as error:
                outcome.refused[name] = str(error)
                continue
            content = path.read_bytes()
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
            outcome.taken += 1
    return outcome


def take(cache: NeffCache, file: Path, trust_code: bool) -> Outcome:
    """Add an archive's programs to a cache. `trust_code`: libraries too, which from then on count as this user's own.

    Raises `ConfigurationError` for a file that is no archive, and OSError for a cache that cannot be written.
    """
    outcome = Outcome()
    for name, entry in _programs(file, outcome):
        if entry.purpose.get("codegen") == "aoti":
            if not trust_code:
                outcome.refused[name] = "it is code; --trust takes it, if you trust where it comes from"
                continue
            from neuron_sim.compile import trust

            entry = dataclasses.replace(entry, seal=trust.seal(entry.key, entry.payload))
        else:
            entry = dataclasses.replace(entry, seal=None)
        if _has(cache, entry):
            outcome.there_already += 1
            continue
        cache.write(entry)
        outcome.taken += 1
    return outcome


def _has(cache: NeffCache, entry: Entry) -> bool:
    try:
        return cache.read(entry.key) == entry
    except EntryError:
        return False


def _programs(file: Path, outcome: Outcome) -> Iterator[tuple[str, Entry]]:
    try:
        with tarfile.open(file) as archive:
            for member in archive:
                key = key_in(member.name)
                if key is None or not member.isreg():
                    outcome.refused[member.name] = "it is not where a program belongs"
                elif member.size > _LARGEST:
                    outcome.refused[member.name] = f"it is larger than {_LARGEST >> 30} GiB"
                else:
                    opened = archive.extractfile(member)
                    assert opened is not None
                    try:
                        yield member.name, parse(key, opened.read())
                    except EntryError as error:
                        outcome.refused[member.name] = str(error)
    except (tarfile.TarError, EOFError) as error:
        raise ConfigurationError(f"{file} is no archive of programs, or is cut short: {error}") from error
