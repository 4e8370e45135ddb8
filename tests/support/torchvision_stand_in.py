"""The one function of torchvision that diffusers' Cosmos classes call, for machines without torchvision."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import torch

MODULES = (
    "diffusers.models.transformers.transformer_cosmos",
    "diffusers.models.controlnets.controlnet_cosmos",
)


def _resize(image: torch.Tensor, size: list[int], interpolation: str = "nearest") -> torch.Tensor:
    return torch.nn.functional.interpolate(image, size=[int(length) for length in size], mode="nearest")


def stand_in() -> None:
    for name in MODULES:
        module = importlib.import_module(name)
        if not hasattr(module, "transforms"):
            module.transforms = SimpleNamespace(  # type: ignore[attr-defined]
                functional=SimpleNamespace(resize=_resize), InterpolationMode=SimpleNamespace(NEAREST="nearest")
            )
