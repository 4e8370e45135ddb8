"""How much a step's collectives carry, counted on meta tensors at an ordinary size."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..apply.prove import quiet
from ..plan import ResolvedPlan
from ..plan.catalog import probes
from ..plan.configuration import configuration
from ..plan.derive import Derivation
from ..plan.probe import Probe

log = logging.getLogger(__name__)

_TEXT, _IMAGE, _SIDE = 512, 4096, 64


@dataclass(frozen=True)
class Payload:
    """``elements`` that a rank puts into the collectives of one call with ``sizes``."""

    elements: int
    sizes: Mapping[str, int]


def payload(model: nn.Module, resolved: ResolvedPlan) -> Payload | None:
    """None for a model without probes, or whose forward reads values: then it takes a run to know."""
    with quiet():
        return _payload(model, resolved)


def _payload(model: nn.Module, resolved: ResolvedPlan) -> Payload | None:
    for probe in probes(type(model).__name__):
        for sizes in (_ordinary(probe), {**probe.sizes[0], "batch": 1}):
            try:
                return Payload(_elements(model, resolved, probe, sizes), sizes)
            except Exception as error:  # noqa: BLE001  sizes that do not go together, another structure's inputs
                log.debug("%s at %s: %s", probe.name, sizes, error)
    return None


def _ordinary(probe: Probe) -> dict[str, int]:
    """One picture of 1024 x 1024, as far as the names of the sizes tell."""
    sizes = {}
    for name, size in probe.sizes[0].items():
        if name == "batch":
            sizes[name] = 1
        elif any(word in name for word in ("text", "txt", "prompt", "caption", "context")):
            sizes[name] = _TEXT
        elif name in ("height", "width"):
            sizes[name] = _SIDE
        elif name in ("image", "tokens", "video"):
            sizes[name] = _IMAGE
        else:
            sizes[name] = size
    return sizes


def _elements(model: nn.Module, resolved: ResolvedPlan, probe: Probe, sizes: Mapping[str, int]) -> int:
    counted = 0

    def count(module: nn.Module, output: Any, style: str) -> None:
        nonlocal counted
        assert isinstance(output, torch.Tensor)
        if style == "norm":
            counted += output.numel() // output.shape[-1] * (1 if resolved.norms[names[module]].kind == "rms" else 3)
        else:
            counted += output.numel() // (resolved.degree if style == "gathered" else 1)

    names: dict[nn.Module, str] = {}
    handles = []
    for name, style in resolved.styles.items():
        if style in ("rowwise", "gathered", "norm", "vocab"):
            module = model.get_submodule(name)
            names[module] = name

            def hook(module: nn.Module, _: Any, output: Any, style: str = style) -> None:
                count(module, output, style)

            handles.append(module.register_forward_hook(hook))
    config = configuration(model)
    probe = Probe(probe.model, probe.name, probe.config, (sizes,), probe.inputs)
    try:
        Derivation.of(model, {"": probe.make(next(iter(probe.inputs)), 0, config=config)})
    finally:
        for handle in handles:
            handle.remove()
    held = sum(resolved.shards[name].numel(0) for name in resolved.held)
    return counted + held
