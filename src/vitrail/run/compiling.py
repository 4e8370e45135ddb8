"""Compiling what a pipeline runs: by repeated blocks, which compile once for all of them, or whole.

A pipeline calls its transformer and its text encoders, but of its VAE it calls ``decode``: compiling ``pipeline.vae``
itself would compile nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedError, UsageError

PARTS = ("text_encoder", "transformer", "vae")
# A pipeline meets few kinds of block, but each in many sizes, and beyond the limit Dynamo runs them uncompiled.
RECOMPILE_LIMIT = 256


@dataclass(frozen=True)
class Region:
    """What is compiled of one component: ``count`` modules of the class ``kind``, or its method ``decode``."""

    component: str
    kind: str
    count: int

    def __str__(self) -> str:
        return f"{self.component}: {self.count} x {self.kind}" if self.count > 1 else f"{self.component}: {self.kind}"


def compile_pipeline(
    pipeline: Any,
    *,
    backend: str | None = None,
    whole: bool = False,
    parts: Sequence[str] = PARTS,
) -> list[Region]:
    """Have ``torch.compile`` compile what ``pipeline`` calls, at the first call of each shape; what that is.

    ``backend`` is "neuron" on a neuron device and "inductor" elsewhere. ``parts`` are any of text_encoder, transformer
    (or unet), vae. Blocks that repeat are compiled one by one, so that equal ones share a graph; ``whole`` compiles
    each model in one graph. Shapes are static: another height, width or batch compiles again, another number of steps
    does not. Sharded or not makes no difference.

    Raises `UsageError` for an unknown part or backend, `UnsupportedError` for a pipeline with nothing to compile.
    """
    if unknown := sorted(set(parts) - set(PARTS)):
        raise UsageError(f"unknown parts: {', '.join(unknown)}", hint=f"known: {', '.join(PARTS)}")
    options = {"backend": _backend(backend, pipeline.device.type), "dynamic": False, "recompile_limit": RECOMPILE_LIMIT}
    regions = []
    for name, component in pipeline.components.items():
        if not isinstance(component, nn.Module):
            continue
        part = next((part for part in PARTS if _is(part, name)), None)
        if part not in parts:
            continue
        regions += (
            _compile_decode(name, component, options) if part == "vae" else _compile(name, component, options, whole)
        )
    if not regions:
        raise UnsupportedError(f"{type(pipeline).__name__} has nothing to compile among {', '.join(parts)}")
    return regions


def _is(part: str, name: str) -> bool:
    return name.startswith(("transformer", "unet", "controlnet") if part == "transformer" else part)


def _backend(name: str | None, device: str) -> str:
    known = torch.compiler.list_backends(exclude_tags=())
    chosen = name or ("neuron" if device == "neuron" else "inductor")
    if chosen not in known:
        raise UsageError(
            f"torch.compile has no backend {chosen!r}",
            hint=f"known: {', '.join(known)}; the package of a device brings its backend",
        )
    return chosen


def _compile(name: str, model: nn.Module, options: dict[str, Any], whole: bool) -> list[Region]:
    blocks = [] if whole else list(repeated_blocks(model))
    if not blocks:
        model.compile(**options)
        return [Region(name, type(model).__name__, 1)]
    counts: dict[str, int] = {}
    for block in blocks:
        block.compile(**options)
        counts[type(block).__name__] = counts.get(type(block).__name__, 0) + 1
    return [Region(name, kind, count) for kind, count in counts.items()]


def _compile_decode(name: str, vae: nn.Module, options: dict[str, Any]) -> list[Region]:
    if not hasattr(vae, "decode"):
        return []
    decode: Any = vae.decode
    vars(vae)["decode"] = torch.compile(decode, **options)
    return [Region(name, "decode", 1)]


def repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The blocks of ``model`` that repeat.

    Those that its class names (diffusers' ``_repeated_blocks``), or else the items of its outermost lists of at least
    two modules of one class.
    """
    named = getattr(model, "_repeated_blocks", None)
    if named:
        yield from (module for module in model.modules() if type(module).__name__ in named)
        return
    yield from _listed(model)


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.ModuleList):
        kinds = [type(item) for item in module]
        if len(kinds) > 1 and all(kinds.count(kind) > 1 and _runs(kind) for kind in kinds):
            yield from module
            return
    for child in module.children():
        yield from _listed(child)


def _runs(kind: type[nn.Module]) -> bool:
    """Whether the class has a forward of its own; a list of lists has none."""
    return kind.forward is not nn.Module.forward
