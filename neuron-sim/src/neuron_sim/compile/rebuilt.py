"""A graph's data as a graph of PyTorch's again, for a compiler that takes one: all on the host."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from neuron_sim.compile.graphdata import GraphData
from neuron_sim.compile.program import value_of


def rebuild(graph: GraphData, groups: Sequence[str]) -> GraphModule:
    """The graph, whose process groups have these names. Every operator is the host's; results are a tuple."""
    data, made = graph.data, Graph()
    root = torch.nn.Module()
    slots: list[Node] = [made.placeholder(f"input_{place}") for place in range(len(data["inputs"]))]
    for place, constant in enumerate(graph.constants):
        root.register_buffer(f"constant_{place}", constant)
        slots.append(made.get_attr(f"constant_{place}"))
    for operation in data["operations"]:
        target = _operator(operation)
        arguments: list[Any] = []
        keywords: dict[str, Any] = {}
        for argument, (kind, value) in zip(target._schema.arguments, operation["operands"], strict=True):
            given = _operand(kind, value, slots, groups)
            if argument.kwarg_only:
                keywords[argument.name] = given
            else:
                arguments.append(given)
        node = made.call_function(target, tuple(arguments), keywords)
        slots += _results(made, node, operation)
    made.output(tuple(slots[output["slot"]] if output["slot"] >= 0 else None for output in data["outputs"]))
    return GraphModule(root, made)


def _operator(operation: dict[str, Any]) -> torch._ops.OpOverload:
    namespace, _, name = operation["op"].partition("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    found: torch._ops.OpOverload = getattr(packet, operation["overload"] or "default")
    return found


def _results(made: Graph, node: Node, operation: dict[str, Any]) -> list[Node]:
    returns = node.target._schema.returns  # type: ignore[union-attr]
    if len(returns) == 1 and str(returns[0].type) == "Tensor":
        return [node]
    import operator

    return [made.call_function(operator.getitem, (node, place)) for place in range(operation["results"])]


def _operand(kind: str, value: Any, slots: list[Node], groups: Sequence[str]) -> Any:
    if kind == "slot":
        return slots[value]
    if kind == "fixed":
        given = value_of(value, groups, core=0)
        return torch.device("cpu") if isinstance(given, torch.device) else given
    return [slots[slot] if slot >= 0 else None for slot in value]
