"""What a plan depends on besides its rules: the structure of a model, and the sources of everything in it."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .derive import RULES_VERSION
from .derive.numbers import holders
from .derive.write import Patterns


def structure(model: nn.Module) -> dict[str, Any]:
    """The parts of a model that do not depend on its sizes.

    Tensors by pattern with their number of dimensions, modules by pattern with their class, and what in the
    configuration is no number: flags and words.
    """
    modules = dict(model.named_modules())
    patterns = Patterns(modules)
    tensors = sorted({(patterns.of(name), parameter.dim()) for name, parameter in model.named_parameters()})
    classes = sorted({(patterns.of(name), _name(type(module))) for name, module in modules.items()})
    return {"tensors": tensors, "classes": classes, "config": _words(getattr(model, "config", {}))}


def _words(config: Any) -> dict[str, Any]:
    return {
        key: value
        for key, value in sorted(config.items())
        if not key.startswith("_") and isinstance(value, (bool, str))
    }


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def key_of(model: nn.Module) -> str:
    """A digest of everything that shapes a plan: structure, sources and the version of the rules."""
    content = json.dumps([RULES_VERSION, structure(model), sorted(sources(model).items())], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def sources(model: nn.Module) -> dict[str, str]:
    """A digest of the file of every class reachable in ``model``: modules, processors and what they derive from.

    With them go the files of the functions that those files import from the same package, or from beside them.
    PyTorch's own stand as its version.
    """
    found: dict[str, str] = {}
    for cls in _classes(model):
        for base in cls.__mro__:
            package = base.__module__.split(".")[0]
            if package == "torch":
                found["torch"] = ".".join(torch.__version__.split(".")[:2])
            elif package not in sys.stdlib_module_names:
                found[base.__module__] = _digest(base)
    for name in [name for name in found if name != "torch"]:
        found |= _imported(name)
    return found


@functools.cache
def _imported(name: str) -> dict[str, str]:
    """The files of functions that the module called ``name`` has from its own package or from beside it."""
    module = sys.modules.get(name)
    package = name.split(".")[0]
    found: dict[str, str] = {}
    for value in list(vars(module).values()) if module is not None else ():
        if not inspect.isfunction(value) or value.__module__ in (None, name):
            continue
        other = value.__module__.split(".")[0]
        file = getattr(sys.modules.get(value.__module__), "__file__", None)
        if file and (other == package or not any(part in ("site-packages", "lib") for part in Path(file).parts)):
            found[value.__module__] = _file_digest(file)
    return found


def _classes(model: nn.Module) -> Iterator[type]:
    for module in model.modules():
        yield type(module)
        for prefix, _ in holders(module):
            if prefix:
                yield type(getattr(module, prefix.rstrip(".")))


@functools.cache
def _digest(cls: type) -> str:
    try:
        return _file_digest(inspect.getfile(cls))
    except (OSError, TypeError):  # made in a session or a notebook: there is no file to read
        code = [getattr(value, "__code__", None) for value in vars(cls).values()]
        content = repr(sorted(name for name in vars(cls))).encode() + b"".join(c.co_code for c in code if c is not None)
        return hashlib.blake2b(content, digest_size=16).hexdigest()


def _file_digest(file: str) -> str:
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest()
