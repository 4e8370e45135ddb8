"""The memory a compiled graph needs at its peak: an estimate, from when each tensor is last used.

Inputs (weights among them) live throughout, an intermediate from its operator to its last user, views with what they
look at. The real compiler keeps what fits on the chip and fuses passes, so this errs upwards for chains of elementwise
operators; its own scratch and spills are not in it.
"""

from dataclasses import dataclass

from torch import fx

from neuron_sim.compile.graphs import is_view, location, nbytes, operator_name, tensors
from neuron_sim.location import NOWHERE, Location


@dataclass(frozen=True)
class Peak:
    """Bytes at the peak, estimated: in all, and of them the graph's inputs; and the operator where it is reached."""

    total: int
    inputs: int
    op: str = ""
    where: Location = NOWHERE


def peak_bytes(graph_module: fx.GraphModule) -> Peak:
    """An estimate of the memory of a graph whose nodes carry `meta["val"]`, in bytes."""
    nodes = list(graph_module.graph.nodes)
    owner = {node: node for node in nodes}
    for node in nodes:
        if node.all_input_nodes and _shares(node):
            owner[node] = owner[node.all_input_nodes[0]]
    last: dict[fx.Node, int] = {}
    for place, node in enumerate(nodes):
        for used in node.all_input_nodes:
            last[owner[used]] = place
    inputs = sum(_bytes(node) for node in nodes if node.op in ("placeholder", "get_attr"))
    held, top, at = inputs, inputs, None
    frees: dict[int, list[fx.Node]] = {}
    for node, place in last.items():
        if node.op == "call_function":
            frees.setdefault(place, []).append(node)
    for place, node in enumerate(nodes):
        if node.op == "call_function" and owner[node] is node:
            held += _bytes(node)
            if held > top:
                top, at = held, node
            if node not in last:
                held -= _bytes(node)
        held -= sum(_bytes(freed) for freed in frees.get(place, ()))
    return Peak(top, inputs, operator_name(at.target) if at else "", location(at) if at else NOWHERE)


def _shares(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    name = operator_name(node.target)
    return name == "getitem" or name.endswith("wait_tensor") or is_view(node.target)


def _bytes(node: fx.Node) -> int:
    return sum(nbytes(tensor) for tensor in tensors(node.meta.get("val")))
