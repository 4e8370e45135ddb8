"""Printing a tensor of the device: it is copied to the host first, as PyTorch does for its own compiled devices.

Formatting runs a dozen operators, some with data-dependent shapes; on the device each would be counted and compiled.
Confined here: `torch._tensor_str._tensor_str`, private; tested on torch 2.13.
"""

import torch
from torch import _tensor_str


def install() -> None:
    """Wrap PyTorch's formatter. Idempotent."""
    original = _tensor_str._tensor_str
    if getattr(original, "_is_neuron_sim", False):
        return

    def format_on_host(tensor: torch.Tensor, indent: int) -> str:
        on_host = tensor.detach().cpu() if tensor.device.type == "neuron" else tensor
        text: str = original(on_host, indent)  # type: ignore[no-untyped-call]
        return text

    format_on_host._is_neuron_sim = True  # type: ignore[attr-defined]
    _tensor_str._tensor_str = format_on_host
