"""What Dynamo traced, as data: the key under which a later process finds the artifact without AOTAutograd.

Two graphs with equal data are equal programs: operators and functions by name (PyTorch's own, of one version), their
arguments, the inputs' shapes, strides, dtypes and devices, and the global settings that PyTorch reads while it traces.
Anything that cannot be written down in this way (a function of somebody else's, a subclass of Tensor, a constant) has
no key, and such a graph goes through AOTAutograd every time.
"""

import builtins
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from neuron_sim import env, policy
from neuron_sim.compile.graphdata import NAMESPACES, describe_tensor, digest, plain

# Whose functions are of one version with PyTorch or with Python.
HOMES = ("torch", "math")


class NoKeyError(ValueError):
    """A graph without a key, and why."""


@dataclass
class TraceKey:
    """`data` is the same in every process that traces the same; `groups` are this process's names of its groups."""

    data: dict[str, Any]
    groups: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The SHA-256 of the data."""
        return digest(json.dumps(self.data, sort_keys=True, separators=(",", ":")).encode())


def trace_key(graph: GraphModule, inputs: Sequence[Any], core: int) -> TraceKey:
    """The key of a graph of Dynamo's. Raises `NoKeyError` for one that has none."""
    return _Reader(core).read(graph, inputs)


def state() -> dict[str, Any]:
    """The settings that PyTorch and the rulebook read while a graph is traced."""
    book = policy.current()
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": {
            kind: str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
            for kind in ("cpu", "neuron")
        },
        "default_dtype": str(torch.get_default_dtype()),
        "default_device": torch.get_default_device().type,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "attention": [torch._C._get_flash_sdp_enabled(), torch._C._get_math_sdp_enabled()],
        "strictness": book.strictness,
        "settings": book.settings,
        "retain": env.RETAIN_DEVICE_MODE.read(),
    }


class _Reader:
    def __init__(self, core: int) -> None:
        self._core = core
        self._places: dict[Node, int] = {}
        self._groups: list[str] = []

    def read(self, graph: GraphModule, inputs: Sequence[Any]) -> TraceKey:
        if next(graph.parameters(), None) is not None or next(graph.buffers(), None) is not None:
            raise NoKeyError("the graph holds tensors of its own")
        nodes = []
        for place, node in enumerate(graph.graph.nodes):
            nodes.append(self._node(node))
            self._places[node] = place
        data = {"inputs": self._inputs(inputs), "nodes": nodes, "state": state()}
        return TraceKey(data, self._groups)

    def _inputs(self, inputs: Sequence[Any]) -> list[dict[str, Any]]:
        described, storages = [], set()
        for value in inputs:
            if not isinstance(value, torch.Tensor) or not _is_plain(value):
                raise NoKeyError(f"an input is a {type(value).__name__}")
            storages.add(value.untyped_storage()._cdata)
            described.append(
                describe_tensor(value) | {"grad": value.requires_grad, "offset": int(value.storage_offset())}
            )
        if len(storages) < len(described):
            raise NoKeyError("inputs share memory")
        return described

    def _node(self, node: Node) -> list[Any]:
        if node.op == "placeholder":
            return ["input"]
        if node.op == "output":
            return ["output", self._argument(node.args[0])]
        if node.op == "call_method":
            target = str(node.target)
        elif node.op == "call_function":
            target = _name_of(node.target)
        else:
            raise NoKeyError(f"the graph has a node of the kind {node.op}")
        arguments = [self._argument(value) for value in node.args]
        keywords = {name: self._argument(value) for name, value in node.kwargs.items()}
        if "_c10d_functional" in target:
            arguments = [self._group(node, place, value) for place, value in enumerate(arguments)]
        return [node.op, target, arguments, keywords]

    def _group(self, node: Node, place: int, value: Any) -> Any:
        target: Any = node.target
        overload = target if isinstance(target, torch._ops.OpOverload) else getattr(target, target.overloads()[0])
        if overload._schema.arguments[place].name != "group_name":
            return value
        if not isinstance(value, str):
            raise NoKeyError("a process group is no name")
        if value not in self._groups:
            self._groups.append(value)
        return {"group": self._groups.index(value)}

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Node):
            return {"node": self._places[value]}
        if isinstance(value, slice):
            return {"slice": [self._argument(part) for part in (value.start, value.stop, value.step)]}
        if value is Ellipsis:
            return {"ellipsis": True}
        if isinstance(value, tuple):
            return {"tuple": [self._argument(item) for item in value]}
        if isinstance(value, list):
            return [self._argument(item) for item in value]
        if isinstance(value, dict):
            return {"dict": [[plain(key), self._argument(item)] for key, item in value.items()]}
        if isinstance(value, torch.device):
            if value.type == "neuron" and value.index not in (None, self._core):
                raise NoKeyError(f"a device is {value}")
            return {"device": value.type}
        try:
            return plain(value)
        except TypeError as error:
            raise NoKeyError(f"an argument is a {type(value).__name__}") from error


def _is_plain(value: torch.Tensor) -> bool:
    kind = type(value)
    is_traced = kind.__name__ == "FakeTensor" and kind.__module__ == "torch._subclasses.fake_tensor"
    is_known = kind in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or is_traced
    return is_known and value.layout is torch.strided and not value.is_conj() and not value.is_neg()


def _name_of(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        name = str(target)
        if name.partition(".")[0] not in NAMESPACES:
            raise NoKeyError(f"the graph has the custom operator {name}")
        return f"torch.ops.{name}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        raise NoKeyError(f"the graph has the higher-order operator {target}")
    name = getattr(target, "__name__", "")
    for home in (operator, builtins):
        if getattr(home, name, None) is target:
            return f"{home.__name__}.{name}"
    from torch.fx.node import _get_qualified_name

    try:
        name = _get_qualified_name(target)
    except Exception as error:  # it asserts, raises RuntimeError or AttributeError for what has no name
        raise NoKeyError(f"the graph calls {target!r}, which has no name") from error
    if name.partition(".")[0] not in HOMES or "<" in name:
        raise NoKeyError(f"the graph calls {name}, which is not of PyTorch")
    return name
