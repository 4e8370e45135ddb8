"""Makes PyTorch know the device: name, module, methods, hooks. What can fail was checked before, in `boot`."""

import torch

from neuron_sim import _core, policy, printing, runtime
from neuron_sim.runtime import configuration_problem

__all__ = ["configuration_problem", "register_device"]


def register_device() -> None:
    """Register the `neuron` device. Once a process, because PrivateUse1 can be renamed only once."""
    import neuron_sim.device

    _core.connect(runtime.start, runtime.would_count, policy.on_event, policy.classify)
    torch.utils.rename_privateuse1_backend("neuron")
    _core.register_device()
    torch._register_device_module("neuron", neuron_sim.device)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    printing.install()
    register_process_group()


def register_process_group() -> None:
    """Register the process-group backend `neuron`, where this torch has distributed."""
    if not torch.distributed.is_available():
        return
    from neuron_sim import distributed

    distributed.register()
