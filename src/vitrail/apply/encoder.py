"""Loading a transformers model whose ranks each read their slice."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError, UsageError
from ..plan.skeleton import skeleton, tied_groups
from .checkpoint import Checkpoint
from .files import TRANSFORMERS, find
from .load import DtypeRule, Request
from .shards import ShardCheckpoint


class EncoderRequest(Request):
    """A text or picture encoder to load: `Request` with transformers' configuration, names and rules."""

    def skeleton(self) -> nn.Module:
        """The model with its parameters on meta. Buffers are real: what ``__init__`` computed cannot be loaded."""
        if self.config:
            raise UsageError(f"from_pretrained got {next(iter(self.config))!r}, which a sharded load does not take")
        where = f"{self.path}/{self.subfolder}" if self.subfolder else self.path
        try:
            config = self.cls.config_class.from_pretrained(self.path, subfolder=self.subfolder or "", **self.hub)
        except OSError as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"there is no model configuration at {where}: {reason}") from None
        default = torch.get_default_dtype()
        try:
            torch.set_default_dtype(self.dtype or default)
            model = skeleton(lambda: self.cls(config))
        finally:
            torch.set_default_dtype(default)
        assert isinstance(model, nn.Module)
        model.tie_weights()  # type: ignore[operator]
        config.name_or_path = self.path
        return model

    def files(self, model: nn.Module) -> Checkpoint:
        from .transformers_names import renamed

        found = find(self.path, self.subfolder, self.variant, self.hub, TRANSFORMERS)
        if isinstance(found, ShardCheckpoint):  # ours: by the model's names
            return found
        checkpoint = Checkpoint(renamed(found.entries, model))
        # A table under several names is in the files under one.
        for names in tied_groups(model):
            there = next((name for name in names if name in checkpoint.entries), None)
            if there is not None:
                checkpoint.entries |= dict.fromkeys(names, checkpoint.entries[there])
        return checkpoint

    def may_lack(self, model: nn.Module, name: str) -> bool:
        patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or []
        return any(re.search(pattern, name) for pattern in patterns)

    def dtype_for(self, model: nn.Module) -> DtypeRule:
        """transformers' rule: some modules stay in float32 beside float16, a few of them beside bfloat16 too."""
        dtype = self.dtype or torch.get_default_dtype()
        keep: list[str] = []
        if dtype == torch.float16:
            keep += _names(model, "_keep_in_fp32_modules")
        if dtype in (torch.float16, torch.bfloat16):
            keep += _names(model, "_keep_in_fp32_modules_strict")
        return DtypeRule(dtype, tuple(keep))


def _names(model: nn.Module, attribute: str) -> list[str]:
    value: Any = getattr(model, attribute, None) or []
    return [value] if isinstance(value, str) else list(value)
