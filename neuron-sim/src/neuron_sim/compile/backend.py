"""The Dynamo backend `neuron`: from Dynamo's graph to a callable.

Source of the steps and of what is refused: the public documentation and the pre-release tree of the native backend:
Dynamo, static shapes, AOTAutograd, a compiler that is no Inductor.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from neuron_sim import _core, env, policy
from neuron_sim.compile import torch_private
from neuron_sim.compile.artifacts import artifact, totals
from neuron_sim.compile.graphdata import UnsupportedGraphError, write_down
from neuron_sim.errors import ConfigurationError, NeuronRuleError

torch_private.honour_backend_contexts()


def neuron(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's for the device.

    `example_inputs` are traced tensors. Raises `ConfigurationError` for a mode or an option, of which there are none;
    `NeuronRuleError` for symbolic shapes and for inputs on the host where copying them is turned off;
    `UnsupportedGraphError` for what no program can hold. Dynamo wraps them in its BackendCompilerFailed.
    """
    _refuse_options(mode, options)
    _core.ensure_ready()
    _refuse_symbols(example_inputs)
    place = _Placement.of(graph, example_inputs)
    place.refuse_host_inputs(example_inputs)
    totals.aot_autograd += 1

    def compiler(is_inference: bool) -> torch_private.Compiler:
        def compile_graph(aten: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            return place.compile(aten, is_inference)

        return compile_graph

    return torch_private.run_aot_autograd(graph, example_inputs, compiler(True), compiler(False), compiler(False))


neuron.backend_ctx_ctor = torch_private.StaticShapes  # type: ignore[attr-defined]


def _refuse_options(mode: str | None, options: Mapping[str, Any] | None) -> None:
    if mode not in (None, "default"):
        raise ConfigurationError(f"torch.compile(backend='neuron', mode={mode!r}): there is no such mode; leave it out")
    if options:
        raise ConfigurationError(
            f"torch.compile(backend='neuron', options=…): unknown option {', '.join(map(repr, options))}; there are "
            "none: the compiler is set by NEURON_CC_FLAGS, NEURON_COMPILER_OPT_LEVEL and NEURON_SIM_CODEGEN"
        )


def _refuse_symbols(inputs: Sequence[Any]) -> None:
    dynamic = [place for place, value in enumerate(inputs) if torch_private.is_symbolic(value)]
    if dynamic:
        raise NeuronRuleError(
            "Dynamic shapes detected in the model, but torch-neuronx requires static shapes: "
            f"input {dynamic[0]} of the graph has a size that is not fixed; compile with dynamic=False and without "
            "mark_dynamic: each new shape then compiles once"
        )


class _Placement:
    """Where a graph's tensors are: the core they are on, and whether everything is on the host."""

    def __init__(self, core: int, all_on_host: bool) -> None:
        self.core = core
        self.all_on_host = all_on_host

    @classmethod
    def of(cls, graph: GraphModule, inputs: Sequence[Any]) -> "_Placement":
        """Where Dynamo's graph is. Raises `UnsupportedGraphError` when it is on several cores or elsewhere."""
        values = [node.meta.get("example_value") for node in graph.graph.nodes]
        devices = {v.device for v in (*values, *inputs) if isinstance(v, torch.Tensor)}
        cores = sorted({device.index or 0 for device in devices if device.type == "neuron"})
        if others := sorted({device.type for device in devices} - {"neuron", "cpu", "meta"}):
            raise UnsupportedGraphError(
                f"the graph has tensors on {', '.join(others)}, and neuron cannot compile for it"
            )
        if len(cores) > 1:
            raise UnsupportedGraphError(
                f"the graph has tensors on the cores {', '.join(map(str, cores))}; a program runs on one core: compile "
                "what is on each by itself"
            )
        has_tensors = any(isinstance(value, torch.Tensor) for value in inputs)
        return cls(cores[0] if cores else _core.current_core(), not cores and has_tensors)

    def refuse_host_inputs(self, inputs: Sequence[Any]) -> None:
        """Raises `NeuronRuleError` where inputs on the host are not to be copied."""
        if not env.DYNAMO_DISABLE_CPU_AUTOCOPY.read():
            return
        for place, value in enumerate(inputs):
            if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim() > 0:
                raise NeuronRuleError(
                    f"input {place} of the graph, {tuple(value.shape)} {value.dtype}, is on cpu device, expected "
                    f"neuron ({env.DYNAMO_DISABLE_CPU_AUTOCOPY.name}=1); move it with .to('neuron') first"
                )

    def compile(self, aten: GraphModule, is_inference: bool) -> Callable[..., Any]:
        """Compile a graph of AOTAutograd's. The callable empties the list it is given."""
        narrow = policy.current().actions["float64"] == "convert" and policy.current().strictness != "off"
        moves = is_inference and self.all_on_host and not env.RETAIN_DEVICE_MODE.read()
        with torch_private.without_modes(), torch.no_grad():
            data = write_down(aten, narrow, moves)
            runner = artifact(data, self.core).run
        backwards = sorted(data.ignored, reverse=True)

        def run(arguments: list[Any]) -> list[Any]:
            for place in backwards:
                del arguments[place]
            return runner(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run
