"""Models and inputs without memory, on the device `neuron`: what a model's code asks of its device is answered truly.

A model that branches on its device (`freqs.device.type == "neuron"`) takes the branch that it will take there, which
tracing on PyTorch's `meta` device would not.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from neuron_sim.location import Location

DEVICE = "neuron"


def move(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace every parameter and buffer by one without memory on the device. Called under a fake mode.

    What `from_pretrained(dtype=…)` loads gets `dtype`, but what the model keeps in float32 (`_keep_in_fp32_modules`, as
    diffusers has it). Buffers that are not saved keep the dtype they were made with; float64 becomes float32, as the
    device has it.
    """
    kept = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                wide = any(part in f"{path}.{name}".split(".") for part in kept)
                made = _like(parameter, torch.float32 if wide and parameter.is_floating_point() else dtype)
                module._parameters[name] = nn.Parameter(made, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                is_saved = name not in module._non_persistent_buffers_set
                module._buffers[name] = _like(buffer, dtype if is_saved else buffer.dtype)


def _like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=torch.float32 if kind == torch.float64 else kind, device=DEVICE)


def inputs(values: Any, dtype: torch.dtype) -> Any:
    """The same values with every tensor on the device; floating ones in `dtype`. Called under a fake mode."""
    if isinstance(values, torch.Tensor):
        kind = dtype if values.is_floating_point() else values.dtype
        return torch.empty(values.shape, dtype=kind, device=DEVICE)
    if isinstance(values, Mapping):
        return {key: inputs(value, dtype) for key, value in values.items()}
    if isinstance(values, list | tuple):
        moved = [inputs(value, dtype) for value in values]
        return moved if isinstance(values, list) else tuple(moved)
    return values


def described(values: Mapping[str, Any]) -> dict[str, str]:
    """The tensors among the inputs, as "bfloat16[1, 4096, 128]"."""
    return {
        name: f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }


def buffers_of_dtype(model: nn.Module, dtypes: tuple[torch.dtype, ...]) -> Iterator[tuple[str, torch.Tensor, Location]]:
    """Buffers of these dtypes that come to the device as they were made, with the line where their module's class
    begins. Called before `move`."""
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            is_saved = name not in module._non_persistent_buffers_set
            if buffer is not None and buffer.dtype in dtypes and not (is_saved and buffer.is_floating_point()):
                yield f"{path}.{name}".lstrip("."), buffer, class_location(type(module))


def class_location(cls: type) -> Location:
    """Where a class is defined."""
    try:
        file, (_, line) = inspect.getsourcefile(cls), inspect.getsourcelines(cls)
    except (OSError, TypeError):
        return Location(f"<{cls.__name__}>", 0, cls.__module__)
    return Location(file or f"<{cls.__name__}>", line, cls.__module__)
