"""The command line, as a person meets it: a subprocess, its exit code, and what it says where."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

TIMEOUT_SECONDS = 180


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without what makes a process a rank."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    return {**kept, "NO_COLOR": "1", "COLUMNS": "200", **changes}


def vitrail(*arguments: str, cwd: Path, stdin: str = "", **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vitrail", *arguments],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env=environment(**changes),
        check=False,
    )


def pixels(path: Path | str) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def difference(one: Path | str, other: Path | str) -> int:
    """The largest difference of any channel of any pixel, in steps of 1/255."""
    return int(np.abs(pixels(one) - pixels(other)).max())
