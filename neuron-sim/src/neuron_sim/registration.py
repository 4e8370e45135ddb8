"""Makes PyTorch know the device: name, module, methods, hooks. What can fail was checked before, in `boot`."""

from typing import TYPE_CHECKING

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from neuron_sim import _core, exiting, printing

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, _DistributedBackendOptions


def register_device() -> None:
    """Register the `neuron` device. Once a process, because PrivateUse1 can be renamed only once."""
    import neuron_sim.device

    _core.connect(_start, _would_count, _on_event, _classify, _before_compile, _compiled, _on_sync)
    rename_privateuse1_backend("neuron")
    _core.register_device()
    torch._register_device_module("neuron", neuron_sim.device)  # type: ignore[no-untyped-call]
    generate_methods_for_privateuse1_backend(for_storage=True)
    printing.install()
    exiting.install()
    register_process_group()
    honour_backend_contexts()


def honour_backend_contexts() -> None:
    """Let `torch.compile` turn Dynamo's automatic dynamic shapes off for the backend `neuron`."""
    from neuron_sim.compile import static_shapes

    static_shapes.honour_backend_contexts()


def register_process_group() -> None:
    """Register the process-group backend `neuron`, where this torch has distributed.

    Uses `Backend.register_backend` with its extended interface, which tells the ranks of a group; tested on torch 2.13.
    """
    dist = torch.distributed
    if dist.is_available() and "neuron" not in dist.Backend.backend_list:
        dist.Backend.register_backend("neuron", _make_group, extended_api=True, devices=["neuron"])


# What the core and PyTorch call. Each imports what it needs when it is first called, because none of it is needed by
# a program that imports torch and never uses the device.


def _start() -> None:
    from neuron_sim import runtime

    runtime.start()


def _would_count() -> int:
    from neuron_sim import runtime

    return runtime.would_count()


def _on_event(rule: str, op: str, detail: str) -> None:
    from neuron_sim import policy

    policy.current().apply(rule, op, detail)


def _classify(op: str) -> tuple[bool, bool, bool]:
    from neuron_sim import policy

    return policy.current().classify(op)


def _before_compile(op: str, signature: str) -> None:
    from neuron_sim import policy

    policy.current().look_at(op, signature)


def _compiled(op: str, signature: str) -> None:
    from neuron_sim import opcache

    opcache.current().compiled(op, signature)


def _on_sync(kind: str) -> None:
    from neuron_sim import counting

    counting.located(kind)


def _make_group(options: "_DistributedBackendOptions", _: object) -> "Backend":
    from neuron_sim import distributed

    return distributed.create(options)
