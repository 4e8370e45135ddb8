"""Every environment variable that neuron-sim reads, declared once.

A malformed value raises `ConfigurationError` when it is read, which is when the device is first used; `import torch`
only warns about it. Sources of the names: the public documentation of AWS TorchNeuron; NEURON_SIM_* are our own.
"""

import os
import re
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from neuron_sim.errors import ConfigurationError

T = TypeVar("T")


class Variable(Generic[T]):
    """One environment variable: how to read it, what it is when unset, and what it means."""

    # Not a dataclass: this module is read during `import torch`, and making one takes longer than all the rest here.
    def __init__(self, name: str, parse: Callable[[str], T], default: T, accepts: str, meaning: str) -> None:
        self.name = name
        self.parse = parse
        self.default = default
        self.accepts = accepts
        self.meaning = meaning

    def is_set(self) -> bool:
        """Whether the variable is in the environment and not empty."""
        return bool(os.environ.get(self.name))

    def read(self) -> T:
        """The value in the environment now. Raises `ConfigurationError` when it is malformed."""
        text = os.environ.get(self.name)
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            why = f" ({error})" if str(error) else ""
            raise ConfigurationError(f"{self.name}={text!r} cannot be read{why}; accepted: {self.accepts}") from error


def _choice(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError("unknown word")
        return text.lower()

    return parse


_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_FLAG = "1, true, yes, on, 0, false, no, off"


def _flag(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError("not a flag")
    return text.lower() in _TRUE


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("not positive")
    return value


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]+", text) or text.startswith("."):
        raise ValueError("not a name")
    return text


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError("negative, or without end")
    return value


_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "t": 10**12, "tb": 10**12}


def parse_bytes(text: str) -> int:
    """Bytes from "24GiB", "512 MiB", "1e9" or "4096". Raises ValueError for anything else, and for none at all."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError("not a number of bytes")
    size = float(match[1]) * _UNITS[match[2]]
    if not 1 <= size < 2**63:
        raise ValueError("not positive, or more than can be counted")
    return int(size)


def parse_cores(text: str) -> tuple[int, ...]:
    """Core numbers from "0", "0-2" or "0,2,5-7". Raises ValueError for ranges that run backwards and for repeats."""
    cores: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise ValueError(f"{part!r} is neither a number nor a range")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {part!r} runs backwards")
        cores.extend(range(first, last + 1))
    if len(set(cores)) != len(cores):
        raise ValueError("a core is named twice")
    return tuple(cores)


_BYTES = "a positive number of bytes, with or without a unit (24GiB, 512MiB, 1GB)"
_CORES = "core numbers and ranges (0, 0-2, 0,2,5-7)"

NEURON_SIM: Variable[str] = Variable(
    "NEURON_SIM", _choice("auto", "0", "1"), "auto", "auto, 0, 1",
    "0: never register the device. 1: register it also where CUDA or XPU is present. auto: only where they are not.",
)  # fmt: skip
NEURON_SIM_INSTANCE = Variable(
    "NEURON_SIM_INSTANCE", str, "trn2.48xlarge", "an instance type, or family:chips", "The machine to simulate.",
)  # fmt: skip
NEURON_SIM_PROFILE = Variable(
    "NEURON_SIM_PROFILE", str, "sdk-2.33", "a profile's name", "Which release's rules apply."
)  # fmt: skip
NEURON_SIM_MEMORY: Variable[int | None] = Variable(
    "NEURON_SIM_MEMORY", parse_bytes, None, _BYTES, "Memory of each core. Unset: the instance's.",
)  # fmt: skip
NEURON_SIM_STRICT = Variable(
    "NEURON_SIM_STRICT", _choice("warn", "raise", "off"), "warn", "warn, raise, off",
    "warn: as the real device, and what it does silently is told. raise: that is an error too. off: no rules.",
)  # fmt: skip
NEURON_SIM_MACHINE: Variable[str] = Variable(
    "NEURON_SIM_MACHINE", _name, "default", "letters, digits, dots, dashes and underscores",
    "The simulated machine a process is on: processes on one exclude each other from the cores they name.",
)  # fmt: skip
NEURON_SIM_CHECK_COLLECTIVES = Variable(
    "NEURON_SIM_CHECK_COLLECTIVES", _flag, True, _FLAG, "Have the ranks agree on a collective before it runs."
)
VISIBLE_CORES: Variable[tuple[int, ...] | None] = Variable(
    "NEURON_RT_VISIBLE_CORES", parse_cores, None, _CORES, "Which of the instance's cores this process sees."
)
NUM_CORES: Variable[int | None] = Variable(
    "NEURON_RT_NUM_CORES", _positive, None, "a positive number", "How many cores this process sees."
)
LOGICAL_NC_CONFIG: Variable[int | None] = Variable(
    "NEURON_LOGICAL_NC_CONFIG", lambda text: int(_choice("1", "2")(text)), None, "1, 2",
    "Physical cores in a logical one. Unset: 1 on trn1 and inf2, 2 on trn2 and trn3.",
)  # fmt: skip
LAUNCH_BLOCKING = Variable(
    "NEURON_LAUNCH_BLOCKING", _flag, False, _FLAG, "Wait for each operator. The simulator always does."
)
COMPLEX_DECOMPOSE: Variable[bool | None] = Variable(
    "TORCH_NEURONX_COMPLEX_DECOMPOSE", _flag, None, _FLAG, "Decompose complex numbers. Unset: as the profile has it."
)
FALLBACK_ONLY_UNIMPLEMENTED: Variable[bool | None] = Variable(
    "TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS", _flag, None, _FLAG,
    "An operator that the device has and cannot run raises, instead of running on the host. Unset: the profile's.",
)  # fmt: skip
DISABLE_FALLBACK: Variable[bool | None] = Variable(
    "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION", _flag, None, _FLAG, "The same, by its other name."
)
NEFF_CACHE_DIR = Variable(
    "TORCH_NEURONX_NEFF_CACHE_DIR", str, "/tmp/neff_cache", "a folder", "Where compiled programs are kept."
)
NEFF_LOCAL_CACHE_DIR = Variable(
    "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR", str, "/tmp/local_cache", "a folder", "Where the cache's lock files are."
)
NEFF_LOCK_TIMEOUT = Variable(
    "TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT", _seconds, 1200.0, "seconds, 0 or more",
    "How long to wait for another process that compiles the same.",
)  # fmt: skip
DISABLE_NEFF_CACHE = Variable(
    "TORCH_NEURONX_DISABLE_NEFF_CACHE", _flag, False, _FLAG, "Keep nothing on disk."
)  # fmt: skip
NEFF_DISABLE_CACHE = Variable(
    "TORCH_NEURONX_NEFF_DISABLE_CACHE", _flag, False, _FLAG, "The same, by its other name."
)  # fmt: skip
CC_FLAGS = Variable("NEURON_CC_FLAGS", str, "", "the compiler's flags", "Part of the cache's keys.")
OPT_LEVEL = Variable("NEURON_COMPILER_OPT_LEVEL", str, "", "the compiler's level", "Part of the cache's keys.")
DYNAMO_DISABLE_CPU_AUTOCOPY = Variable(
    "TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY", _flag, False, _FLAG,
    "Inputs of a compiled graph that are on the host raise, instead of being copied.",
)  # fmt: skip
RETAIN_DEVICE_MODE = Variable(
    "TORCH_NEURONX_RETAIN_DEVICE_MODE", _flag, False, _FLAG,
    "Where all inputs of a compiled graph are on the host, so are its results.",
)  # fmt: skip
DEBUG_DIR: Variable[str | None] = Variable(
    "TORCH_NEURONX_DEBUG_DIR", str, None, "a folder", "Write the graphs that are compiled into it, as text."
)
NEURON_SIM_CODEGEN = Variable(
    "NEURON_SIM_CODEGEN", _choice("aten", "aoti"), "aten", "aten, aoti",
    "What graphs are compiled to. aten: data, at once. aoti: a library by AOTInductor, as fast as Inductor's code.",
)  # fmt: skip
NEURON_SIM_TRUST_CACHE = Variable(
    "NEURON_SIM_TRUST_CACHE", _flag, False, _FLAG,
    "Load libraries (aoti) from the cache although another user wrote or somebody imported them.",
)  # fmt: skip
NEURON_SIM_SECRET_FILE: Variable[str | None] = Variable(
    "NEURON_SIM_SECRET_FILE", str, None, "a file",
    "The secret that marks this user's libraries in the cache. Unset: in the user's state folder.",
)  # fmt: skip
NEURON_SIM_CACHE_LIMIT: Variable[int | None] = Variable(
    "NEURON_SIM_CACHE_LIMIT", parse_bytes, None, _BYTES,
    "The most that the cache on disk may hold; what was not used for longest goes. Unset: no limit.",
)  # fmt: skip
NEURON_SIM_REPORT: Variable[str | None] = Variable(
    "NEURON_SIM_REPORT", str, None, "a file, or a folder with a / at its end",
    "Write a report at the end: to the file (ranks but the first beside it), or one file a process into the folder.",
)  # fmt: skip

# What a profile's rules depend on.
RULE_SETTINGS = (FALLBACK_ONLY_UNIMPLEMENTED, DISABLE_FALLBACK, COMPLEX_DECOMPOSE)

ALL: tuple[Variable[Any], ...] = (
    NEURON_SIM, NEURON_SIM_INSTANCE, NEURON_SIM_PROFILE, NEURON_SIM_MEMORY, NEURON_SIM_STRICT,
    NEURON_SIM_MACHINE, NEURON_SIM_CHECK_COLLECTIVES,
    VISIBLE_CORES, NUM_CORES, LOGICAL_NC_CONFIG, LAUNCH_BLOCKING, *RULE_SETTINGS,
    NEFF_CACHE_DIR, NEFF_LOCAL_CACHE_DIR, NEFF_LOCK_TIMEOUT, DISABLE_NEFF_CACHE, NEFF_DISABLE_CACHE, CC_FLAGS,
    OPT_LEVEL, DYNAMO_DISABLE_CPU_AUTOCOPY, RETAIN_DEVICE_MODE, DEBUG_DIR, NEURON_SIM_CODEGEN, NEURON_SIM_TRUST_CACHE,
    NEURON_SIM_SECRET_FILE, NEURON_SIM_CACHE_LIMIT, NEURON_SIM_REPORT,
)  # fmt: skip
# What makes sense only together with the data on instances and profiles, which take time to load.
_OF_THE_MACHINE = (
    NEURON_SIM_INSTANCE, NEURON_SIM_PROFILE, NEURON_SIM_MEMORY, VISIBLE_CORES, NUM_CORES, LOGICAL_NC_CONFIG,
)  # fmt: skip


def problem() -> str | None:
    """What is wrong with the environment, in one sentence, or None. Looks further only where something is set."""
    try:
        for variable in ALL:
            variable.read()
        if not any(variable.is_set() for variable in _OF_THE_MACHINE):
            return None
        from neuron_sim.profiles import profile
        from neuron_sim.runtime import read_machine

        read_machine()
        profile(NEURON_SIM_PROFILE.read())
    except ConfigurationError as error:
        return str(error)
    return None
