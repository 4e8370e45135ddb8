"""A clean end for processes that ran backward.

PyTorch's engine starts one thread for each device at the first backward, 64 on a simulated trn2.48xlarge, and each
takes the interpreter's lock once. A program that ends meanwhile would be aborted: a thread that waits for the lock of
an interpreter that is gone is unwound by force (CPython before 3.14). So the end waits until they have started.
"""

import atexit
import time
from pathlib import Path

from neuron_sim import _core

TIMEOUT = 2.0


def install() -> None:
    """Wait at exit, where the operating system tells about threads (Linux)."""
    atexit.register(wait_for_autograd_threads)


def wait_for_autograd_threads() -> None:
    """Return when every thread of autograd's is known to the interpreter, or after two seconds."""
    threads = _autograd_threads()
    if threads == 0:
        return
    deadline = time.monotonic() + TIMEOUT
    while _core.thread_states() <= threads and time.monotonic() < deadline:
        time.sleep(0.001)
    # Known is not yet done: the last of them may still wait for the lock, which a short sleep hands on.
    time.sleep(0.005)


def _autograd_threads() -> int:
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return 0
    count = 0
    for task in tasks.iterdir():
        try:
            count += (task / "comm").read_text().startswith("pt_autograd_")
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread ended while we looked
    return count
