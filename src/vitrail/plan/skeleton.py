"""Models without weights: parameters on the meta device, everything else as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

M = TypeVar("M", bound=nn.Module)


def skeleton(build: Callable[[], M]) -> M:
    """The model that ``build`` makes, with its parameters on meta. Buffers are real: ``__init__`` computed them."""
    with _parameters_on_meta(_EmptyOnMeta()):
        model = build()
    if any(tensor.is_meta for tensor in _own_tensors(model)):  # made with torch.empty, and filled after that
        with _parameters_on_meta(nullcontext()):
            model = build()
    return model


def _own_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Buffers, and tensors that modules keep as plain attributes."""
    yield from model.buffers()
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))


class _EmptyOnMeta(TorchFunctionMode):
    """``torch.empty``, which modules make their parameters with, allocates nothing; every other factory is real."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.empty and (kwargs or {}).get("device") is None:
            return func(*args, **{**(kwargs or {}), "device": "meta"})
        return func(*args, **(kwargs or {}))


@contextmanager
def _parameters_on_meta(factories: AbstractContextManager[Any]) -> Iterator[None]:
    """Parameters registered inside are on meta, and get no values."""

    def to_meta(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device.type == "meta":
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        with factories:
            yield
    finally:
        handle.remove()


def tied_parameters(model: nn.Module) -> dict[str, str]:
    """Parameters that several modules hold: by each name another of its names.

    A module that the model has under several names is one module: its parameters are not tied by that.
    """
    return {name: names[1] if name == names[0] else names[0] for names in tied_groups(model) for name in names}


def tied_groups(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that several modules hold."""
    owners: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)
    return [names for names in owners.values() if len(names) > 1]
