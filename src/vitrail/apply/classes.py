"""The classes of diffusers and transformers by name."""

from __future__ import annotations

import difflib
import importlib
import logging
import pkgutil
from collections.abc import Mapping
from typing import Any

from ..errors import UsageError
from ..plan.catalog import probe_names

log = logging.getLogger(__name__)


def model_class(name: str) -> type[Any]:
    """The class of diffusers, or else of transformers, called ``name``. Raises `UsageError` with what is close."""
    import diffusers
    import diffusers.models

    if isinstance(found := getattr(diffusers, name, None), type):
        return found
    for info in pkgutil.walk_packages(diffusers.models.__path__, "diffusers.models."):
        if "transformer" not in info.name and "controlnet" not in info.name:
            continue
        try:
            module = importlib.import_module(info.name)
        except Exception as error:  # noqa: BLE001  a module whose optional dependency is missing
            log.debug("%s cannot be imported: %s", info.name, error)
            continue
        if isinstance(found := getattr(module, name, None), type):
            return found
    import transformers

    if isinstance(found := getattr(transformers, name, None), type):
        return found
    if (own := _of_pipelines(name)) is not None:
        return own
    close = difflib.get_close_matches(name, probe_names(), 3)
    raise UsageError(
        f"diffusers {diffusers.__version__} has no class {name}",
        hint=f"did you mean {', '.join(close)}?" if close else "name a class, a model's folder or file.py:Class",
    )


def _of_pipelines(name: str) -> type[Any] | None:
    """A class that a pipeline's package makes for its own checkpoints from one of transformers."""
    import diffusers.pipelines

    for info in pkgutil.iter_modules(diffusers.pipelines.__path__, "diffusers.pipelines."):
        if not info.ispkg:
            continue
        try:
            found = getattr(importlib.import_module(info.name), name, None)
        except Exception as error:  # noqa: BLE001  a package whose optional dependency is missing
            log.debug("%s cannot be imported: %s", info.name, error)
            continue
        if isinstance(found, type):
            return found
    return None


def made(cls: type[Any], config: Mapping[str, Any]) -> Any:
    """A model of ``cls`` from the arguments of its constructor, or of its configuration's (transformers).

    Which configuration that is, is said by its ``model_type`` where there is one.
    """
    from transformers import AutoConfig, PreTrainedModel

    if not issubclass(cls, PreTrainedModel):
        return cls(**config)
    own: Any = cls.config_class
    values = dict(config)
    kind = values.pop("model_type", own.model_type)
    return cls(own(**values) if kind == own.model_type else AutoConfig.for_model(kind, **values))
