"""Random numbers. Each core has a generator that gives the host's numbers for the same seed."""

import torch

from neuron_sim import _core
from neuron_sim.device.cores import DeviceLike, core_index


def _generator(device: DeviceLike = None) -> torch.Generator:
    return _core.default_generator(core_index(device))


def manual_seed(seed: int) -> None:
    """Seed the current core's generator."""
    _generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed every core's generator; before the device is first used, when it is."""
    from neuron_sim import runtime

    runtime.seed_all(int(seed))


def seed() -> None:
    """Seed the current core's generator with a random number."""
    _generator().seed()


def seed_all() -> None:
    """Seed every core's generator with one random number."""
    manual_seed_all(_generator().seed())


def initial_seed() -> int:
    """The seed of the current core's generator."""
    return _generator().initial_seed()


def get_rng_state(device: DeviceLike = "neuron") -> torch.Tensor:
    """A generator's state, a tensor of bytes on the host."""
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = "neuron") -> None:
    """Set a generator's state to one that `get_rng_state` returned."""
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """The states of all cores' generators."""
    _core.ensure_ready()
    return [get_rng_state(core) for core in range(_core.core_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    """Set the states of the cores' generators, in order."""
    for core, state in enumerate(new_states):
        set_rng_state(state, core)
