"""A pool of ranks: processes that have imported everything and joined a gloo group, waiting for functions to run."""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 120.0
START_SECONDS = 120.0


class RanksFailed(AssertionError):
    """Some ranks raised, died or did not end in time; the message has every rank's account."""


class Pools:
    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __call__(self, size: int) -> Pool:
        if size not in self._pools or not self._pools[size].alive():
            self._pools[size] = Pool(size)
        return self._pools[size]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


class Pool:
    def __init__(self, size: int) -> None:
        self.size = size
        context = mp.get_context("spawn")
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.connections: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_rank_main, args=(rank, size, there, str(self.folder)), daemon=True)
            process.start()
            there.close()
            self.connections.append(here)
            self.processes.append(process)
        self._collect(START_SECONDS, "start")

    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def __call__(self, function: Callable[..., Any], *arguments: Any, timeout: float = TIMEOUT_SECONDS) -> list[Any]:
        """Run ``function(*arguments)``, a module-level function, on every rank. Raises `RanksFailed`."""
        for connection in self.connections:
            connection.send((function, arguments))
        return self._collect(timeout, function.__name__)

    def _collect(self, timeout: float, what: str) -> list[Any]:
        results: dict[int, Any] = {}
        problems: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        open_ = dict(enumerate(self.connections))
        while open_ and (left := deadline - time.monotonic()) > 0:
            # When one rank has failed the others may wait for it for ever: they get a few seconds more.
            for connection in wait(list(open_.values()), timeout=min(left, 5.0 if problems else left)):
                rank = next(rank for rank, other in open_.items() if other is connection)
                del open_[rank]
                try:
                    fine, value = connection.recv()
                except EOFError:
                    self.processes[rank].join(5)
                    problems[rank] = f"died with exit code {self.processes[rank].exitcode}"
                    continue
                if fine:
                    results[rank] = value
                else:
                    problems[rank] = value
            if problems and not wait(list(open_.values()), timeout=5.0):
                break
        for rank in open_:
            problems[rank] = f"did not end within the time allowed ({timeout:.0f} s). It was at:\n{self._stack(rank)}"
        if problems:
            if open_ or not self.alive():
                self.close()
            account = "\n".join(f"--- rank {rank} of {self.size}\n{text}" for rank, text in sorted(problems.items()))
            raise RanksFailed(f"{what}: {len(problems)} of {self.size} ranks failed\n{account}")
        return [results[rank] for rank in range(self.size)]

    def _stack(self, rank: int) -> str:
        file = self.folder / f"stack-{rank}"
        if self.processes[rank].is_alive():
            import signal

            os.kill(self.processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.5)
        return file.read_text() if file.exists() else "(no stack)"

    def close(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(10)
        shutil.rmtree(self.folder, ignore_errors=True)


def _rank_main(rank: int, size: int, connection: Connection, folder: str) -> None:
    import signal

    stack = open(Path(folder) / f"stack-{rank}", "w")  # noqa: SIM115 - kept for the life of the process
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    tests = Path(__file__).parent.parent
    sys.path[:0] = [str(tests), str(tests / "ranks")]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    try:
        import datetime

        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        store = dist.FileStore(str(Path(folder) / "store"), size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=TIMEOUT_SECONDS)
        )
        connection.send((True, None))
    except BaseException:
        connection.send((False, traceback.format_exc()))
        return
    while True:
        try:
            function, arguments = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            result = function(*arguments)
            connection.send((True, result))
        except BaseException:
            connection.send((False, traceback.format_exc()))
