"""One recording of a model: all the ways of calling it, on meta tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ...errors import UnsupportedError
from .calls import Calls, module_scopes
from .numbers import traced_attributes
from .record import Recorder


class _Autocast(torch.autocast):
    """Autocast, which does not know the meta device, as nothing there."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "meta":
            super().__init__("cpu", enabled=False)
        else:
            super().__init__(device_type, *args, **kwargs)


@contextmanager
def _flex_attention(calls: Calls) -> Iterator[None]:
    """Flex attention, which has no meta kernel, as the attention it computes."""
    import torch.nn.attention.flex_attention as flex

    original = flex.flex_attention

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        return calls.attention(query, key, value)

    flex.flex_attention = attention
    try:
        yield
    finally:
        flex.flex_attention = original


@contextmanager
def autocast_on_meta() -> Iterator[None]:
    places = [(torch, torch.autocast), (torch.amp, torch.amp.autocast)]
    try:
        for place, _ in places:
            place.autocast = _Autocast  # type: ignore[attr-defined]
        yield
    finally:
        for place, original in places:
            place.autocast = original  # type: ignore[attr-defined]


def _hint(error: BaseException) -> str:
    text = str(error).lower()
    if any(word in text for word in ("meta", "item()", "tolist", "data-dependent", "nonzero", "unallocated")):
        return "a forward that reads values of tensors cannot be planned: pass a plan (plan=...)"
    return "check that the inputs are what this configuration's forward takes"


def first_line(error: BaseException) -> str:
    """An error's kind and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def record(
    model: nn.Module, calls: Mapping[str, Mapping[str, Any]], borrowed: Mapping[str, str] | None = None
) -> Recorder:
    """Run every call of ``calls`` (keyword arguments by name) on ``model`` and note what happens to dimensions.

    Model and inputs are on meta: nothing is computed. Raises `UnsupportedError` for a model that cannot be run so,
    with the module and the operation at which it stopped.
    """
    recorder = Recorder(model, borrowed)
    for name, arguments in calls.items():
        with ExitStack() as stack:
            calls_mode = Calls(recorder)
            for context in (torch.no_grad(), autocast_on_meta(), _flex_attention(calls_mode), module_scopes(recorder)):
                stack.enter_context(context)
            recorder.attributes.update(stack.enter_context(traced_attributes(model)))
            stack.enter_context(calls_mode)
            stack.enter_context(recorder)
            recorder.call = name
            try:
                output = model(**arguments)
            except Exception as error:  # whatever a stranger's forward raises
                where = recorder.where
                raise UnsupportedError(
                    f"{type(model).__name__} cannot be traced on meta tensors (call {name!r}): in "
                    f"{where or 'its own forward'}: {first_line(error)}",
                    hint=_hint(error),
                ) from error
            recorder.finish(output)
    return recorder
