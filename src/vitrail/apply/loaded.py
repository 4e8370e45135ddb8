"""Which classes of transformers the pipelines of the installed diffusers load."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import pkgutil
import typing
from collections.abc import Iterator
from typing import Any

log = logging.getLogger(__name__)


@functools.cache
def loaded_classes() -> dict[str, tuple[str, ...]]:
    """The models of transformers that pipelines are annotated to be made with, by name, and those pipelines' names.

    A pipeline annotated with a base class (``GemmaPreTrainedModel``) takes any of its models: the base is listed.
    """
    import diffusers
    import diffusers.pipelines
    import transformers

    found: dict[str, set[str]] = {}
    for info in pkgutil.walk_packages(diffusers.pipelines.__path__, "diffusers.pipelines."):
        try:
            module = importlib.import_module(info.name)
        except Exception as error:  # noqa: BLE001  a module whose optional dependency is missing
            log.debug("%s cannot be imported: %s", info.name, error)
            continue
        for name, value in vars(module).items():
            if not inspect.isclass(value) or value.__module__ != info.name:
                continue
            if not issubclass(value, diffusers.DiffusionPipeline):
                continue
            for cls in _classes_in(typing.get_type_hints(value.__init__)):
                if issubclass(cls, transformers.PreTrainedModel) and cls.__module__.startswith("transformers."):
                    found.setdefault(cls.__name__, set()).add(name)
    return {name: tuple(sorted(pipelines)) for name, pipelines in sorted(found.items())}


def _classes_in(annotation: Any) -> Iterator[type[Any]]:
    if isinstance(annotation, dict):
        for item in annotation.values():
            yield from _classes_in(item)
    elif inspect.isclass(annotation):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _classes_in(argument)
