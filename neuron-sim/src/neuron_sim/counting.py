"""What a program did on the device: operators dispatched and host synchronisations."""

from dataclasses import dataclass

from neuron_sim import _core


@dataclass(frozen=True)
class Counts:
    """Calls of each operator, on the device and fallen back, and host synchronisations by kind."""

    executed: dict[str, int]
    fallen_back: dict[str, int]
    host_syncs: dict[str, int]


def counts() -> Counts:
    """What was counted since the start or the last `reset_counts`."""
    ops = sorted(_core.op_counts())
    return Counts(
        executed={name: calls for name, calls, falls_back in ops if not falls_back},
        fallen_back={name: calls for name, calls, falls_back in ops if falls_back},
        host_syncs=_core.sync_counts(),
    )


def reset_counts() -> None:
    """Set every count to zero."""
    _core.reset_counts()
