"""What a program did on the device: operators dispatched, programs compiled, host synchronisations."""

import threading
from collections import Counter
from dataclasses import dataclass, field

from neuron_sim import _core, env
from neuron_sim.location import Location, user_location


@dataclass(frozen=True)
class Counts:
    """Calls of each operator, on the device and fallen back, and host synchronisations by kind.

    `compiled` are the distinct programs of each operator, `cache_hits` the calls that found theirs in memory.
    Collectives have counts of their own (`neuron_sim.collectives`). With
    NEURON_LAUNCH_BLOCKING=1 every operator is a synchronisation (`launch`).
    """

    executed: dict[str, int]
    fallen_back: dict[str, int]
    host_syncs: dict[str, int]
    compiled: dict[str, int] = field(default_factory=dict)
    cache_hits: int = 0


def counts() -> Counts:
    """What was counted since the start or the last `reset_counts`."""
    ops = sorted(_core.op_counts(), key=lambda op: op["name"])
    syncs = _core.sync_counts()
    if env.LAUNCH_BLOCKING.read():
        syncs["launch"] = sum(op["calls"] for op in ops)
    return Counts(
        executed={op["name"]: op["calls"] for op in ops if not op["falls_back"]},
        fallen_back={op["name"]: op["calls"] for op in ops if op["falls_back"]},
        host_syncs=syncs,
        compiled={op["name"]: op["signatures"] for op in ops if op["signatures"]},
        cache_hits=sum(op["calls"] - op["signatures"] for op in ops if op["compiles"]),
    )


def reset_counts() -> None:
    """Set every count to zero."""
    _core.reset_counts()
    with _lock:
        _sync_lines.clear()


_lock = threading.Lock()
_sync_lines: Counter[tuple[str, Location]] = Counter()


def locate_syncs(on: bool) -> None:
    """Whether to note at which line the host waits. It costs microseconds each time, so only reports ask for it."""
    _core.locate_syncs(on)


def located(kind: str) -> None:
    """The host waits for the device. Called by the core while `locate_syncs` is on."""
    where = user_location()
    with _lock:
        _sync_lines[kind, where] += 1


def sync_lines() -> dict[tuple[str, Location], int]:
    """How often the host waited, by kind and line."""
    with _lock:
        return dict(_sync_lines)
