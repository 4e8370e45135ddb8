"""One process a core: a process that names its cores in NEURON_RT_VISIBLE_CORES holds a lock on each until it ends.

The locks are files in the temporary folder, of one user and one simulated machine (NEURON_SIM_MACHINE), locked as POSIX
records: the kernel releases them however the process ends, and a forked child does not keep them. Cores that nobody
named are not locked, so that unrelated programs on one computer need not know of each other; the ranks of one process
group are compared when they meet.
"""

import fcntl
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from neuron_sim import env
from neuron_sim.errors import NeuronSimError

_held: dict[int, int] = {}
assigned = False  # the cores were not named but follow from LOCAL_RANK


def claim(cores: Sequence[int]) -> None:
    """Take the cores for this process. Raises `NeuronSimError`, naming the holder, if another process has one.

    Where no lock can be kept (a temporary folder that cannot be written to), that is an error too.
    """
    folder = _folder()
    for core in cores:
        if core not in _held:
            _held[core] = _lock(folder / f"core-{core}.lock", core)


def release() -> None:
    """Give all cores back; the end of the process does the same."""
    while _held:
        _, descriptor = _held.popitem()
        os.close(descriptor)


def _folder() -> Path:
    folder = Path(tempfile.gettempdir(), f"neuron-sim-{os.getuid()}", env.NEURON_SIM_MACHINE.read())
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise NeuronSimError(
            f"the locks of the cores cannot be kept in {folder} ({error.strerror}); name a folder that can be written "
            "to in TMPDIR"
        ) from error
    return folder


def _lock(path: Path, core: int) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise NeuronSimError(f"the lock of core {core}, {path}, cannot be opened ({error.strerror})") from error
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise NeuronSimError(
            f"core {core} is in use by process {holder}: a core serves one process at a time. Name another in "
            f"{env.VISIBLE_CORES.name}, or put this process on a machine of its own with {env.NEURON_SIM_MACHINE.name}"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor
