"""Reads an ATen graph: its calls with their operators, tensors and lines. Nothing is run.

A graph's nodes carry what PyTorch's tracers put there: `meta["val"]`, a fake tensor with shape and dtype, and
`meta["stack_trace"]`, the program's lines.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from neuron_sim.location import Location, traced_location


@dataclass(frozen=True)
class Call:
    """One call of an operator. `op` is its name as the device's core has it, "aten::add.Tensor".

    `args` and `kwargs` have tensors without memory where the call has tensors; `inputs` are those, in order, and
    `outputs` what it returns. `where` is the line it came from. `chooses_format` is false where no line of the
    program speaks of a memory format: PyTorch's decompositions choose formats of their own, which ask nothing of the
    compiler.
    """

    target: torch._ops.OpOverload
    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    where: Location
    chooses_format: bool = True

    @classmethod
    def of_node(cls, node: fx.Node) -> "Call":
        """The call that a node of a graph is."""
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda given: given.meta.get("val"))
        inputs, outputs = tuple(tensors((args, kwargs))), tuple(tensors(node.meta.get("val")))
        trace = str(node.meta.get("stack_trace"))
        chooses = "memory_format" in trace or "channels_last" in trace
        return cls(target, operator_name(target), args, kwargs, inputs, outputs, location(node), chooses)

    def argument(self, place: int, name: str) -> Any:
        """An argument by place or name; None when it is not given."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name)


def location(node: fx.Node) -> Location:
    """The line a node came from; for one without (a constant that a pass made), its nearest input's."""
    here = traced_location(node.meta.get("stack_trace"))
    if here.line:
        return here
    return next((w for w in (traced_location(i.meta.get("stack_trace")) for i in node.all_input_nodes) if w.line), here)


def operator_name(target: Any) -> str:
    """The name of an operator, "aten::add.Tensor"; of any other function, its own."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target.name())  # type: ignore[no-untyped-call]
    return str(getattr(target, "__name__", target))


def calls(graph_module: fx.GraphModule) -> Iterator[Call]:
    """The calls of operators in a graph and in the graphs inside it (branches, loops), in order."""
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            yield Call.of_node(node)
        elif node.op == "get_attr":
            inner = _attribute(graph_module, str(node.target))
            if isinstance(inner, fx.GraphModule):
                yield from calls(inner)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a node's value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, Mapping):
        yield from tensors(tuple(value.values()))


def is_view(target: Any) -> bool:
    """Whether an operator only looks at its argument's memory."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    aliases = [result.alias_info for result in target._schema.returns]
    is_alias = any(alias is not None and not alias.is_write for alias in aliases)
    return is_alias or operator_name(target) in ("aten::_unsafe_view", "aten::detach", "aten::sym_size.int")


def dimensions(tensor: torch.Tensor) -> tuple[int, ...]:
    """A shape as numbers. Symbolic sizes, which the device refuses anyway, become their hints, or 1."""
    return tuple(size if isinstance(size, int) else _hint(size) for size in tensor.shape)


def elements(tensor: torch.Tensor) -> int:
    """How many elements a tensor has."""
    total = 1
    for size in dimensions(tensor):
        total *= size
    return total


def nbytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's elements."""
    return elements(tensor) * tensor.dtype.itemsize


def _hint(size: torch.SymInt) -> int:
    node = size.node
    return int(node.hint) if node.has_hint() else 1


def _attribute(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name, None)
    return root
