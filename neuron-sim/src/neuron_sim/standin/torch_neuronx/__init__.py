"""The stand-in that neuron-sim answers with when `torch_neuronx` is imported and the real one is not installed."""

from neuron_sim._metadata import VERSION as __version__

__all__ = ["__version__", "clear_op_tracking", "get_executed_ops", "get_fallback_ops"]


def _autoload() -> None:
    """The real package's entry point; here the device is registered by neuron-sim's own."""


def get_executed_ops() -> list[str]:
    """Operators that ran on the device since the start or the last `clear_op_tracking`, by name, sorted."""
    from neuron_sim.counting import counts

    return sorted(counts().executed)


def get_fallback_ops() -> list[str]:
    """Operators that ran on the host because the device has no kernel for them, by name, sorted."""
    from neuron_sim.counting import counts

    return sorted(counts().fallen_back)


def clear_op_tracking() -> None:
    """Forget the operators that ran."""
    from neuron_sim.counting import reset_counts

    reset_counts()


# Last: it imports torch, whose autoload may come back to this module, which must be whole by then.
from neuron_sim import boot as _boot  # noqa: E402

_boot.register()
