"""Streams and events. Work runs when it is issued: a stream is a name for an order, an event a time on the host."""

from types import TracebackType
from typing import Any

import torch

from neuron_sim import _core
from neuron_sim.device.cores import DeviceLike, core_index


class _OnNeuron(type):
    """Makes PyTorch's own streams and events of the device instances of `torch.neuron.Stream` and `.Event`.

    PyTorch 2.13 takes no subclass of `torch.Event` where it wants an event, so both classes here return its own.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        kind = cls.__mro__[1]
        return type(instance) is kind and instance.device.type == "neuron"  # type: ignore[attr-defined]


class Stream(torch.Stream, metaclass=_OnNeuron):
    """A stream of a core, the current one unless named. `torch.Stream`'s methods, `record_event` among them, apply."""

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **kwargs: Any) -> "Stream":
        if kwargs:  # stream_id, device_index and device_type: a stream that exists
            return torch.Stream(priority=priority, **kwargs)  # type: ignore[return-value]  # see _OnNeuron
        return torch.Stream(torch.device("neuron", core_index(device)), priority=priority)  # type: ignore[return-value]


class Event(torch.Event, metaclass=_OnNeuron):
    """A point in a stream.

    `elapsed_time` gives milliseconds between two events; both must have been created with `enable_timing=True` and
    recorded (ValueError otherwise) on one device.
    """

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> "Event":
        return torch.Event(  # type: ignore[return-value]  # see _OnNeuron
            torch.device("neuron"), enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )


class stream:
    """Context manager that makes a stream current, and its core. None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self._previous: torch.Stream | None = None
        self._core = -1

    def __enter__(self) -> None:
        if self.stream is not None:
            self._core = _core.exchange_core(self.stream.device.index)
            self._previous = current_stream(self.stream.device)
            torch.accelerator.set_stream(self.stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            torch.accelerator.set_stream(self._previous)
            _core.exchange_core(self._core)


def current_stream(device: DeviceLike = None) -> torch.Stream:
    """The current stream of a core. Raises ValueError for a core that is not there."""
    return torch.accelerator.current_stream(_checked(device))


def default_stream(device: DeviceLike = None) -> Stream:
    """The stream that is current when no other was made so."""
    current = current_stream(device)
    return Stream(stream_id=0, device_index=current.device_index, device_type=current.device_type)


def set_stream(stream: torch.Stream | None) -> None:
    """Make a stream current, and its core. None changes nothing."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


def synchronize(device: DeviceLike = None) -> None:
    """Wait for a core. All work is done already; the wait is counted as a host synchronisation."""
    torch.accelerator.synchronize(_checked(device))


def _checked(device: DeviceLike) -> int:
    core = core_index(device)
    _core.memory_stats(core)  # raises ValueError for a core that is not there
    return core
