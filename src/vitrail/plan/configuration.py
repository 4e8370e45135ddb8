"""A model's configuration as a plain mapping, whichever library it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import nn


def configuration(model: nn.Module) -> dict[str, Any]:
    """What ``model`` was made from, by name; empty for a model that has no configuration.

    Of a transformers model, without what every model of that library can be told (which outputs to give, where it was
    loaded from): a plan depends on none of that. Configurations within it are mappings.
    """
    config = getattr(model, "config", None)
    if isinstance(config, Mapping):
        return dict(config)
    if config is not None and hasattr(config, "to_dict"):
        return _own(config.to_dict())
    return {}


def _own(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _own(value) if is_part(key, value) else value for key, value in values.items() if key not in _common()}


def with_words(config: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the flags and words of another, those of its parts too; numbers stay."""
    return {
        **config,
        **{
            key: with_words(config[key], value)
            if isinstance(value, Mapping) and isinstance(config.get(key), Mapping)
            else value
            for key, value in words.items()
        },
    }


def is_part(key: str, value: Any) -> bool:
    """Whether a value is the configuration of a part, as models of text and pictures have."""
    return isinstance(value, Mapping) and (key.endswith("_config") or "model_type" in value)


@cache
def _common() -> frozenset[str]:
    """The keys that every configuration of transformers has, and which release wrote it."""
    from transformers import PretrainedConfig

    kept = {"tie_word_embeddings", "is_encoder_decoder", "model_type"}
    return frozenset({*PretrainedConfig().to_dict(), "dtype", "torch_dtype", "use_cache"} - kept)
