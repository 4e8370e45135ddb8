"""Memory of the cores: what tensors hold. The native backend caches nothing it would report, so `reserved` is 0."""

from collections import OrderedDict

from neuron_sim import _core
from neuron_sim.device.cores import DeviceLike, core_index
from neuron_sim.env import parse_bytes


def memory_stats(device: DeviceLike = None) -> "OrderedDict[str, int]":
    """Statistics under PyTorch's usual names, in their order. Raises ValueError for a core that is not there."""
    now = _core.memory_stats(core_index(device))
    stats: OrderedDict[str, int] = OrderedDict()
    for kind, current in (
        ("active", "blocks"),
        ("active_bytes", "bytes"),
        ("allocated_bytes", "bytes"),
        ("allocation", "blocks"),
    ):
        stats[f"{kind}.all.allocated"] = now[f"allocated_{current}"]
        stats[f"{kind}.all.current"] = now[current]
        stats[f"{kind}.all.freed"] = now[f"freed_{current}"]
        stats[f"{kind}.all.peak"] = now[f"peak_{current}"]
    stats["num_ooms"] = now["ooms"]
    for moment in ("allocated", "current", "freed", "peak"):
        stats[f"reserved_bytes.all.{moment}"] = 0
    return stats


def memory_allocated(device: DeviceLike = None) -> int:
    """Bytes held by tensors now."""
    return _core.memory_stats(core_index(device))["bytes"]


def max_memory_allocated(device: DeviceLike = None) -> int:
    """The most bytes held by tensors since the start or the last `reset_peak_memory_stats`."""
    return _core.memory_stats(core_index(device))["peak_bytes"]


def memory_reserved(device: DeviceLike = None) -> int:
    """Always 0, as the native backend reports it."""
    _core.memory_stats(core_index(device))
    return 0


def max_memory_reserved(device: DeviceLike = None) -> int:
    """Always 0, as the native backend reports it."""
    return memory_reserved(device)


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Let the peak start again from what is held now."""
    core = core_index(device)
    _core.memory_stats(core)
    _core.reset_peak_stats(core)


def reset_max_memory_allocated(device: DeviceLike = None) -> None:
    """The older name of `reset_peak_memory_stats`."""
    reset_peak_memory_stats(device)


def reset_accumulated_memory_stats(device: DeviceLike = None) -> None:
    """Let the sums of what was allocated and freed start again."""
    core = core_index(device)
    _core.memory_stats(core)
    _core.reset_accumulated_stats(core)


def empty_cache() -> None:
    """Nothing is cached, so nothing happens."""


def memory_summary(device: DeviceLike = None, abbreviated: bool = False) -> str:  # noqa: ARG001  torch.cuda's signature
    """What a core holds, to be read by people."""
    core = core_index(device)
    now = _core.memory_stats(core)
    rows = [
        ("capacity", now["capacity"]),
        ("allocated", now["bytes"]),
        ("peak allocated", now["peak_bytes"]),
        ("reserved", 0),
    ]
    lines = [f"neuron:{core} memory (simulated)"]
    lines += [f"  {name:<16}{size:>18,} bytes  {size / 2**30:>10.3f} GiB" for name, size in rows]
    lines += [f"  {'tensors':<16}{now['blocks']:>18,}", f"  {'out of memory':<16}{now['ooms']:>18,} times"]
    return "\n".join(lines)


def set_memory_capacity(size: int | str, device: DeviceLike = None) -> None:
    """Set a core's memory, in bytes or as "24GiB". What is already allocated stays.

    Not part of the native backend's module. Raises ValueError for what is no positive size.
    """
    core = core_index(device)
    _core.memory_stats(core)
    _core.set_capacity(core, parse_bytes(size) if isinstance(size, str) else size)
