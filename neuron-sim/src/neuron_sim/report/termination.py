"""Lets a process that SIGTERM ends write its report first: torchrun ends the ranks beside one that failed in this way.

Python runs signal handlers only between two steps of the main thread, which may be waiting inside a collective for a
rank that is gone. So the signal wakes a thread, which writes and lets the signal do what it would have done.
"""

import ctypes
import os
import signal
import threading
from collections.abc import Callable


def watch(write: Callable[[str], None]) -> None:
    """Call `write` with the signal's name when SIGTERM comes, then end by it. Leaves a program's own handling alone."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if previous != -1:  # an event loop's
        signal.set_wakeup_fd(previous)
        os.close(reader)
        os.close(writer)
        return
    # A handler has to be there for the pipe to be written to; what is to be done, the thread does.
    signal.signal(signal.SIGTERM, _nothing)
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_forget)
    threading.Thread(target=_wait, args=(reader, write), name="neuron-sim-report", daemon=True).start()


def _wait(reader: int, write: Callable[[str], None]) -> None:
    while number := os.read(reader, 1):
        if number[0] == signal.SIGTERM:
            write(signal.SIGTERM.name)
            # Python lets only the main thread set a signal back to its default, which is a null pointer on Linux.
            ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
            os.kill(os.getpid(), signal.SIGTERM)


def _nothing(*_: object) -> None:
    """The thread has the signal's number from the pipe."""


# A child's signals must not reach its parent through the pipe that they share, not even in its first microseconds.
_held = threading.local()


def _hold() -> None:
    _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _held.mask)


def _forget() -> None:
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGTERM) is _nothing:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _release()
