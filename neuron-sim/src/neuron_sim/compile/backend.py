"""The Dynamo backend `neuron`: from Dynamo's graph to a callable.

Source of the steps and of what is refused: the public documentation and the pre-release tree of the native backend:
Dynamo, static shapes, AOTAutograd, a compiler that is no Inductor.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from neuron_sim import _core, env, policy
from neuron_sim.compile import dumps, notes, record, shortcut, static_shapes, torch_private
from neuron_sim.compile.artifacts import artifact, totals
from neuron_sim.compile.graphdata import UnsupportedGraphError, write_down
from neuron_sim.compile.inspect import enforce, inspect_graph
from neuron_sim.compile.tracekey import NoKeyError, TraceKey, trace_key
from neuron_sim.errors import ConfigurationError, NeuronRuleError

static_shapes.honour_backend_contexts()


def neuron(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's for the device.

    `example_inputs` are traced tensors. Raises `ConfigurationError` for a mode or an option, of which there are none;
    `NeuronRuleError` for symbolic shapes, for inputs on the host where copying them is turned off, and for what the
    rulebook refuses in the graph; `UnsupportedGraphError` for what no program can hold. Dynamo wraps them in its
    BackendCompilerFailed.
    """
    _refuse_options(mode, options)
    _core.ensure_ready()
    _refuse_symbols(example_inputs)
    dumps.dump(graph, "dynamo")
    place = Placement.of(graph, example_inputs)
    place.refuse_host_inputs(example_inputs)
    try:
        key = None if place.all_on_host else trace_key(graph, example_inputs, place.core)
        why_no_key = "all of it is on the host" if key is None else ""
    except NoKeyError as error:
        key, why_no_key = None, str(error)
    seen = record.begin(graph, example_inputs, why_no_key)
    if key is not None and (found := shortcut.find(key, place.core)):
        seen.add(found.artifact, "inference")
        findings = notes.read(found.findings, graph, policy.current())
        seen.findings += [finding.message for finding in findings]
        enforce(findings, policy.current())
        return torch_private.untraced(found.callable(seen.count))
    totals.aot_autograd += 1
    return Compilation(graph, place, key, seen).run(example_inputs)


neuron.backend_ctx_ctor = static_shapes.StaticShapes  # type: ignore[attr-defined]


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


class Placement:
    """Where a graph's tensors are: the core they are on, and whether everything is on the host."""

    def __init__(self, core: int, all_on_host: bool) -> None:
        self.core = core
        self.all_on_host = all_on_host

    @classmethod
    def of(cls, graph: GraphModule, inputs: Sequence[Any]) -> "Placement":
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


class Compilation:
    """One graph of Dynamo's on its way through AOTAutograd, which makes one graph of it, or two for training."""

    def __init__(self, graph: GraphModule, place: Placement, key: TraceKey | None, seen: record.Graph) -> None:
        self._graph = graph
        self._place = place
        self._key = key
        self._seen = seen

    def run(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The callable for Dynamo. Raises what `neuron` does."""
        compilers = [partial(self._compile, kind) for kind in ("inference", "forward", "backward")]
        return torch_private.run_aot_autograd(self._graph, inputs, *compilers)

    def _compile(self, kind: str, aten: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        dumps.dump(aten, kind)
        book = policy.current()
        narrow = book.actions["float64"] == "convert" and book.strictness != "off"
        moves = kind == "inference" and self._place.all_on_host and not env.RETAIN_DEVICE_MODE.read()
        with torch_private.without_modes(), torch.no_grad():
            findings = inspect_graph(aten, book, _core.memory_stats(self._place.core)["capacity"])
            self._seen.findings += [finding.message for finding in findings]
            enforce(findings, book)
            data = write_down(aten, narrow, moves)
            found = artifact(data, self._place.core)
            self._seen.add(found, kind)
            if self._key is not None and kind == "inference":
                shortcut.keep(self._key, data, found, notes.write(findings, self._graph))
        runner, count = found.run, self._seen.count if kind != "backward" else None
        backwards = sorted(data.ignored, reverse=True)

        def run(arguments: list[Any]) -> list[Any]:
            if count is not None:
                count.runs += 1
            for place in backwards:
                del arguments[place]
            return runner(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run
