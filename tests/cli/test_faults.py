"""A rank that dies, raises or runs out of memory ends the run, soon, with its own error; Ctrl-C leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.command import environment

# A stand-in for a fault on one rank: Python imports sitecustomize before anything else.
FAULT = """
import os, sys
if os.environ.get("RANK") == "1":
    import threading, time
    def strike():
        while "vitrail.apply.flight" not in sys.modules:
            time.sleep(0.01)
        flight = sys.modules["vitrail.apply.flight"]
        while not hasattr(flight, "FLIGHT"):
            time.sleep(0.01)
        original = flight.Flight.enter_step
        def enter_step(self):
            if self.step == 2:
                {fault}
            original(self)
        flight.Flight.enter_step = enter_step
    threading.Thread(target=strike, daemon=True).start()
"""


def start(folder: Path, fault: str | None, *arguments: str) -> subprocess.Popen[str]:
    changes = {}
    if fault is not None:
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(FAULT.format(fault=fault))
        changes = {"PYTHONPATH": str(folder / "site")}
    return subprocess.Popen(
        [sys.executable, "-m", "vitrail", "generate", "-p", "a red apple", "--tp", "2", "--device", "cpu", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**changes),
        start_new_session=True,
    )


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def wait_for(condition: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "fault, said",
    [
        ("os.kill(os.getpid(), 9)", "error: rank 1 was ended by signal 9 (SIGKILL)"),
        ("raise ZeroDivisionError('one over none')", "error: rank 1: ZeroDivisionError: one over none"),
        ("raise MemoryError()", "error: rank 1: out of memory: MemoryError"),
        ("import torch; torch.empty(2**60)", "error: rank 1: out of memory: "),
        ("os._exit(5)", "error: rank 1: ended with exit code 5"),
    ],
)
def test_the_failing_ranks_own_error_is_shown(tmp_path: Path, fault: str, said: str) -> None:
    process = start(tmp_path, f"open('struck', 'w').close(); {fault}")
    wait_for(lambda: (tmp_path / "struck").exists() or process.poll() is not None)
    children = family(process)
    struck = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - struck < 10, "within ten seconds"
    assert process.returncode == 1
    assert out == ""
    assert said in err
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, err
    assert "Connection" not in err, "the other rank's loss of touch is not the error"
    wait_for(lambda: not any(child.is_running() and child.status() != "zombie" for child in children), 10)
    assert not (tmp_path / "vitrail.png").exists()


@pytest.mark.parametrize("number, to_group", [(signal.SIGINT, True), (signal.SIGINT, False), (signal.SIGTERM, False)])
def test_an_interrupt_leaves_no_process_behind(tmp_path: Path, number: signal.Signals, to_group: bool) -> None:
    process = start(tmp_path, None, "--steps", "100000")
    wait_for(lambda: len(family(process)) >= 2)
    time.sleep(4)  # into the imports or the loop, wherever that is
    children = family(process)
    (os.killpg if to_group else os.kill)(process.pid, number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert out == ""
    assert "Traceback" not in err
    wait_for(lambda: not any(child.is_running() and child.status() != "zombie" for child in children), 10)


def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, None, "--steps", "100000")
    wait_for(lambda: len(family(process)) >= 2)
    time.sleep(6)
    children = family(process)
    process.kill()
    process.communicate()
    wait_for(lambda: not any(child.is_running() and child.status() != "zombie" for child in children), 10)
