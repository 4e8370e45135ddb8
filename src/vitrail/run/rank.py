"""One rank of a run: ``python -m vitrail.run.rank REQUEST.json``, or ``vitrail generate`` under a launcher.

What goes wrong is left as JSON in the file that torch's elastic launcher names, for whoever started the ranks.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import env
from ..errors import UsageError, VitrailError
from .request import Request

# How long a rank that failed only because another did waits to be ended, so that the other is the one reported.
SECONDARY_SECONDS = 4.0
_SECONDARY = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "recvvalue failed",
    "timed out",
    "remote process exited",
    "communicator was aborted",
    "ncclremoteerror",
)
_MEMORY = ("can't allocate memory", "out of memory", "(oom)", "cannot allocate memory", "std::bad_alloc")


def lost_touch(text: str) -> bool:
    """Whether an error's text is a collective's whose other ranks are gone."""
    return any(sign in text.lower() for sign in _SECONDARY)


def out_of_memory(text: str) -> bool:
    """Whether an error's text is an allocator's, of any device."""
    return any(sign in text.lower() for sign in _MEMORY)


@dataclass(frozen=True)
class Failure:
    """What ended a rank. ``secondary`` when it only lost touch with another; ``trace`` for what is not the user's."""

    rank: int
    message: str
    hint: str | None
    exit_code: int
    secondary: bool
    trace: str | None

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        text = " ".join(str(error).split())
        if isinstance(error, VitrailError):
            trace = "".join(traceback.format_exception(error)) if env.DEBUG.read() else None
            return cls(rank, error.message, error.hint, error.exit_code, False, trace)
        if isinstance(error, MemoryError) or out_of_memory(text):
            said = text.split(" Exception raised from")[0][:200] or "MemoryError"
            hint = "a larger --tp, a smaller size, or --dtype bfloat16 needs less"
            return cls(rank, f"out of memory: {said}", hint, 1, False, None)
        secondary = isinstance(error, RuntimeError) and lost_touch(text)
        trace = "".join(traceback.format_exception(error))
        return cls(rank, f"{type(error).__name__}: {text[:300]}", None, 1, secondary, trace)

    def leave(self) -> None:
        """Write this where the launcher looks for it."""
        if file := env.ERROR_FILE.read():
            document = {
                "message": {
                    "message": self.message,
                    "extraInfo": {"py_callstack": self.trace or "", "timestamp": str(int(time.time()))},
                },
                "vitrail": vars(self),
            }
            Path(file).write_text(json.dumps(document), encoding="utf-8")


def run_here(request: Request, folder: Path) -> dict[str, Any]:
    """Join the run that the environment speaks of, and make the pictures."""
    import torch.distributed as dist

    from .ranks import host_group, joined

    assert request.device is not None
    world = env.WORLD_SIZE.read() or 1
    if request.tp not in (None, world):
        raise UsageError(f"--tp {request.tp}, but {world} ranks were started", hint="leave --tp out under torchrun")
    with joined(request.device, world):
        shared = [request]
        dist.broadcast_object_list(shared, src=0, group=host_group())
        return make(shared[0], folder)


def make(request: Request, folder: Path) -> dict[str, Any]:
    """Do what the request asks: save, compile ahead, or make pictures."""
    if request.save_to is not None:
        from .saving import save_job

        return save_job(request, folder)
    if request.sizes:
        from .ahead import compile_ahead

        return compile_ahead(request, folder)
    from .generate import generate

    return generate(request, folder)


def guarded(job: Callable[[], None], *, quiet: bool) -> None:
    """Run one rank's job, and end the process as a rank should: with its error told once, and a true exit code.

    ``quiet`` leaves the telling to the launcher.
    """
    rank = env.RANK.read() or 0
    _show_warnings(rank)
    try:
        job()
    except KeyboardInterrupt:
        _exit(130)
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        failure = Failure.of(error, rank)
        failure.leave()
        # What all ranks find wrong alike is told by the first alone.
        if not quiet and not failure.secondary and (rank == 0 or failure.exit_code == 1):
            told = failure.trace or ""
            print(f"{told}error: rank {rank}: {failure.message}", file=sys.stderr)
            if failure.hint:
                print(f"hint: {failure.hint}", file=sys.stderr)
        if failure.secondary:
            time.sleep(SECONDARY_SECONDS)
        _exit(failure.exit_code)


def _show_warnings(rank: int) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"warning: rank {rank}: %(message)s"))
    logging.getLogger("vitrail").addHandler(handler)


def _exit(code: int) -> None:
    """End now: tearing down a process group whose other ranks are gone can wait for them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with_parent() -> None:
    """Ask the kernel to end this process when the launcher ends, however it does (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() == 1:
            _exit(1)


def main() -> None:
    """The entry point of ranks that vitrail launched itself."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    request_file, folder = sys.argv[1:]
    request = Request.from_json(Path(request_file).read_text(encoding="utf-8"))

    def job() -> None:
        report = run_here(request, Path(folder))
        if env.RANK.read() == 0:
            Path(request_file).with_name("report.json").write_text(json.dumps(report), encoding="utf-8")

    guarded(job, quiet=True)


if __name__ == "__main__":
    main()
