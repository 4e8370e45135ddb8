"""What is private in PyTorch and needed to trace without memory. Tested on torch 2.13.

`FakeTensorMode`, `ShapeEnv`, `TorchDispatchMode`, AOTAutograd as a backend, and Dynamo's counters.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
See = Callable[[Any, tuple[Any, ...], dict[str, Any], Callable[..., Any]], Any]


def fake_mode() -> FakeTensorMode:
    """Tensors with shape, dtype and device, and no memory. Sizes that depend on values become symbols."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every operator to `see(operator, arguments, keywords, run)`, which returns its result."""

    def __init__(self, see: See) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.see = see

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.see(func, args, dict(kwargs or {}), func)


def on_storage_freed(tensor: torch.Tensor, call: Callable[[], None]) -> int:
    """Have `call` called when a tensor's memory would be freed. Returns what identifies the memory meanwhile."""
    storage = tensor.untyped_storage()
    weakref.finalize(storage, call)
    return storage_id(tensor)


def storage_id(tensor: torch.Tensor) -> int:
    """What identifies a tensor's memory."""
    return int(tensor.untyped_storage()._cdata)


def inspecting_backend(keep: Callable[[fx.GraphModule], None]) -> Callable[..., Any]:
    """A Dynamo backend that hands each ATen graph to `keep`, and runs it as it is."""
    from torch._dynamo.backends.common import aot_autograd

    def compiler(graph_module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        keep(graph_module)

        def run(arguments: list[Any]) -> Any:
            return graph_module.forward(*arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    made: Callable[..., Any] = aot_autograd(fw_compiler=compiler, inference_compiler=compiler)
    return made


@contextmanager
def quiet() -> Iterator[None]:
    """Without the logs of the tracers: what they complain of is told by the check, in a line."""
    names = ("torch._dynamo", "torch._subclasses", "torch.fx", "torch._functorch", "diffusers", "transformers")
    loggers = [logging.getLogger(name) for name in (*names, "torch._subclasses.fake_tensor")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def dynamo_session() -> Iterator[None]:
    """Dynamo from a clean state, with the device's static shapes."""
    from torch._dynamo import config, reset

    reset()
    torch._dynamo.utils.counters.clear()
    try:
        with config.patch(automatic_dynamic_shapes=False, recompile_limit=64, accumulated_recompile_limit=512):
            yield
    finally:
        reset()


def graph_breaks() -> dict[str, int]:
    """Why Dynamo broke graphs since the session began: each reason in one line, and how often."""
    found: dict[str, int] = {}
    for reason, count in torch._dynamo.utils.counters["graph_break"].items():
        lines = [line.strip() for line in str(reason).strip().splitlines()]
        explained = next((line for line in lines if line.startswith("Explanation:")), "")
        line = f"{lines[0]}: {explained.removeprefix('Explanation:').strip()}" if explained else lines[0]
        found[line] = found.get(line, 0) + count
    return found


@contextmanager
def equal_without_values() -> Iterator[None]:
    """`torch.equal` of tensors without memory: true for equal shapes. vitrail asks it of what it finds equal anyway."""
    original = torch.equal

    def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
        return one.shape == other.shape

    torch.equal = equal  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.equal = original


def compile_in_place(module: nn.Module, backend: Callable[..., Any]) -> None:
    """Have a module's calls compiled, with static shapes."""
    module.compile(backend=backend, dynamic=False)


def compile_method(module: nn.Module, method: str, backend: Callable[..., Any]) -> None:
    """The same for one of its methods; `forward` is the module's call."""
    if method == "forward":
        compile_in_place(module, backend)
    else:
        vars(module)[method] = torch.compile(getattr(module, method), backend=backend, dynamic=False)


def forget_compiled(module: nn.Module, method: str) -> None:
    """Undo both."""
    module._compiled_call_impl = None
    vars(module).pop(method, None)
