"""Mixed precision: which dtypes `torch.autocast("neuron")` may use."""

import torch


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that autocast accepts on the device."""
    return [torch.float32, torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    """Whether the device computes in bfloat16. Every simulated one does."""
    return True
