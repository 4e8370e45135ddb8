"""The cache on disk: one file for each compiled program, `ab/cd/<hash>.neff`, as the native backend lays it out.

A file is one line of JSON, then as many bytes as the line says. The line holds what the program is for, and the file's
name is the SHA-256 of that; so a file can be checked without trusting it, and nothing in it is ever executed or
unpickled. Files are written under another name and renamed, and only their owner can write to them.

Source of layout, variables and lock files: the native backend's pre-release tree and its public documentation.
"""

import errno
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = "neuron-sim program 1"
_LAYOUT = re.compile(r"[0-9a-f]{2}/[0-9a-f]{2}/[0-9a-f]{64}\.neff")
_UNFINISHED = re.compile(r"[0-9a-f]{2}/[0-9a-f]{2}/\.[0-9a-f]{64}\.\d+\.new")
_HEADER_LIMIT = 1 << 20
_POLL = 0.01


class EntryError(ValueError):
    """A file of the cache that is not what its name says: truncated, changed, or somebody else's."""


class UntrustedError(EntryError):
    """A file that is what its name says, and holds code of somebody who is not trusted."""


@dataclass(frozen=True)
class Entry:
    """A program in the cache: what it is for, and its bytes. `seal` is who wrote it, where that matters."""

    purpose: dict[str, Any]
    payload: bytes = b""
    seal: str | None = None

    @property
    def key(self) -> str:
        """The SHA-256 of the purpose, written in one way only."""
        return key_of(self.purpose)


def key_of(purpose: dict[str, Any]) -> str:
    """The hash under which a program for this purpose is kept. The same in every process."""
    return hashlib.sha256(json.dumps(purpose, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class NeffCache:
    """A cache folder. Every method may raise OSError; who uses it decides whether to go on without."""

    def __init__(self, folder: Path, locks: Path, lock_timeout: float) -> None:
        self.folder = folder
        self.locks = locks
        self.lock_timeout = lock_timeout

    def path(self, key: str) -> Path:
        """Where the program of that key is kept."""
        return self.folder / key[:2] / key[2:4] / f"{key}.neff"

    def read(self, key: str) -> Entry | None:
        """The program of that key, or None. Raises `EntryError` for a file that is not it."""
        try:
            # Neither a link, which may lead anywhere, nor a pipe, which may never answer.
            handle = os.open(self.path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise EntryError("it is a link") from error
            raise
        with open(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise EntryError("it is no regular file")
            return _parse(key, file.readline(_HEADER_LIMIT), file.read())

    def write(self, entry: Entry) -> None:
        """Keep a program. Whoever reads at the same time sees all of it or nothing."""
        path = self.path(entry.key)
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        header = {
            "format": FORMAT,
            "purpose": entry.purpose,
            "bytes": len(entry.payload),
            "sha256": hashlib.sha256(entry.payload).hexdigest(),
        }
        if entry.seal is not None:
            header["seal"] = entry.seal
        unfinished = path.with_name(f".{entry.key}.{os.getpid()}.new")
        try:
            unfinished.unlink(missing_ok=True)  # left by a process of the same number
            handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            with open(handle, "wb") as file:
                file.write(json.dumps(header, sort_keys=True).encode() + b"\n" + entry.payload)
            os.replace(unfinished, path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    @contextmanager
    def locked(self, key: str) -> Iterator[bool]:
        """Hold the lock under which the program of that key is compiled; false when it did not come in time.

        The lock ends with the process that holds it, so none is ever left over.
        """
        import fcntl

        self.locks.mkdir(mode=0o755, parents=True, exist_ok=True)
        # One file for 256th of the keys: as many as there are programs would fill the folder.
        handle = os.open(self.locks / f"{key[:2]}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + self.lock_timeout
        try:
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        yield False
                        return
                    time.sleep(_POLL)
                else:
                    yield True
                    return
        finally:
            os.close(handle)

    def files(self) -> list[Path]:
        """Every file of the cache's layout, sorted; nothing else that may lie in the folder."""
        return self._matching(_LAYOUT)

    def unfinished(self) -> list[Path]:
        """Files that a process was writing when it ended, or is writing now."""
        return self._matching(_UNFINISHED)

    def _matching(self, layout: re.Pattern[str]) -> list[Path]:
        found = self.folder.glob("??/??/*") if layout is _LAYOUT else self.folder.glob("??/??/.*.new")
        return sorted(path for path in found if layout.fullmatch(path.relative_to(self.folder).as_posix()))

    def touch(self, key: str) -> None:
        """Note that a program was used just now. Does nothing where the file is gone or cannot be changed."""
        with suppress(OSError):
            os.utime(self.path(key), follow_symlinks=False)

    def check(self, path: Path) -> Entry:
        """The program in a file of the layout. Raises `EntryError` when it is not what the name says."""
        entry = self.read(path.stem)
        if entry is None:
            raise EntryError("it is not where its name belongs")
        return entry


def key_in(name: str) -> str | None:
    """The key in a file's name below the folder, `ab/cd/<key>.neff`; None for a name of another form."""
    key = Path(name).stem
    is_right = _LAYOUT.fullmatch(name) is not None and name == f"{key[:2]}/{key[2:4]}/{key}.neff"
    return key if is_right else None


def parse(key: str, content: bytes) -> Entry:
    """The program in a file's content. Raises `EntryError` when it is not what the name says."""
    line, end, payload = content.partition(b"\n")
    return _parse(key, line + end, payload)


def _parse(key: str, line: bytes, payload: bytes) -> Entry:
    try:
        header = json.loads(line)
        if header["format"] != FORMAT:
            raise EntryError(f"it is of the format {header['format']!r}, not {FORMAT!r}")
        purpose, size, digest = header["purpose"], header["bytes"], header["sha256"]
        if not isinstance(purpose, dict) or key_of(purpose) != key:
            raise EntryError("its name is not the hash of what it is for")
    except EntryError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise EntryError("its first line cannot be read: it is truncated or foreign") from error
    graph = purpose.get("graph") if purpose.get("codegen") == "aten" else None
    if graph not in (None, digest):
        raise EntryError("its graph is not the one that its first line names")
    if len(payload) != size or hashlib.sha256(payload).hexdigest() != digest:
        raise EntryError(f"it holds {len(payload)} bytes, not the {size} of its first line, or others")
    return Entry(purpose, payload, header.get("seal"))
