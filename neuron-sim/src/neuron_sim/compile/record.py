"""Every graph that was compiled or found, with its inputs, and for one of code seen before: what is different."""

import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from neuron_sim.compile import torch_private
from neuron_sim.compile.artifacts import Artifact, totals
from neuron_sim.compile.graphdata import line_of

MOST_CHANGES = 8
_INNER = re.compile(r"\.?_(?:modules|parameters|buffers)\['([^']*)'\]|\['([^']*)'\]|\[(\d+)\]")


class Count:
    """How often a graph ran."""

    def __init__(self) -> None:
        self.runs = 0


@dataclass
class Graph:
    """A graph of Dynamo's: where its code is, its inputs and operations in words, and what became of it."""

    code: str
    name: str
    inputs: dict[str, str]
    operations: list[str]
    state: dict[str, Any]
    why_no_shortcut: str
    model: str | None = None
    changes: list[str] = field(default_factory=list)
    is_recompile: bool = False
    findings: list[str] = field(default_factory=list)
    artifacts: list[dict[str, Any]] = field(default_factory=list)
    count: Count = field(default_factory=Count)

    def add(self, found: Artifact, kind: str) -> None:
        """An artifact of this graph is ready: `inference`, `forward` or `backward`."""
        self.artifacts.append(
            {"kind": kind, "key": found.key, "found": found.found, "seconds": round(found.seconds, 4)}
        )


_graphs: list[Graph] = []
_lock = threading.Lock()


def graphs() -> list[Graph]:
    """Every graph so far, in order."""
    with _lock:
        return list(_graphs)


def forget() -> None:
    """Forget them. For tests and tools."""
    with _lock:
        _graphs.clear()


def as_data() -> dict[str, Any]:
    """What the compiler did in this process, for reports."""
    return vars(totals) | {
        "graphs": [
            {
                "model": graph.model,
                "name": graph.name,
                "code": graph.code,
                "inputs": graph.inputs,
                "operations": len(graph.operations),
                "recompile": graph.is_recompile,
                "changes": graph.changes,
                "rules": graph.findings,
                "programs": graph.artifacts,
                "runs": graph.count.runs,
                "traced_again_because": graph.why_no_shortcut,
            }
            for graph in graphs()
        ]
    }


def begin(graph: GraphModule, inputs: Sequence[Any], why_no_shortcut: str) -> Graph:
    """Dynamo has traced a graph. Compares it with the nearest earlier one of the same code."""
    from neuron_sim.compile.tracekey import state

    code, name = torch_private.code_being_compiled() or ("", "")
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    described = {_input_name(node): _describe(value) for node, value in zip(placeholders, inputs, strict=False)}
    new = Graph(code, name, described, _operations(graph), state(), why_no_shortcut, _model_name())
    with _lock:
        earlier = [old for old in _graphs if (old.code, old.name) == (code, name)]
        if earlier:
            new.is_recompile = True
            new.changes = min((_changes(old, new) for old in reversed(earlier)), key=len)
        _graphs.append(new)
    return new


def _model_name() -> str | None:
    """What the stand-in's `set_model_name` was given."""
    backend = sys.modules.get("torch_neuronx.neuron_dynamo_backend")
    return backend.get_model_name() if backend is not None else None


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    device = "" if value.device.type == "neuron" else f" on {value.device.type}"
    dense = torch.empty(0).new_empty(value.shape, device="meta").stride()
    strides = "" if value.stride() == dense else f" strides {tuple(value.stride())}"
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{strides}{device}"


def _input_name(node: Node) -> str:
    """`L['self']._modules['norm']._parameters['weight']`, as Dynamo calls it, is `self.norm.weight`."""
    source = torch_private.source_of(node)
    if not source:
        return node.name
    plain = _INNER.sub(lambda found: "." + next(part for part in found.groups() if part is not None), source)
    return plain.removeprefix("L.").removeprefix("self.")


def _operations(graph: GraphModule) -> list[str]:
    places = {node: place for place, node in enumerate(graph.graph.nodes)}

    def word(value: Any) -> Any:
        return f"%{places[value]}" if isinstance(value, Node) else value

    described = []
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        arguments = torch.fx.node.map_aggregate((node.args, node.kwargs), word)
        described.append(f"{target}{_short(arguments)}{line_of(node)}")
    return described


def _short(arguments: Any) -> str:
    args, keywords = arguments
    words = [_text(value) for value in args] + [f"{name}={_text(value)}" for name, value in keywords.items()]
    return f"({', '.join(words)})"


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    if value is None or isinstance(value, str | bool | int | float | torch.dtype | torch.device | slice):
        return str(value)
    return type(value).__name__  # what prints an address, such as a process group


def _changes(old: Graph, new: Graph) -> list[str]:
    found = []
    for name, described in new.inputs.items():
        before = old.inputs.get(name)
        if before is None:
            found.append(f"input {name} is new: {described}")
        elif before != described:
            found.append(f"input {name}: {before} → {described}")
    found += [f"input {name} is gone" for name in old.inputs if name not in new.inputs]
    found += [f"{name}: {old.state[name]} → {value}" for name, value in new.state.items() if old.state[name] != value]
    if len(old.operations) != len(new.operations):
        found.append(f"{len(old.operations)} → {len(new.operations)} operations")
    for one, other in zip(old.operations, new.operations, strict=False):
        if one != other:
            before, _, line = one.rpartition(" at ")
            found.append(f"{before} → {other}" if before and other.endswith(f" at {line}") else f"{one} → {other}")
            break
    if not found:
        found.append("nothing in the graph: a guard of Dynamo's failed; TORCH_LOGS=recompiles says which")
    return found[:MOST_CHANGES]
