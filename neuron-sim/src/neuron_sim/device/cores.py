"""Cores: which there are, and which one is current in this thread."""

from typing import Any, NamedTuple

import torch

from neuron_sim import _core

DeviceLike = torch.device | str | int | None


class DeviceProperties(NamedTuple):
    """What `get_device_properties` returns: the instance's family and a core's memory in bytes."""

    name: str
    total_memory: int


def core_index(device: DeviceLike = None) -> int:
    """The core that a device, a string or a number stands for; the current one for None or `"neuron"`.

    Raises ValueError for another kind of device. Whether the core exists is asked where it is used.
    """
    if device is None:
        return _core.current_core()
    if isinstance(device, int):
        return device
    named = torch.device(device)
    if named.type != "neuron":
        raise ValueError(f"expected a neuron device, found {str(named)!r}")
    return _core.current_core() if named.index is None else named.index


def is_available() -> bool:
    """Whether there is a core to use. Never raises: a configuration that cannot be read shows none."""
    return _core.core_count() > 0


def is_initialized() -> bool:
    """Whether this process has used the device."""
    return _core.is_started()


def init() -> None:
    """Start the runtime, which reads the environment. Raises `ConfigurationError` when that is malformed."""
    _core.ensure_ready()


def lazy_init() -> None:
    """What PyTorch calls before it uses the device."""
    _core.ensure_ready()


def is_in_bad_fork() -> bool:
    """Whether this process was forked from one that had used the device, and so cannot use it."""
    return _core.in_bad_fork()


def device_count() -> int:
    """How many cores this process sees. Raises `ConfigurationError` when the environment is malformed."""
    if _core.is_started() or _core.in_bad_fork():
        return _core.core_count()
    from neuron_sim import runtime  # here, as everywhere in this package: not needed to import torch

    return runtime.would_count()


def current_device() -> int:
    """The current core of this thread."""
    return _core.current_core()


def set_device(device: DeviceLike) -> None:
    """Make a core current. Raises ValueError for one that is not there; a negative number changes nothing."""
    _core.exchange_core(core_index(device))


class device:
    """Context manager that makes a core current. None or a negative number changes nothing."""

    def __init__(self, device: DeviceLike) -> None:
        self.idx = -1 if device is None else core_index(device)
        self.prev_idx = -1

    def __enter__(self) -> "device":
        self.prev_idx = _core.exchange_core(self.idx)
        return self

    def __exit__(self, *_: object) -> None:
        _core.exchange_core(self.prev_idx)


class device_of(device):
    """Context manager that makes a tensor's core current, if the tensor is on the device."""

    def __init__(self, tensor: Any) -> None:
        super().__init__(tensor.device.index if tensor.device.type == "neuron" else None)


def get_device_name(device: DeviceLike = None) -> str:
    """`"neuron:N"`, as the native backend has it. Raises ValueError for a core that is not there."""
    return f"neuron:{_existing(device)}"


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    """The instance's family ("trn2") and the core's memory. Raises ValueError for a core that is not there."""
    from neuron_sim import runtime

    core = _existing(device)
    return DeviceProperties(runtime.machine().instance.family, _core.memory_stats(core)["capacity"])


def _existing(device: DeviceLike) -> int:
    core = core_index(device)
    if not 0 <= core < device_count():
        raise ValueError(f"invalid neuron device index {core}: this process sees {device_count()} core(s)")
    return core
