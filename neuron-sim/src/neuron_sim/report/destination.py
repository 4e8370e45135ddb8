"""Where a process writes its report: NEURON_SIM_REPORT."""

import os
from pathlib import Path

from neuron_sim import env
from neuron_sim.errors import ConfigurationError


def path() -> Path | None:
    """This process's file; None when no report was asked for.

    A name with a slash at its end is a folder, with one file a process. Otherwise it is the file of the first rank and
    of a program without ranks; the other ranks' files lie beside it.
    """
    wish = env.NEURON_SIM_REPORT.read()
    if wish is None:
        return None
    if wish.endswith(os.sep):
        return Path(wish, f"process-{os.getpid()}.json")
    rank = os.environ.get("RANK", "0")
    file = Path(wish)
    return file if rank == "0" else file.with_name(f"{file.stem}.rank{rank}{file.suffix}")


def check() -> None:
    """Raises `ConfigurationError` when the report could not be written at the end, before the work is done."""
    file = path()
    if file is None:
        return
    try:
        if file.is_dir():
            raise IsADirectoryError(f"{file} is a folder; a / at its end asks for one file a process in it")
        writable = file if file.exists() else file.parent
        if not file.parent.is_dir():
            raise NotADirectoryError(f"{file.parent} is no folder")
        if not os.access(writable, os.W_OK):
            raise PermissionError(f"{writable} cannot be written to")
    except OSError as error:
        raise ConfigurationError(
            f"{env.NEURON_SIM_REPORT.name}={os.environ[env.NEURON_SIM_REPORT.name]!r}: the report cannot be written: "
            f"{error}; accepted: {env.NEURON_SIM_REPORT.accepts}"
        ) from error
