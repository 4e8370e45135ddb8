"""The rulebook applied to a graph, before anything is compiled: what the real compiler would refuse, convert or bear.

`inspect_graph` finds, `enforce` raises and tells. The rules, their words and their limits are the profile's.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

import torch
from torch import fx

from neuron_sim.compile import instructions, liveness
from neuron_sim.compile.graphs import Call, calls, dimensions, location, tensors
from neuron_sim.location import NOWHERE, Location
from neuron_sim.policy import Event, Rulebook

Outcome = Literal["refuse", "convert", "tell"]
_MASKS = (torch.bool, torch.uint8)
_INDEXING = ("aten::index.Tensor", "aten::_unsafe_index.Tensor")
_FORMATS = (torch.contiguous_format, torch.preserve_format)


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
    shaped = any(_is_symbolic(tensor) for node in given for tensor in tensors(node.meta.get("val")))
    for node in given:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and not shaped:  # else it is a size of what is found below
            yield _event("static_shapes", node.name, _first_use(node), f"the number {node.name} is not fixed")
        for tensor in tensors(value):
            where = _first_use(node)
            if _is_symbolic(tensor):
                yield _event("static_shapes", node.name, where, f"{node.name} has the shape {_shape(tensor)}")
            if _is_dtype(tensor, torch.float64):
                yield _event("float64", node.name, where)
            if tensor.dtype.is_complex:
                yield _event("complex", node.name, where, str(tensor.dtype))


def _first_use(node: fx.Node) -> Location:
    return next((where for where in map(location, node.users) if where.line), NOWHERE)


def _of_call(call: Call, rulebook: Rulebook) -> Iterator[_Found]:
    rules, op, where = rulebook.profile.rules, call.op, call.where
    given = call.inputs
    # What PyTorch makes of `.item()` where it can keep it on the device.
    is_number = op.startswith("prims::convert_element_type") and all(t.dim() == 0 for t in call.outputs)
    for tensor in call.outputs:
        # Where a dtype comes from, and not every place it then passes through.
        if _is_dtype(tensor, torch.float64) and not any(_is_dtype(t, torch.float64) for t in given) and not is_number:
            yield _event("float64", op, where)
        if tensor.dtype.is_complex and not any(t.dtype.is_complex for t in given):
            yield _event("complex", op, where, str(tensor.dtype))
    if detail := _dynamic(call, rules["dynamic_shape"].exempts(op)):
        yield _event("static_shapes", op, where, detail)
    if (memory_format := call.node.kwargs.get("memory_format")) not in (None, *_FORMATS):
        yield _event("memory_format", op, where, str(memory_format).removeprefix("torch."))
    if rules["fallback"].is_about(op) and not rules["unsupported_op"].exempts(op):
        yield _event("unsupported_op", op, where)
    if number := _number_beyond_int32(call):
        yield _event("int64", op, where, number)
    for case in rules["untested"].cases:
        if case.op == op and _matches(call.node, case.argument, case.equals, case.dimensions):
            yield _event("untested", op, where, case.detail)
    limit = rules["sdpa"].limit
    if "scaled_dot_product" in op and given and limit is not None and (width := dimensions(given[0])[-1]) > limit:
        yield _event("sdpa", op, where, f"heads of {width}")


def _dynamic(call: Call, exempt: bool) -> str | None:
    """Why a call's result has no fixed shape, or None."""
    depends = f"the shape of what {call.op} returns depends on values"
    if call.op == "aten::_local_scalar_dense":
        return f"what {call.op} returns is a number that the host must read"
    if any(_is_symbolic(t) for t in call.outputs) and not any(_is_symbolic(t) for t in call.inputs):
        return depends
    target = call.node.target
    assert isinstance(target, torch._ops.OpOverload)
    if exempt or torch.Tag.dynamic_output_shape not in target.tags:
        return None
    if call.op in _INDEXING:
        return depends if any(t.dtype in _MASKS for t in call.inputs[1:]) else None
    names = [argument.name for argument in target._schema.arguments]
    if "output_size" in names:
        place = names.index("output_size")
        value = call.node.args[place] if place < len(call.node.args) else call.node.kwargs.get("output_size")
        return depends if value is None else None
    return depends


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


def _is_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    # Python's numbers become float64 scalars of the host, which are inputs of a program, not tensors of the device.
    return tensor.dtype == dtype and not (tensor.dim() == 0 and tensor.device.type == "cpu")


def _is_symbolic(tensor: torch.Tensor) -> bool:
    return any(not isinstance(size, int) for size in tensor.shape)


def _shape(tensor: torch.Tensor) -> str:
    return "[" + ", ".join(map(str, tensor.shape)) + "]"


def _number_beyond_int32(call: Call) -> str | None:
    """The first number that does not fit into 32 bits, where an int64 tensor meets it. Sizes are no numbers."""
    if not any(t.dtype == torch.int64 for t in (*call.inputs, *call.outputs)):
        return None
    target = call.node.target
    assert isinstance(target, torch._ops.OpOverload)
    for place, argument in enumerate(target._schema.arguments):
        value = call.node.args[place] if place < len(call.node.args) else call.node.kwargs.get(argument.name)
        is_number = str(argument.type) in ("number", "Tensor", "Optional[number]")
        if is_number and isinstance(value, int) and not -(2**31) <= value < 2**31:
            return str(value)
    return None


def _matches(node: fx.Node, place: int, equals: str | None, dimensions: int | None) -> bool:
    if place >= len(node.args):
        return False
    argument = node.args[place]
    if dimensions is None:
        return str(argument).lower() == equals
    return isinstance(argument, fx.Node) and any(t.dim() == dimensions for t in tensors(argument.meta.get("val")))
