"""The start of the simulated runtime: the environment is read when the device is first used, not at import."""

import threading
from dataclasses import dataclass

from neuron_sim import claims, env, policy
from neuron_sim.errors import ConfigurationError
from neuron_sim.instances import Instance, instance

MAX_CORES = 127  # the real runtime's limit is 128; PyTorch counts devices in a signed byte


@dataclass(frozen=True)
class Machine:
    """What this process sees of which instance."""

    instance: Instance
    logical_nc_config: int
    cores: tuple[int, ...]
    bytes_per_core: int


def read_machine() -> Machine:
    """The machine that the environment describes now.

    Raises `ConfigurationError` for a malformed variable, an unknown instance, cores that the instance does not have,
    and more cores than a process can see.
    """
    simulated = instance(env.NEURON_SIM_INSTANCE.read())
    config = env.LOGICAL_NC_CONFIG.read() or simulated.logical_nc_config
    if simulated.cores_per_chip % config:
        raise ConfigurationError(f"{env.LOGICAL_NC_CONFIG.name}={config} does not divide {simulated.name}'s cores")
    there = simulated.logical_cores(config)
    cores = env.VISIBLE_CORES.read()
    if cores is None:
        cores = tuple(range(env.NUM_CORES.read() or min(there, MAX_CORES + 1)))
    if missing := [core for core in cores if core >= there]:
        name = env.VISIBLE_CORES.name if env.VISIBLE_CORES.is_set() else env.NUM_CORES.name
        raise ConfigurationError(
            f"{name} asks for core {missing[0]}, but {simulated.name} has {there} logical cores, numbered from 0 "
            f"({env.LOGICAL_NC_CONFIG.name}={config})"
        )
    if len(cores) > MAX_CORES:
        raise ConfigurationError(
            f"{simulated.name} shows {len(cores)} or more cores to this process, which can use {MAX_CORES} at most; "
            f"name fewer in {env.VISIBLE_CORES.name} or {env.NUM_CORES.name}"
        )
    memory = env.NEURON_SIM_MEMORY.read() or simulated.bytes_per_core(config)
    return Machine(simulated, config, cores, memory)


_lock = threading.RLock()
_machine: Machine | None = None
_pending_seed: int | None = None


def machine() -> Machine:
    """The machine in use; before the first use, the one the environment describes now."""
    return _machine or read_machine()


def start() -> None:
    """Start the runtime. Called by the core when the device is first used.

    Raises `ConfigurationError` for any malformed variable and what `read_machine` raises; `NeuronSimError` when
    another process has a core that NEURON_RT_VISIBLE_CORES names.
    """
    global _machine, _pending_seed
    from neuron_sim import _core

    with _lock:
        if _core.is_started():
            return
        for variable in env.ALL:
            variable.read()
        found = read_machine()
        rules = policy.current()
        if env.VISIBLE_CORES.is_set() and not claims.assigned:
            claims.claim(found.cores)
        if env.NEURON_SIM_REPORT.is_set():
            from neuron_sim.report import destination

            destination.check()
        _machine = found
        _core.configure([found.bytes_per_core] * len(found.cores))
        _core.watch(rules.watches())
        if env.NEURON_SIM_REPORT.is_set():
            from neuron_sim.report import recorder

            recorder.begin()
        if _pending_seed is not None:
            seed, _pending_seed = _pending_seed, None
            seed_all(seed)


def would_count() -> int:
    """How many cores the process would see if it started the runtime now. Called by the core."""
    return len(read_machine().cores)


def seed_all(seed: int) -> None:
    """Seed every core; before the start, remember the seed, because seeding must not start the runtime."""
    global _pending_seed
    from neuron_sim import _core

    if not _core.is_started():
        _pending_seed = seed
        return
    for core in range(_core.core_count()):
        _core.default_generator(core).manual_seed(seed)
