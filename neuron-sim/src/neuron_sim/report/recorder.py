"""Collects in the program's process, and writes at its end, also at an exception, SIGTERM or `os._exit`."""

import atexit
import json
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from neuron_sim.errors import ConfigurationError, NeuronRuleError
from neuron_sim.location import Location
from neuron_sim.report import destination, termination

FORMAT = "neuron-sim report 1"
OUT_OF_MEMORY = "NRT allocation failed"

_started: float | None = None
_pid = 0
_ended: dict[str, Any] = {"how": "finished"}


def begin() -> None:
    """Start to collect. Called when the device is first used, after `destination.check`. Idempotent."""
    global _started, _pid
    if _started is not None:
        return
    from neuron_sim import counting

    _started, _pid = time.time(), os.getpid()
    counting.locate_syncs(True)
    atexit.register(write)
    _watch_exceptions()
    _watch_quick_exit()
    termination.watch(_write_terminated)


def _watch_exceptions() -> None:
    original = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _ended.update(
            how="exception", type=kind.__name__, message=_first_lines(str(error)), refusal=refusal_behind(error)
        )
        original(kind, error, trace)

    sys.excepthook = hook


def _watch_quick_exit() -> None:
    """Ranks of a run often end by `os._exit`, to wait for nobody, and that runs no function at exit."""
    original = os._exit

    def write_and_exit(status: int) -> NoReturn:
        write()
        original(status)

    os._exit = write_and_exit


def refusal_behind(error: BaseException) -> str | None:
    """The device's refusal that an exception is or was raised because of, or None for the program's own failure."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        if isinstance(at, NeuronRuleError | ConfigurationError) or str(at).startswith(OUT_OF_MEMORY):
            return _first_lines(str(at))
        seen.add(id(at))
        # Dynamo raises its own error for a compiler's, and keeps that one inside.
        at = getattr(at, "inner_exception", None) or at.__cause__ or at.__context__
    return None


def _first_lines(message: str) -> str:
    return message[:2000]


def _write_terminated(name: str) -> None:
    _ended.update(how="signal", signal=name)
    write()


def write() -> None:
    """Write the report, whole or not at all. What goes wrong is told on stderr: nobody would catch it at the end."""
    if os.getpid() != _pid:
        return  # a child that was forked: the device is its parent's
    file = destination.path()
    if file is None:
        return
    try:
        save(file, json.dumps(collect(), indent=2) + "\n")
    except OSError as error:
        print(f"neuron-sim: the report could not be written to {file}: {error}", file=sys.stderr)


def save(file: Path, text: str) -> None:
    """Write a file under another name and rename it. May raise OSError."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}.new")
    try:
        unfinished.write_text(text, "utf-8")
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)


def collect() -> dict[str, Any]:
    """What this process did on the device until now, as data for JSON."""
    import torch

    import neuron_sim
    from neuron_sim import collectives, counting, opcache, policy, runtime

    machine, book, counts, cache = runtime.machine(), policy.current(), counting.counts(), opcache.current()
    return {
        "format": FORMAT,
        "versions": {"neuron-sim": neuron_sim.__version__, "torch": torch.__version__},
        "profile": book.profile.name,
        "strictness": book.strictness,
        "settings": book.settings,
        "instance": machine.instance.name,
        "process": {
            "pid": os.getpid(),
            "rank": int(rank) if (rank := os.environ.get("RANK", "")).isdigit() else None,
            "seconds": round(time.time() - (_started or time.time()), 3),
            "ended": dict(_ended),
            "host_peak_bytes": _peak_of_host(),
            "memory": _memory(machine.cores),
        },
        "operators": {"native": counts.executed, "fallen_back": counts.fallen_back},
        "programs": {
            "compiled": cache.compiles,
            "disk_hits": cache.disk_hits,
            "memory_hits": counts.cache_hits,
            "rewritten": cache.rewritten,
            "disk": str(cache.disk.folder) if cache.disk else None,
            "by_operator": counts.compiled,
        },
        "compiler": _compiler(),
        "rules": [
            {
                "rule": event.rule,
                "action": book.actions[event.rule],
                "op": event.op,
                **_place(event.where),
                "count": count,
                "message": book.details[event],
            }
            for event, count in book.events.most_common()
        ]
        + _collective_rules(book.strictness),
        "host_syncs": {
            "by_kind": {kind: count for kind, count in counts.host_syncs.items() if count},
            "by_line": [
                {"kind": kind, **_place(where), "count": count}
                for (kind, where), count in sorted(counting.sync_lines().items(), key=lambda item: -item[1])
            ],
        },
        "collectives": {found.name: {"calls": found.calls, "bytes": found.bytes} for found in collectives.counts()},
    }


def _compiler() -> dict[str, Any] | None:
    """The graphs that were compiled; None where the compiler was never asked."""
    record = sys.modules.get("neuron_sim.compile.record")
    return record.as_data() if record is not None else None


def _collective_rules(strictness: str) -> list[dict[str, Any]]:
    """The rules of collectives that applied, which are counted where the collectives are."""
    from neuron_sim import collectives

    entries = []
    for (rule, op, where), found in collectives.applied().items():
        action = "tell" if collectives.rules()[rule].tells and strictness != "raise" else "refuse"
        said = {"count": found.count, "message": found.message}
        entries.append({"rule": rule, "action": action, "op": op, **_place(where), **said})
    return entries


def _place(where: Location) -> dict[str, Any]:
    return {"file": where.file, "line": where.line, "via": where.via}


def _memory(cores: tuple[int, ...]) -> list[dict[str, int]]:
    from neuron_sim import _core

    found = []
    for index, core in enumerate(cores):
        stats = _core.memory_stats(index)
        if stats["allocated_blocks"] or stats["ooms"]:
            found.append(
                {
                    "core": core,
                    "peak_bytes": stats["peak_bytes"],
                    "capacity_bytes": stats["capacity"],
                    "out_of_memory": stats["ooms"],
                }
            )
    return found


def _peak_of_host() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
