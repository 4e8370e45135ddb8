"""Makes a callable of a graph's data, which may come from anywhere: everything is checked, and nothing is executed but
operators of PyTorch's that compute new tensors from given ones."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from neuron_sim import _core
from neuron_sim.compile.graphdata import FORMAT, NAMESPACES, bytes_of
from neuron_sim.neffcache import EntryError

Runner = Callable[[list[Any]], list[Any]]
# They read files, or see memory that their arguments do not have.
FORBIDDEN = (
    "_reshape_alias",
    "from_file",
    "set_",
    "_resize",
    "from_blob",
    "_nested",
    "_sparse",
    "_weight",
    "storage",
    "_pin_memory",
)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_LAYOUTS = {"strided": torch.strided}
_FORMATS = {
    name: getattr(torch, name) for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
}


def read_payload(payload: bytes) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The data and the constants of a payload. Raises `EntryError` when it is none."""
    line, _, rest = payload.partition(b"\n")
    try:
        data = json.loads(line)
        if data["format"] != FORMAT:
            raise EntryError(f"its graph is of the format {data['format']!r}, not {FORMAT!r}")
        constants = []
        for described in data["constants"]:
            dtype, shape = _DTYPES[described["dtype"]], [_count(size) for size in described["shape"]]
            size = math.prod(shape) * dtype.itemsize
            constants.append(_tensor(rest[:size], dtype, shape))
            rest = rest[size:]
    except EntryError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
        raise EntryError(f"its graph cannot be read: {type(error).__name__}: {error}") from error
    if rest:
        raise EntryError("it holds more than its graph says")
    return data, constants


def build(payload: bytes, groups: Sequence[str], core: int) -> Runner:
    """A callable that runs the graph of a payload on a core: a list of tensors in, which it empties, and a list out.

    `groups` are this process's names of the process groups. Raises `EntryError` when the payload is not a graph that
    this PyTorch can run.
    """
    data, constants = read_payload(payload)
    try:
        if _count(data["groups"]) != len(groups):
            raise EntryError(f"its graph is for {data['groups']} process groups, not {len(groups)}")
        program = _core.Program(_count(data["slots"]), len(data["inputs"]), core)
        for constant in constants:
            program.add_constant(constant)
        for operation in data["operations"]:
            _add(program, operation, groups, core)
        for output in data["outputs"]:
            program.add_output(_slot(output["slot"]), output["device"] is True)
    except EntryError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError, RecursionError) as error:
        raise EntryError(f"its graph cannot be run: {type(error).__name__}: {error}") from error
    run: Runner = program.run
    return run


def _add(program: _core.Program, operation: dict[str, Any], groups: Sequence[str], core: int) -> None:
    name, overload = operation["op"], operation["overload"]
    if not isinstance(name, str) or not isinstance(overload, str):
        raise EntryError("an operator's name is no text")
    namespace, _, short = name.partition("::")
    if namespace not in NAMESPACES or any(short.startswith(word) or f"_{word}" in short for word in FORBIDDEN):
        raise EntryError(f"its graph has the operator {name}, which no program may have")
    operands = [
        (kind, value_of(value, groups, core) if kind == "fixed" else _slots(value))
        for kind, value in operation["operands"]
    ]
    program.add(
        name,
        overload,
        operands,
        operation["device"] is True,
        _count(operation["first"]),
        _count(operation["results"]),
        _slots(operation["dead"]),
        [[_count(stride) for stride in result] for result in operation.get("strides", [])],
    )


def value_of(value: Any, groups: Sequence[str], core: int) -> Any:
    """An argument that is no tensor, as `graphdata.plain` wrote it. Raises `EntryError` for what it did not write."""
    if isinstance(value, list):
        return [value_of(item, groups, core) for item in value]
    if not isinstance(value, dict):
        if value is None or isinstance(value, bool | int | str):
            return value
        raise EntryError(f"an argument is written as {type(value).__name__}")
    ((kind, text),) = value.items()
    match kind:
        case "float":
            return float.fromhex(text)
        case "complex":
            real, imaginary = (value_of(part, groups, core) for part in text)
            return complex(real, imaginary)
        case "dtype":
            return _DTYPES[text]
        case "layout":
            return _LAYOUTS[text]
        case "memory_format":
            return _FORMATS[text]
        case "device":
            return {"cpu": torch.device("cpu"), "neuron": torch.device("neuron", core)}[text]
        case "group":
            return groups[_count(text)]
    raise EntryError(f"an argument is of the unknown kind {kind!r}")


def _tensor(content: bytes, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise EntryError("a constant is cut short")
    made = torch.empty(shape, dtype=dtype)
    if content:
        made.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    assert bytes_of(made) == content
    return made


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise EntryError(f"{value!r} is no count")
    return value


def _slot(value: Any) -> int:
    if type(value) is not int:
        raise EntryError(f"{value!r} is no slot")
    return value


def _slots(value: Any) -> Any:
    return [_slot(item) for item in value] if isinstance(value, list) else _slot(value)
