"""Dynamo's automatic dynamic shapes, off for this backend only. Private in PyTorch; tested on 2.13.

It imports nothing of PyTorch before it must: it is read while `import torch` registers the device.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any


class StaticShapes(AbstractContextManager[None]):
    """Turns Dynamo's automatic dynamic shapes off, while a function that is compiled for the device is called.

    Otherwise the second shape that Dynamo sees makes it compile for symbolic sizes. `torch.compile(dynamic=False)`
    does the same, by the same means; `dynamic=True` stays what the caller asked for, and is refused.
    """

    def __init__(self) -> None:
        self._undo: Callable[[], None] | None = None

    def __enter__(self) -> None:
        from torch._dynamo import config

        # Where `dynamic=False` has done it: Dynamo undoes both in the order in which they were done, so that undoing
        # this one, too, would put back what `dynamic=False` had set.
        if config.automatic_dynamic_shapes:
            self._undo = config._make_closure_patcher(automatic_dynamic_shapes=False)()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        if self._undo is not None:
            self._undo()


def honour_backend_contexts() -> None:
    """Have `torch.compile` enter a backend's `backend_ctx_ctor`, as `torch._dynamo.optimize` does.

    `torch.compile` wraps a backend and hides the attribute; Dynamo looks for it on the wrapper. Idempotent.
    """
    import torch

    wrapper = torch._TorchCompileWrapper
    original = wrapper.__init__
    if getattr(original, "_neuron_sim", False):
        return

    def init(self: Any, *arguments: Any, **keywords: Any) -> None:
        original(self, *arguments, **keywords)  # type: ignore[no-untyped-call]
        context = getattr(self.compiler_fn, "backend_ctx_ctor", None)
        if context is not None:
            self.backend_ctx_ctor = context

    init._neuron_sim = True  # type: ignore[attr-defined]
    wrapper.__init__ = init  # type: ignore[method-assign]
