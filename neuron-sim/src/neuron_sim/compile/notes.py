"""What the rulebook found in a graph, as data in the cache: a process that finds the artifact tells it as well.

A line is kept as the place of a node in Dynamo's graph, never as a path: the same code may lie elsewhere.
"""

from typing import Any

from torch.fx import GraphModule

from neuron_sim.compile.graphs import location
from neuron_sim.compile.inspect import Finding
from neuron_sim.location import NOWHERE
from neuron_sim.policy import Event, Rulebook


def write(findings: list[Finding], graph: GraphModule) -> list[list[Any]] | None:
    """The findings as data; None where one of them is at a line that Dynamo's graph does not have."""
    places = {location(node): place for place, node in reversed(list(enumerate(graph.graph.nodes)))}
    if any(finding.where not in places and finding.where != NOWHERE for finding in findings):
        return None
    return [
        [finding.rule, finding.op, places.get(finding.where, -1), finding.action, finding.detail]
        for finding in findings
    ]


def read(notes: list[Any], graph: GraphModule, rulebook: Rulebook) -> list[Finding]:
    """The findings in a graph of Dynamo's that equals the one they were written for, without what is none."""
    nodes = list(graph.graph.nodes)
    found = []
    for note in notes:
        match note:
            case [str(rule), str(op), int(place), ("convert" | "tell") as action, str(detail)] if (
                rule in rulebook.actions and -1 <= place < len(nodes)
            ):
                where = location(nodes[place]) if place >= 0 else NOWHERE
                message = rulebook.explain(Event(rule, op, where), detail)
                found.append(Finding(rule, op, where, action, detail, message))
    return found
