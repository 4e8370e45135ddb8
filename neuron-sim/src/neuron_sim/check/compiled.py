"""Compiled mode, followed without memory: the graphs that Dynamo and AOTAutograd make of a model, inspected.

A unit is what is compiled by itself: each repeated block of a transformer, or a whole model. Blocks that are alike
share a graph, as they do on the device; blocks or inputs that differ make another.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from neuron_sim.check import torch_private
from neuron_sim.compile.inspect import Finding, inspect_graph
from neuron_sim.compile.instructions import Estimate, estimate_instructions
from neuron_sim.compile.liveness import Peak, peak_bytes
from neuron_sim.policy import Rulebook


@dataclass(frozen=True)
class Graph:
    """A graph that would be compiled: whose unit, how many operators, instructions and memory (estimates), rules."""

    unit: str
    operators: int
    instructions: Estimate
    peak: Peak
    findings: tuple[Finding, ...]


@dataclass
class Compiled:
    """The graphs of a model, and why Dynamo broke them, by reason."""

    graphs: list[Graph] = field(default_factory=list)
    breaks: dict[str, int] = field(default_factory=dict)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that `compile_repeated_blocks` would compile: of the classes that the model names in
    `_repeated_blocks` (diffusers), else those of which a list of the model's has two or more."""
    named = getattr(model, "_repeated_blocks", None)
    if named:
        return [module for module in model.modules() if type(module).__name__ in named]
    found: list[nn.Module] = []
    for parent in model.modules():
        if isinstance(parent, nn.ModuleList):
            kinds = [type(module) for module in parent]
            blocks = [module for module in parent if kinds.count(type(module)) > 1]
            # Blocks inside blocks are compiled with them.
            inside = {id(inner) for block in found for inner in block.modules()}
            found += [block for block in blocks if id(block) not in inside]
    return found


def compiled_units(model: nn.Module, whole: bool) -> list[nn.Module]:
    """What is compiled of a model: itself, or its repeated blocks where it has any."""
    return [model] if whole else repeated_blocks(model) or [model]


def follow(
    model: nn.Module,
    method: str,
    run: Callable[[], Any],
    rulebook: Rulebook,
    units: list[nn.Module],
    capacity_bytes: int,
) -> Compiled:
    """Run a model's `method` by `run()`, its units compiled, under a fake mode; tell what would be compiled."""
    found = Compiled()
    blocks = [] if units == [model] else units
    keepers: dict[str, Callable[..., Any]] = {}

    def backend(unit: str) -> Callable[..., Any]:
        def keep(graph_module: fx.GraphModule) -> None:
            found.graphs.append(_look(graph_module, unit, rulebook, capacity_bytes))

        return keepers.setdefault(unit, torch_private.inspecting_backend(keep))

    with torch_private.dynamo_session(), torch_private.equal_without_values():
        for block in blocks:
            torch_private.compile_in_place(block, backend(type(block).__name__))
        if not blocks:
            torch_private.compile_method(model, method, backend(_unit_name(model, method)))
        try:
            run()
        finally:
            for module in blocks or [model]:
                torch_private.forget_compiled(module, method)
        found.breaks = torch_private.graph_breaks()
    return found


def _unit_name(model: nn.Module, method: str) -> str:
    return type(model).__name__ + ("" if method == "forward" else f".{method}")


def _look(graph_module: fx.GraphModule, unit: str, rulebook: Rulebook, capacity_bytes: int) -> Graph:
    operators = sum(node.op == "call_function" for node in graph_module.graph.nodes)
    return Graph(
        unit,
        operators,
        estimate_instructions(graph_module),
        peak_bytes(graph_module),
        tuple(inspect_graph(graph_module, rulebook, capacity_bytes)),
    )
