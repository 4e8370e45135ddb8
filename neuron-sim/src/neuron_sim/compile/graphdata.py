"""A graph written down as data: operators by name, arguments, shapes; what a compiled program is made of.

The text is the same in every process and on every rank that compiles the same graph: devices are "neuron" or "cpu",
process groups are numbered in the order in which they are met, and nothing has a path, an address or a time in it.
"""

import ctypes
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from neuron_sim import _core
from neuron_sim.errors import NeuronSimError

FORMAT = "neuron-sim graph 1"
NAMESPACES = ("aten", "prims", "_c10d_functional")
# Narrower floating point for what the device does not have (rule float64).
NARROWER = {torch.float64: torch.float32, torch.complex128: torch.complex64}


class UnsupportedGraphError(NeuronSimError):
    """A graph with something that no program of the simulated device can hold."""


@dataclass
class GraphData:
    """A graph as data. `groups` are this process's names of the process groups that the data numbers, and `ignored`
    the places of the traced graph's inputs that are no inputs of the data."""

    data: dict[str, Any]
    constants: list[torch.Tensor] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    ignored: list[int] = field(default_factory=list)

    def payload(self) -> bytes:
        """One line of JSON, then the constants' bytes one after the other."""
        line = json.dumps(self.data, sort_keys=True, separators=(",", ":")).encode()
        return line + b"\n" + b"".join(bytes_of(constant) for constant in self.constants)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor of the host, without numpy."""
    plain = tensor.detach().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.numel() else b""


def digest(payload: bytes) -> str:
    """The name of a payload."""
    return hashlib.sha256(payload).hexdigest()


def describe_tensor(value: torch.Tensor) -> dict[str, Any]:
    """Shape, strides, dtype and kind of device of a tensor, real or traced."""
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "stride": list(value.stride()),
        "device": value.device.type,
    }


def write_down(graph: GraphModule, narrow: bool, outputs_to_device: bool) -> GraphData:
    """The data of a functional ATen graph, as AOTAutograd makes it.

    `narrow`: float64 becomes float32 on the device. `outputs_to_device`: results are the device's whatever the trace
    says. Raises `UnsupportedGraphError`, which names the operator and its line.
    """
    return _Writer(graph, narrow, outputs_to_device).write()


class _Writer:
    def __init__(self, graph: GraphModule, narrow: bool, outputs_to_device: bool) -> None:
        self._graph = graph
        self._narrow = narrow
        self._outputs_to_device = outputs_to_device
        self._slots: dict[Node, list[int]] = {}
        self._next = 0
        self._written = GraphData({})

    def write(self) -> GraphData:
        nodes = list(self._graph.graph.nodes)
        inputs = self._inputs([node for node in nodes if node.op == "placeholder"])
        for node in inputs:
            self._take(node, 1)
        constants = [node for node in nodes if node.op == "get_attr"]
        for node in constants:
            self._take(node, 1)
            self._written.constants.append(self._constant(node))
        operations = []
        outputs: list[dict[str, Any]] = []
        for node in nodes:
            if node.op == "call_function":
                if (operation := self._operation(node)) is not None:
                    operations.append(operation)
            elif node.op == "output":
                outputs = [self._output(value) for value in node.args[0]]
            elif node.op not in ("placeholder", "get_attr"):
                raise self._unsupported(node, f"a node of the kind {node.op}")
        _free_early(operations, [output["slot"] for output in outputs], len(inputs), len(constants))
        self._written.data = {
            "format": FORMAT,
            "slots": self._next,
            "inputs": [describe_tensor(node.meta["val"]) for node in inputs],
            "constants": [
                {key: described[key] for key in ("dtype", "shape")}
                for described in map(describe_tensor, self._written.constants)
            ],
            "groups": len(self._written.groups),
            "operations": operations,
            "outputs": outputs,
        }
        return self._written

    def _take(self, node: Node, count: int) -> int:
        first = self._next
        self._slots[node] = list(range(first, first + count))
        self._next += count
        return first

    def _inputs(self, placeholders: list[Node]) -> list[Node]:
        """Those that are tensors. Others (a device mesh and its groups, under tensor parallelism) must be unused."""
        inputs = []
        for place, node in enumerate(placeholders):
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                inputs.append(node)
            elif node.users:
                what = f"an input that is no tensor ({type(value).__name__}; of a DTensor that needs gradients, say)"
                raise self._unsupported(node, what)
            else:
                self._written.ignored.append(place)
        return inputs

    def _constant(self, node: Node) -> torch.Tensor:
        value: Any = self._graph
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            raise self._unsupported(node, f"a constant that is no tensor ({type(value).__name__})")
        host = _core.to_host_view(value) if value.device.type == "neuron" else value
        return host.detach().contiguous()

    def _output(self, value: Any) -> dict[str, Any]:
        if value is None:
            return {"slot": -1, "device": False}
        if not isinstance(value, Node) or len(self._slots[value]) != 1:
            raise UnsupportedGraphError(f"the graph returns {value!r}, which is no tensor")
        traced = value.meta.get("val")
        on_device = isinstance(traced, torch.Tensor) and (traced.device.type == "neuron" or self._outputs_to_device)
        return {"slot": self._slots[value][0], "device": on_device}

    def _operation(self, node: Node) -> dict[str, Any] | None:
        if getattr(node.target, "__name__", "") == "getitem" and not isinstance(node.target, torch._ops.OpOverload):
            source, index = node.args
            assert isinstance(source, Node)
            assert isinstance(index, int)
            self._slots[node] = [self._slots[source][index]]
            return None
        op = node.target
        if not isinstance(op, torch._ops.OpOverload):
            raise self._unsupported(node, f"{getattr(op, '__name__', op)}, which is no operator of ATen")
        if op.namespace not in NAMESPACES:
            raise self._unsupported(node, f"the custom operator {_name_of(op)}, for which the device has no kernel")
        on_device = _is_on_device(node) and _needs_device(op, node)
        operands = [
            self._operand(node, argument, value, on_device)
            for argument, value in zip(op._schema.arguments, _all_arguments(node, op), strict=True)
        ]
        value = node.meta.get("val")
        count = len(value) if isinstance(value, list | tuple) else len(op._schema.returns)
        name, _, overload = _name_of(op).partition(".")
        strides = _strides(value)
        return {
            "op": name,
            "overload": overload,
            "operands": operands,
            "device": on_device,
            "first": self._take(node, count),
            "results": count,
            **({"strides": strides} if any(strides) else {}),
        }

    def _operand(self, node: Node, argument: Any, value: Any, on_device: bool) -> list[Any]:
        if isinstance(value, Node):
            slots = self._slots[value]
            if "List" in str(argument.type):
                return ["tensors", slots]
            return ["slot", slots[0]]
        if isinstance(value, list | tuple) and any(isinstance(item, Node) for item in value):
            kind = "optional_tensors" if "Optional[Tensor]" in str(argument.type) else "tensors"
            slots = [self._slots[item][0] if isinstance(item, Node) else -1 for item in value]
            return [kind, slots]
        if argument.name == "group_name" and isinstance(value, str):
            return ["fixed", {"group": self._group(value)}]
        return ["fixed", self._fixed(node, value, on_device)]

    def _group(self, name: str) -> int:
        if name not in self._written.groups:
            self._written.groups.append(name)
        return self._written.groups.index(name)

    def _fixed(self, node: Node, value: Any, on_device: bool) -> Any:
        if isinstance(value, torch.device):
            if value.type not in ("neuron", "cpu"):
                raise self._unsupported(node, f"a tensor on {value.type}")
            return {"device": "neuron" if on_device else "cpu"}
        if isinstance(value, torch.dtype):
            is_view = node.target is torch.ops.aten.view.dtype
            narrow = self._narrow and _is_on_device(node) and not is_view
            return {"dtype": str(NARROWER.get(value, value) if narrow else value).removeprefix("torch.")}
        try:
            return plain(value)
        except TypeError as error:
            raise self._unsupported(node, f"an argument of the type {type(value).__name__}") from error

    def _unsupported(self, node: Node, what: str) -> UnsupportedGraphError:
        return UnsupportedGraphError(
            f"the graph has {what}; the simulated device compiles ATen operators on tensors "
            f"[{node.name}{line_of(node)}; leave it outside with torch.compiler.disable, or express it with PyTorch's "
            "operators]"
        )


def plain(value: Any) -> Any:
    """A number, text, dtype, layout and the like as JSON holds it. Raises TypeError for anything else."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, float):
        return {"float": value.hex() if math.isfinite(value) else str(value)}
    if isinstance(value, complex):
        return {"complex": [plain(value.real), plain(value.imag)]}
    if type(value) is int:
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.layout):
        return {"layout": str(value).removeprefix("torch.")}
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} cannot be written down")


def line_of(node: Node) -> str:
    """Where the user's program made a node, as " at file:line", or nothing."""
    trace = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip().startswith('File "')]
    if not trace:
        return ""
    file, _, rest = trace[-1].removeprefix('File "').partition('", line ')
    return f" at {file}:{rest.partition(',')[0]}"


def _name_of(op: torch._ops.OpOverload) -> str:
    return str(op._name)


def _all_arguments(node: Node, op: torch._ops.OpOverload) -> Sequence[Any]:
    found = []
    for place, argument in enumerate(op._schema.arguments):
        if place < len(node.args) and not argument.kwarg_only:
            found.append(node.args[place])
        elif argument.name in node.kwargs:
            found.append(node.kwargs[argument.name])
        else:
            found.append(argument.default_value)
    return found


def _strides(value: Any) -> list[list[int]]:
    """The layout of each result; nothing for vectors, which have no choice."""
    results = value if isinstance(value, list | tuple) else [value]
    return [list(one.stride()) if isinstance(one, torch.Tensor) and one.dim() > 1 else [] for one in results]


def _is_on_device(node: Node) -> bool:
    touched = [node, *node.all_input_nodes]
    values = [value for n in touched for value in _tensors_in(n.meta.get("val"))]
    return any(value.device.type == "neuron" for value in values)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, list | tuple) else []


def _needs_device(op: torch._ops.OpOverload, node: Node) -> bool:
    """The device's generator and its process groups are not the host's; everything else is computed on the host."""
    if op.namespace == "_c10d_functional":
        return True
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    given = dict(zip((argument.name for argument in op._schema.arguments), _all_arguments(node, op), strict=True))
    return bool(given.get("dropout_p", 1) != 0)


def _free_early(operations: list[dict[str, Any]], results: list[int], inputs: int, constants: int) -> None:
    """Note with each operation which slots nothing reads after it."""
    seen = set(results) | set(range(inputs, inputs + constants))
    for operation in reversed(operations):
        used: set[int] = set(range(operation["first"], operation["first"] + operation["results"]))
        for kind, value in operation["operands"]:
            if kind == "slot":
                used.add(value)
            elif kind != "fixed":
                used.update(slot for slot in value if slot >= 0)
        operation["dead"] = sorted(used - seen)
        seen |= used
