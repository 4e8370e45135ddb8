"""What is private in PyTorch and needed here. Tested on torch 2.13."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import GraphModule, Node

Compiler = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def run_aot_autograd(
    graph: GraphModule, inputs: Sequence[Any], inference: Compiler, forward: Compiler, backward: Compiler
) -> Callable[..., Any]:
    """Let AOTAutograd make functional ATen graphs of Dynamo's, and compile them. Raises what the compilers raise."""
    from torch._dynamo.backends.common import aot_autograd

    made = aot_autograd(fw_compiler=forward, bw_compiler=backward, inference_compiler=inference)
    compiled: Callable[..., Any] = made(graph, inputs)
    return compiled


def results_that_are_inputs() -> list[int | None] | None:
    """For each result of the inference graph that AOTAutograd has compiled now: the input that it is, or None.

    None altogether where AOTAutograd does more at run time than to call the graph: where an input is written to,
    results are made from others, or gradients are recorded. Reads AOTAutograd's metadata from the tracing context, as
    Inductor does.
    """
    from torch._functorch._aot_autograd.schemas import OutputType
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    seen = context.fw_metadata if context is not None else None
    if seen is None or seen.tokens or seen.num_intermediate_bases or seen.grad_enabled_mutation is not None:
        return None
    if any(info.mutates_data or info.mutates_metadata or info.mutates_storage_metadata for info in seen.input_info):
        return None
    plain = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.alias_of_input)
    found: list[int | None] = []
    for info in seen.output_info:
        if not issubclass(info.raw_type, torch.Tensor):
            return None
        if info.output_type is OutputType.is_input:
            found.append(info.base_idx)
        elif info.output_type in plain:
            found.append(None)
        else:
            return None
    return found


def code_being_compiled() -> tuple[str, str] | None:
    """The place ("file:line") and the name of the function that Dynamo compiles now."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        code = InstructionTranslator.current_tx().f_code
    except AttributeError:
        return None  # the backend was not called by Dynamo
    return f"{code.co_filename}:{code.co_firstlineno}", code.co_qualname


def source_of(node: Node) -> str:
    """Dynamo's name of an input, such as `L['self']._modules['norm']._parameters['weight']`, or nothing."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that Dynamo runs without looking into it."""
    from torch._dynamo import disable

    wrapped: Callable[..., Any] = disable(function, reason="a compiled graph of the neuron device")  # type: ignore[no-untyped-call]
    return wrapped


def compile_ahead(graph: GraphModule, inputs: list[torch.Tensor], file: str) -> str:
    """AOTInductor's package of a graph on the host, written to `file`. Raises whatever Inductor raises."""
    from torch._guards import compile_context, tracing
    from torch._inductor.compile_fx import compile_fx_aot
    from torch._inductor.package.package import package_aoti

    # Called while another graph is traced, whose modes and context are none of Inductor's business here.
    with without_modes(), tracing(None), compile_context(None), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside Inductor
        files: Any = compile_fx_aot(graph, list(inputs), config_patches={"aot_inductor.package": True})
        return str(package_aoti(file, files))


def twin_for_host(group: str, name: str) -> str:
    """Register under `name` a twin of a process group of the device that takes tensors of the host; return the name.

    It has the same backend object, so that the device's rules, counts and agreement of ranks apply to it too.
    """
    from torch._C import _distributed_c10d

    c10d: Any = _distributed_c10d
    try:
        c10d._resolve_process_group(name)
    except (RuntimeError, ValueError):
        original = c10d._resolve_process_group(group)
        twin = c10d.ProcessGroup(c10d.HashStore(), original.rank(), original.size())
        backend = original._get_backend(torch.device("neuron"))
        twin._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.CUSTOM, backend)
        twin._set_group_name(name)
        c10d._register_process_group(name, twin)
        _twins.append(twin)
    return name


_twins: list[Any] = []  # PyTorch's registry holds them weakly


def without_modes() -> AbstractContextManager[Any]:
    """Real tensors can be used inside, although a compiler is called while everything is traced."""
    from torch.utils._python_dispatch import _disable_current_modes

    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


def is_symbolic(value: Any) -> bool:
    """Whether an input of a graph is a symbolic number, or a tensor with symbolic sizes."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return True
    if not isinstance(value, torch.Tensor):
        return False
    return any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))
