"""A PyTorch `neuron` device for machines that have no AWS Trainium, with the real device's rules.

Importing this package does nothing and costs nothing: `import torch` registers the device by itself (see `boot`).
"""

TYPE_CHECKING = False  # typing takes milliseconds to import, and this file is read at every start

if TYPE_CHECKING:
    from neuron_sim.boot import register
    from neuron_sim.counting import Counts, counts, reset_counts
    from neuron_sim.device.memory import set_memory_capacity
    from neuron_sim.errors import ConfigurationError, NeuronRuleError, NeuronRuleWarning, NeuronSimError

__version__ = "0.1.0"

__all__ = [
    "ConfigurationError",
    "Counts",
    "NeuronRuleError",
    "NeuronRuleWarning",
    "NeuronSimError",
    "__version__",
    "counts",
    "register",
    "reset_counts",
    "set_memory_capacity",
]

_HOMES = {
    "ConfigurationError": "errors",
    "Counts": "counting",
    "NeuronRuleError": "errors",
    "NeuronRuleWarning": "errors",
    "NeuronSimError": "errors",
    "counts": "counting",
    "register": "boot",
    "reset_counts": "counting",
    "set_memory_capacity": "device.memory",
}


def __getattr__(name: str) -> object:
    # Lazy, because neuron_sim.pth imports this package at every start of the interpreter.
    if name not in _HOMES:
        raise AttributeError(f"module 'neuron_sim' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"neuron_sim.{_HOMES[name]}"), name)
