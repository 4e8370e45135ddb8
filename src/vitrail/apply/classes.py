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
    if (inner := _unexported(name)) is not None:
        return inner
    close = difflib.get_close_matches(name, probe_names(), 3)
    raise UsageError(
        f"diffusers {diffusers.__version__} has no class {name}",
        hint=f"did you mean {', '.join(close)}?" if close else "name a class, a model's folder or file.py:Class",
    )


def _unexported(name: str) -> type[Any] | None:
    """A class of transformers that has to be imported from its own module, as some pipelines do.

    The module is the one whose name the class's begins with.
    """
    import transformers.models

    lowered = name.lower()
    folders = [info.name for info in pkgutil.iter_modules(transformers.models.__path__)]
    for folder in sorted(folders, key=len, reverse=True):
        if not lowered.startswith(folder.replace("_", "")):
            continue
        try:
            module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        except ImportError:
            continue
        if isinstance(found := getattr(module, name, None), type):
            return found
    return None


def made(cls: type[Any], config: Mapping[str, Any]) -> Any:
    """A model of ``cls`` from the arguments of its constructor, or of its configuration's (transformers)."""
    if cls.__module__.split(".")[0] == "transformers":
        return cls(cls.config_class(**config))
    return cls(**config)
