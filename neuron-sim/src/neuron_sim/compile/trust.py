"""Whose code is loaded from the cache. Programs that are data need no trust; a library of AOTInductor's is code.

A library is sealed when it is written: with a keyed hash, whose secret lies in a file that only its user can read. One
without this user's seal (somebody else's, or imported) is not loaded, unless NEURON_SIM_TRUST_CACHE=1 says so.
"""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from neuron_sim import env

_BYTES = 32


def secret_file() -> Path:
    """Where the secret is kept: NEURON_SIM_SECRET_FILE, or in the user's state folder."""
    named = env.NEURON_SIM_SECRET_FILE.read()
    if named is not None:
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state, "neuron-sim", "cache-secret")


def seal(key: str, payload: bytes) -> str | None:
    """The seal of this user for an entry; None where no secret can be kept."""
    secret = _secret(create=True)
    return _sealed(secret, key, payload) if secret is not None else None


def is_trusted(key: str, payload: bytes, found: object) -> bool:
    """Whether an entry's code may be loaded: it has this user's seal, or the cache is trusted as a whole."""
    if env.NEURON_SIM_TRUST_CACHE.read():
        return True
    secret = _secret(create=False)
    return secret is not None and isinstance(found, str) and hmac.compare_digest(_sealed(secret, key, payload), found)


def _sealed(secret: bytes, key: str, payload: bytes) -> str:
    return hmac.new(secret, key.encode() + hashlib.sha256(payload).digest(), hashlib.sha256).hexdigest()


def _secret(create: bool) -> bytes | None:
    file = secret_file()
    try:
        if create and not file.exists():
            _create(file)
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(handle, "rb") as opened:
            facts = os.fstat(opened.fileno())
            if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
                return None  # somebody else could know it
            secret = opened.read(_BYTES + 1)
    except OSError:
        return None
    return secret if len(secret) == _BYTES else None


def _create(file: Path) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(handle, "wb") as opened:
            opened.write(secrets.token_bytes(_BYTES))
        os.link(unfinished, file)  # fails where another process was first, whose secret then counts
    except FileExistsError:
        pass
    finally:
        unfinished.unlink(missing_ok=True)
