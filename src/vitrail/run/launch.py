"""Starting ranks on this machine, through torch's own elastic launcher, and telling what ended them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import env
from ..errors import RankError, VitrailError
from .rank import Failure
from .ranks import threads_for
from .request import Request

SHUTDOWN_SECONDS = 3


class Interrupted(Exception):
    """Ctrl-C, or another signal that asked the run to end."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.exit_code = 128 + signal_number


def launch(request: Request, folder: Path) -> dict[str, Any]:
    """Start ``request.tp`` ranks, wait for them, and give their report. Raises what `launch_ranks` does."""
    assert request.tp is not None
    return launch_ranks(request.tp, "vitrail.run.rank", request.to_json(), str(folder))


def launch_ranks(degree: int, module: str, job: str, *arguments: str) -> dict[str, Any]:
    """Start ``degree`` ranks of ``python -m module JOB.json arguments``, and give the report that rank 0 leaves.

    The first rank that fails ends the run. Raises that rank's own error, or `RankError` naming the signal that
    ended it; `Interrupted` after Ctrl-C, with no process left.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="vitrail-") as scratch, _environment(degree), _silence():
        job_file = Path(scratch) / "job.json"
        job_file.write_text(job, encoding="utf-8")
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=degree,
            run_id=f"vitrail-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(scratch) / "logs")),
            shutdown_timeout=SHUTDOWN_SECONDS,
        )
        try:
            elastic_launch(config, sys.executable)("-m", module, str(job_file), *arguments)
        except ChildFailedError as error:
            print(file=sys.stderr)  # rank 0's progress bar may stand there unfinished
            raise told(error.failures) from None
        except SignalException as error:
            raise Interrupted(int(error.sigval)) from None
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT) from None
        return dict(json.loads((Path(scratch) / "report.json").read_text(encoding="utf-8")))


def told(failures: Mapping[int, Any]) -> VitrailError:
    """The error to show for the ranks that failed: the one that failed by itself, before those it took along."""
    reported: list[Failure] = []
    killed: list[tuple[int, int]] = []
    for rank, failure in sorted(failures.items()):
        if data := failure.error_file_data.get("vitrail"):
            reported.append(Failure(**data))
        elif failure.exitcode < 0:
            killed.append((rank, -failure.exitcode))
        else:
            reported.append(Failure(rank, f"ended with exit code {failure.exitcode}", None, 1, False, None))
    primary = [failure for failure in reported if not failure.secondary]
    if primary:
        failure = primary[0]
        # The user's own mistake is the same on all ranks; what befell one rank is told with its number.
        same = len({other.message for other in primary}) == 1 and len(primary) > 1
        place = "" if same or failure.exit_code != 1 else f"rank {failure.rank}: "
        if failure.trace:
            print(failure.trace, file=sys.stderr)
        error = VitrailError(f"{place}{failure.message}", hint=failure.hint)
        error.exit_code = failure.exit_code
        return error
    if killed:
        # The launcher ends the other ranks with SIGTERM, which is then no news.
        rank, number = min(killed, key=lambda one: one[1] == signal.SIGTERM)
        name = signal.Signals(number).name
        hint = "the kernel ends a process so when memory runs out; see dmesg" if number == signal.SIGKILL else None
        return RankError(f"rank {rank} was ended by signal {number} ({name})", hint=hint)
    lost = reported[0]
    return RankError(f"rank {lost.rank} lost touch with the others: {lost.message}")


@contextlib.contextmanager
def _environment(ranks: int) -> Iterator[None]:
    """Each rank gets its share of the cores, unless the user set it."""
    if env.OMP_NUM_THREADS.read() is not None:
        yield
        return
    os.environ[env.OMP_NUM_THREADS.name] = str(threads_for(ranks))
    try:
        yield
    finally:
        del os.environ[env.OMP_NUM_THREADS.name]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """The launcher logs every failure at length; `told` says it in a line."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
