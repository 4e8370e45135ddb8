"""What others import from the native backend's compiler. Its backend is `neuron_backend`; it imports Dynamo."""

from typing import Any

_model_name: str | None = None


def set_model_name(name: str | None) -> None:
    """Name the model that is compiled next, for reports. The cache's keys do not have it: equal graphs are equal."""
    global _model_name
    _model_name = name


def get_model_name() -> str | None:
    """The name set last."""
    return _model_name


def get_fallback_ops() -> list[str]:
    """Operators that ran on the host because the device has no kernel for them, by name, sorted."""
    from neuron_sim.counting import counts

    return sorted(counts().fallen_back)


def __getattr__(name: str) -> Any:
    if name != "neuron_backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from neuron_sim.compile.backend import neuron

    return neuron
