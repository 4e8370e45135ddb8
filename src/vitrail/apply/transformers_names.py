"""Checkpoints of transformers models, whose tensors may bear names of an earlier layout.

Uses the tables that transformers renames by, which are private to it (tested: 5.24): `get_model_conversion_mapping`,
`rename_source_key` and `revert_weight_conversion`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from ..errors import UnsupportedError
from .checkpoint import Entry


def renamed(entries: Mapping[str, Entry], model: nn.Module) -> dict[str, Entry]:
    """The tensors by the names that ``model`` has for them, as its own loader would rename them.

    Raises `UnsupportedError` for tensors that the loader would put together or take apart.
    """
    wanted: dict[str, Any] = model.state_dict()
    transforms: list[Any] = get_model_conversion_mapping(model, None, None)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    prefix: Any = getattr(model, "base_model_prefix", "")
    found: dict[str, Entry] = {}
    for name, entry in sorted(entries.items()):
        new, converter = rename_source_key(name, renamings, converters, prefix, wanted)
        if new not in wanted and name in wanted:
            new, converter = rename_source_key(name, [], [], prefix, wanted)
        if converter is not None and new in wanted:
            raise UnsupportedError(
                f"{entry.file} has {name!r} in an earlier layout, which has to be put together for "
                f"{type(model).__name__}, and a rank's slice cannot be read out of it",
                hint="load the model with transformers once and save it again: model.save_pretrained(folder)",
            )
        found[new] = entry
    return found


def saved_names(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The names under which transformers saves ``tensors``, with the model's own; of a tied table one name alone."""
    marks = {name: torch.empty(0, device="meta") for name in tensors}
    owner = {id(mark): name for name, mark in marks.items()}
    seen: dict[int, str] = {}
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    for name in sorted(tensors, key=lambda name: name in tied):  # the name that is tied to another goes
        if seen.setdefault(id(tensors[name]), name) != name:
            del marks[name]
    reverted = revert_weight_conversion(model, marks)
    return {saved: owner[id(mark)] for saved, mark in reverted.items()}
