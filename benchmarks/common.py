"""What the benchmarks share: gloo ranks on this machine, the CPU that others use meanwhile, tables and result files."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing as mp
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import psutil
from rich.console import Console
from rich.table import Table

OUT = Console(width=None if sys.stdout.isatty() else 132, highlight=False)
NOISE_PERCENT = 5.0
START_SECONDS = 180.0
GRACE_SECONDS = 3.0


class RanksFailed(RuntimeError):
    """Some ranks raised, died or did not answer in time. All of them are dead by now."""


class Ranks:
    """``size`` fresh processes of one thread each, joined in a gloo group, which run what they are told.

    Between two calls they block in a read and use no CPU. Leaving the ``with`` block ends them, whatever they do.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        context = mp.get_context("spawn")
        store = str(Path(self._folder.name) / "store")
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DIFFUSERS_VERBOSITY": "error"}
        try:
            with mock.patch.dict(os.environ, environment):
                for rank in range(size):
                    here, there = context.Pipe()
                    process = context.Process(target=_serve, args=(rank, size, there, store, timeout), daemon=True)
                    process.start()
                    there.close()
                    self._connections.append(here)
                    self._processes.append(process)
            self._collect(range(size), "start", START_SECONDS)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def __call__(self, function: Callable[..., Any], *arguments: Any, only: Iterable[int] | None = None) -> list[Any]:
        """What ``function(*arguments)`` gives on the ranks ``only`` (all by default), in that order."""
        ranks = list(range(self.size) if only is None else only)
        try:
            for rank in ranks:
                self._connections[rank].send((function, arguments))
            return self._collect(ranks, function.__name__, self.timeout)
        except BaseException:
            self.close()
            raise

    def _collect(self, ranks: Sequence[int], what: str, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        problems: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        pending = {self._connections[rank]: rank for rank in ranks}
        while pending and (left := deadline - time.monotonic()) > 0:
            if problems:  # the others may wait for the one that failed, for ever
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            for ready in wait(list(pending), timeout=min(left, GRACE_SECONDS)):
                assert isinstance(ready, Connection)
                rank = pending.pop(ready)
                try:
                    fine, value = ready.recv()
                except EOFError:
                    fine, value = False, "died"
                (results if fine else problems)[rank] = value
        if problems or pending:
            silence = "waited for the others" if problems else f"gave no answer in {timeout:.0f} s"
            problems |= dict.fromkeys(pending.values(), silence)
            accounts = "\n".join(f"rank {rank}: {text}" for rank, text in sorted(problems.items()))
            raise RanksFailed(f"{what} failed on {len(problems)} of {self.size} ranks\n{accounts}")
        return [results[rank] for rank in ranks]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()  # who waits for the next call ends by itself
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(10)
        self._folder.cleanup()


def _serve(rank: int, size: int, connection: Connection, store: str, timeout: float) -> None:
    import torch
    import torch.distributed as dist

    try:
        torch.set_num_threads(1)
        patience = datetime.timedelta(seconds=timeout + 60)  # the caller gives up first, and tells which rank is late
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=patience)
        dist.barrier()
        connection.send((True, None))
        while True:
            function, arguments = connection.recv()
            connection.send((True, function(*arguments)))
    except (EOFError, KeyboardInterrupt):
        return
    except BaseException:  # noqa: BLE001 - whatever it was, the caller has to hear of it
        with contextlib.suppress(OSError):
            connection.send((False, traceback.format_exc()))


class OtherCpu:
    """The share of the machine's CPU time that went to processes other than this one and its children."""

    def __init__(self) -> None:
        self._busy, self._total, self._own = _machine_busy(), _machine_total(), _own_cpu()

    def percent(self) -> float:
        total = _machine_total() - self._total
        others = (_machine_busy() - self._busy) - (_own_cpu() - self._own)
        return max(0.0, 100 * others / total) if total > 0 else 0.0


def _machine_total() -> float:
    times = psutil.cpu_times()._asdict()
    return float(sum(value for name, value in times.items() if not name.startswith("guest")))


def _machine_busy() -> float:
    times = psutil.cpu_times()._asdict()
    return _machine_total() - float(times["idle"]) - float(times.get("iowait", 0))


def _own_cpu() -> float:
    """Of this process, of its children that ended, and of those that live."""
    me = psutil.Process()
    mine = me.cpu_times()
    total = mine.user + mine.system + mine.children_user + mine.children_system
    for child in me.children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return float(total)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table: words to the left, numbers to the right."""
    rows = list(rows)
    shown = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        numbers = all(row[index][:1].isdigit() or row[index] == "-" for row in rows)
        shown.add_column(column, justify="right" if numbers else "left", min_width=max(len(row[index]) for row in rows))
    for row in rows:
        shown.add_row(*row)
    OUT.print(shown)


def parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """The command line that all benchmarks have; the result file is ``results/NAME.json`` beside this module."""
    made = argparse.ArgumentParser(description=(doc or "").strip().splitlines()[0])
    default = Path(__file__).parent / "results" / f"{name}.json"
    made.add_argument("--output", type=Path, default=default, help=f"the result file (default results/{name}.json)")
    made.add_argument("--timeout", type=float, default=600.0, help="seconds one measurement may take (default 600)")
    return made


def finish(output: Path, name: str, settings: dict[str, Any], results: dict[str, Any], noise: OtherCpu) -> None:
    """Say how quiet the machine was, and write the result file."""
    others = noise.percent()
    OUT.print(f"Other processes used {others:.1f} % of the machine's CPU time during the run.")
    if others > NOISE_PERCENT:
        OUT.print(f"[bold red]NOISY: that is more than {NOISE_PERCENT:.0f} %. Do not quote these times.[/]")
    packages = {package: version(package) for package in ("torch", "diffusers", "safetensors", "vitrail")}
    machine = {"cpu": cpu_model(), "cores": os.cpu_count(), "python": platform.python_version(), **packages}
    document = {
        "benchmark": name,
        "date": datetime.date.today().isoformat(),
        "machine": machine,
        "settings": settings,
        "other_cpu_percent": round(others, 2),
        "noisy": others > NOISE_PERCENT,
        **results,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
