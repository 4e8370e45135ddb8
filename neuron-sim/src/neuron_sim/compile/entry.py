"""The entry point `neuron` of the group torch_dynamo_backends: the real backend's where there is one, else ours."""

from importlib.metadata import entry_points
from typing import Any

from neuron_sim import boot


def _choose() -> Any:
    if boot.real_backend():
        for point in entry_points(group="torch_dynamo_backends", name="neuron"):
            if not point.value.startswith("neuron_sim."):
                return point.load()
    from neuron_sim.compile import backend

    return backend.neuron


neuron = _choose()
