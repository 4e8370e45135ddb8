"""The rulebook applied to a graph, before anything is compiled: what the real compiler would refuse, convert or bear.

`inspect_graph` finds, `enforce` raises and tells. The rules, their words and their limits are the profile's.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

import torch
from torch import fx

from neuron_sim.compile import facts, instructions, liveness
from neuron_sim.compile.graphs import Call, calls, dimensions, location, tensors
from neuron_sim.location import NOWHERE, Location
from neuron_sim.policy import Event, Rulebook

Outcome = Literal["refuse", "convert", "tell"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A rule that applies to a node of a graph. `message` has the rule's words, the line and what to do."""

    rule: str
    op: str
    where: Location
    action: Outcome
    detail: str
    message: str


def inspect_graph(graph_module: fx.GraphModule, rulebook: Rulebook, capacity_bytes: int | None = None) -> list[Finding]:
    """What the rules say about an ATen graph whose nodes carry `meta["val"]`; each rule once an operator and line.

    `capacity_bytes` is a core's memory: with it, the graph's estimated peak is compared with that. Instructions and
    peak are estimates (`instructions.estimate_instructions`, `liveness.peak_bytes`). Under strictness `off` nothing is
    found. Nothing is run, and nothing is raised for what is found; `enforce` does that.
    """
    if rulebook.strictness == "off":
        return []
    found = dict.fromkeys(_inputs(graph_module))
    for call in calls(graph_module):
        found.update(dict.fromkeys(_of_call(call, rulebook)))
    found.update(dict.fromkeys(_of_size(graph_module, rulebook, capacity_bytes)))
    once: dict[tuple[str, str, Location], Finding] = {}
    for event, detail, softened in found:
        action = rulebook.actions[event.rule]
        if action == "allow":
            continue
        finding = Finding(
            event.rule, event.op, event.where, "tell" if softened else action, detail, rulebook.explain(event, detail)
        )
        once.setdefault((event.rule, event.op, event.where), finding)
    return list(once.values())


def enforce(findings: list[Finding], rulebook: Rulebook) -> None:
    """Tell what is told, then raise the first refusal, as `Rulebook.apply` does in eager mode.

    Raises `NeuronRuleError` (or its TypeError) for a finding whose action is "refuse". All are kept for the report.
    """
    for finding in sorted(findings, key=lambda found: found.action == "refuse"):
        event = Event(finding.rule, finding.op, finding.where)
        rulebook.record(event, finding.message, refuses=finding.action == "refuse")


_Found = tuple[Event, str, bool]


def _event(rule: str, op: str, where: Location, detail: str = "", softened: bool = False) -> _Found:
    return Event(rule, op, where), detail, softened


def _inputs(graph_module: fx.GraphModule) -> Iterator[_Found]:
    given = [node for node in graph_module.graph.nodes if node.op in ("placeholder", "get_attr")]
    shaped = any(facts.is_symbolic(tensor) for node in given for tensor in tensors(node.meta.get("val")))
    for node in given:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and not shaped:  # else it is a size of what is found below
            yield _event("static_shapes", node.name, _first_use(node), f"the number {node.name} is not fixed")
        for tensor in tensors(value):
            where = _first_use(node)
            if facts.is_symbolic(tensor):
                yield _event("static_shapes", node.name, where, f"{node.name} has the shape {_shape(tensor)}")
            if facts.is_dtype(tensor, torch.float64):
                yield _event("float64", node.name, where)
            if tensor.dtype.is_complex:
                yield _event("complex", node.name, where, str(tensor.dtype))


def _first_use(node: fx.Node) -> Location:
    return next((where for where in map(location, node.users) if where.line), NOWHERE)


def _of_call(call: Call, rulebook: Rulebook) -> Iterator[_Found]:
    rules, op, where = rulebook.profile.rules, call.op, call.where
    for rule, detail in facts.of_call(call, rulebook.profile):
        yield _event(rule, op, where, detail)
    if why := facts.dynamic(call, rules["dynamic_shape"].exempts(op)):
        yield _event("static_shapes", op, where, why)
    if rules["fallback"].is_about(op) and not rules["unsupported_op"].exempts(op):
        yield _event("unsupported_op", op, where)
    limit = rules["sdpa"].limit
    if facts.is_attention(op) and call.inputs and limit is not None and dimensions(call.inputs[0])[-1] > limit:
        yield _event("sdpa", op, where, f"heads of {dimensions(call.inputs[0])[-1]}")


def _of_size(graph_module: fx.GraphModule, rulebook: Rulebook, capacity_bytes: int | None) -> Iterator[_Found]:
    rule = rulebook.profile.rules["instructions"]
    assert rule.limit is not None
    estimate = instructions.estimate_instructions(graph_module)
    if estimate.total > rule.limit / rule.margin:
        detail = f"about {estimate.total:,} by an estimate, and the limit is {rule.limit:,}"
        softened = estimate.total <= rule.limit * rule.margin
        yield _event("instructions", estimate.largest_op, estimate.largest_at, detail, softened)
    if capacity_bytes is not None:
        peak = liveness.peak_bytes(graph_module)
        if peak.total > capacity_bytes:
            detail = f"about {peak.total / 2**30:.2f} GiB by an estimate, and a core has {capacity_bytes / 2**30:.2f}"
            yield _event("hbm", peak.op, peak.where, detail)


def _shape(tensor: torch.Tensor) -> str:
    return "[" + ", ".join(map(str, tensor.shape)) + "]"
