"""Inputs for a model nobody wrote a probe for: guessed from its forward's parameters, tried on meta tensors."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedError
from .configuration import configuration
from .derive import Derivation

BATCH, TOKENS, TEXT, SIDE, FRAMES = 2, 12, 7, 8, 3
_TRIES = 3000
_VECTORS = re.compile(r"pool|vec|global|clip_embed|class_emb|^y$|^emb$|temb|style|^c$|^cond$")
_TEXTS = re.compile(r"encoder_hidden|context|text|txt|prompt|caption|cond|ctx|memory|kv")
_TIMES = re.compile(r"time|^t$|sigma|guidance|noise_level|^ts$")


def guess_inputs(model: nn.Module) -> dict[str, Any]:
    """Keyword arguments that ``model`` (parameters on meta) runs with. Optional parameters are left at their defaults.

    Raises `UnsupportedError` that names the parameters, when nothing that was tried runs.
    """
    signature = inspect.signature(model.forward)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [name for name, item in signature.parameters.items() if item.kind in kinds and item.default is item.empty]
    widths = _widths(model)
    last = ""
    options = [list(_options(name, index, widths, model)) for index, name in enumerate(needed)]
    for count, choice in enumerate(itertools.product(*options)):
        if count >= _TRIES:
            break
        arguments = dict(zip(needed, (make() for make in choice), strict=True))
        try:
            Derivation.of(model, {"guessed": arguments})
        except UnsupportedError as error:
            last = error.message
            continue
        return arguments
    raise UnsupportedError(
        f"no inputs could be guessed for {type(model).__name__}.forward({', '.join(needed)}); the last try: {last}",
        hint="give them: derive_plan(model, inputs={...}), or a function vitrail_inputs(model) beside the class",
    )


def _widths(model: nn.Module) -> list[int]:
    """The widths that a model's first layers take, in the order of its modules."""
    found: dict[int, None] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            found.setdefault(module.in_features)
        elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            found.setdefault(module.in_channels)
    return list(found)


def _options(name: str, index: int, widths: list[int], model: nn.Module) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(index)

    def floats(*shape: int) -> Any:
        return lambda: torch.randn(shape, generator=generator)

    lowered = name.lower()
    if "mask" in lowered:
        yield lambda: torch.ones(BATCH, TEXT, dtype=torch.bool)
        yield lambda: torch.ones(BATCH, TOKENS, dtype=torch.bool)
        return
    if lowered.endswith("ids") or ("tokens" in lowered and "hidden" not in lowered):
        yield lambda: torch.zeros(TEXT if "t" in lowered[:3] else TOKENS, 3)
        yield lambda: torch.randint(0, 8, (BATCH, TEXT), generator=generator)
        return
    if _TIMES.search(lowered):
        yield lambda: torch.rand(BATCH, generator=generator)
        yield lambda: torch.randint(0, 100, (BATCH,), generator=generator)
        for width in widths:
            yield floats(BATCH, width)
        return
    ordered = _preferred(lowered, widths, model)
    if _VECTORS.search(lowered):
        for width in ordered:
            yield floats(BATCH, width)
    length = TEXT if _TEXTS.search(lowered) else TOKENS
    convolutions = [type(module) for module in model.modules() if isinstance(module, (nn.Conv2d, nn.Conv3d))]
    if not _TEXTS.search(lowered) and convolutions:
        for width in ordered:
            if nn.Conv3d in convolutions:
                yield floats(BATCH, width, FRAMES, SIDE, SIDE)
            yield floats(BATCH, width, SIDE, SIDE)
    for width in ordered:
        yield floats(BATCH, length, width)
    if not _VECTORS.search(lowered):
        for width in ordered:
            yield floats(BATCH, width)
            yield floats(BATCH, width, SIDE, SIDE)


def _preferred(name: str, widths: list[int], model: nn.Module) -> list[int]:
    """The widths, those the configuration names for such an input first."""
    config = configuration(model)
    if _TEXTS.search(name):
        keys = re.compile(r"text|joint|cross|context|caption|cond|txt")
    else:
        keys = re.compile(r"^in_|in_channels|channels|input")
    named = [value for key, value in config.items() if keys.search(key) and isinstance(value, int)]
    return list(dict.fromkeys([value for value in named if value in widths] + widths))
