"""What `neuron-sim check` was asked, checked before anything is built."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from neuron_sim import env
from neuron_sim.errors import ConfigurationError
from neuron_sim.instances import Instance, instance
from neuron_sim.profiles import profile

_SIZE = re.compile(r"([1-9]\d{0,4})[xX×]([1-9]\d{0,4})")
_SET = re.compile(r"([A-Za-z_]\w*)=(\d+)")
DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class Options:
    """A check: `width` and `height` in pixels, `tp` the degree, `sizes` what inputs measure, by name, over what the
    picture gives (`text=512`, `rows=64`, `frames=1`)."""

    model: str
    instance: Instance
    logical_nc_config: int
    tp: int
    width: int
    height: int
    dtype: str
    profile: str
    config: Path | None = None
    whole: bool = False
    no_fallbacks: bool = False
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def capacity_bytes(self) -> int:
        """The memory of one logical core; NEURON_SIM_MEMORY's where that is set."""
        return env.NEURON_SIM_MEMORY.read() or self.instance.bytes_per_core(self.logical_nc_config)


def read(
    model: str,
    *,
    instance_name: str | None = None,
    tp: int = 1,
    size: str = "1024x1024",
    dtype: str = "bfloat16",
    profile_name: str | None = None,
    config: str | None = None,
    whole: bool = False,
    no_fallbacks: bool = False,
    sizes: tuple[str, ...] = (),
) -> Options:
    """The options of a command line. Raises `ConfigurationError`, in one line, for what cannot be."""
    there = instance(instance_name or env.NEURON_SIM_INSTANCE.read())
    profile_name = profile(profile_name or env.NEURON_SIM_PROFILE.read()).name
    cores = env.LOGICAL_NC_CONFIG.read() or there.logical_nc_config
    if there.cores_per_chip % cores:
        raise ConfigurationError(f"{env.LOGICAL_NC_CONFIG.name}={cores} does not divide {there.name}'s cores")
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise ConfigurationError(f"--size {size!r} is not a size; give width and height in pixels, as in 1024x1024")
    if dtype not in DTYPES:
        raise ConfigurationError(f"--dtype {dtype!r} is unknown; known: {', '.join(DTYPES)}")
    if tp < 1:
        raise ConfigurationError(f"--tp {tp}: the degree must be at least 1")
    available = there.logical_cores(cores)
    if tp > available:
        raise ConfigurationError(f"--tp {tp}: {there.name} has {available} logical cores; --tp {available} is the most")
    if problem := there.group_problem(range(tp), cores):
        raise ConfigurationError(f"--tp {tp} does not route on {there.name}: {problem}")
    return Options(
        model, there, cores, tp, int(match[1]), int(match[2]), dtype, profile_name,
        Path(config) if config is not None else None, whole, no_fallbacks, dict(map(_named_size, sizes)),
    )  # fmt: skip


def _named_size(text: str) -> tuple[str, int]:
    match = _SET.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(f"--set {text!r} is not NAME=NUMBER, as in text=512")
    return match[1], int(match[2])
