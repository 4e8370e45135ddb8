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

from .configuration import configuration, is_part
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
    return {"tensors": tensors, "classes": classes, "config": _words(configuration(model))}


def _words(config: Any) -> dict[str, Any]:
    return {
        key: _words(value) if isinstance(value, dict) else value
        for key, value in sorted(config.items())
        if not key.startswith("_") and (isinstance(value, (bool, str)) or is_part(key, value))
    }


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def key_of(model: nn.Module) -> str:
    """A digest of everything that shapes a plan: structure, sources and the version of the rules."""
    content = json.dumps([RULES_VERSION, structure(model), sorted(sources(model).items())], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def instance_key(model: nn.Module) -> str:
    """A digest of this very configuration: the key, shapes, and every number and buffer that a forward may read.

    A number may choose a layout as well as count something (``if self.version == 1``), and only what a catalog's
    probes cover is known to be the latter.
    """
    digest = hashlib.blake2b(key_of(model).encode(), digest_size=16)
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
    for path, module in model.named_modules():
        values = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        digest.update(f"{path} {_plain(values)} {_closure(type(module))}".encode())
        for prefix, _ in holders(module):
            held = getattr(module, prefix.rstrip(".")) if prefix else None
            digest.update(f"{prefix} {_plain(getattr(held, '__dict__', {}))}".encode())
        for value in (*module._buffers.values(), *values.values()):
            if isinstance(value, torch.Tensor) and not value.is_meta:
                digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _plain(value: Any, depth: int = 4) -> str:
    """Numbers, words and what is made of them; anything else as its class."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.Size, torch.dtype)):
        return repr(value)
    if depth and isinstance(value, dict):
        return repr(sorted((str(key), _plain(item, depth - 1)) for key, item in value.items()))
    if depth and isinstance(value, (list, tuple, set, frozenset)):
        items = [_plain(item, depth - 1) for item in value]
        return repr(sorted(items) if isinstance(value, (set, frozenset)) else items)
    return type(value).__qualname__


def _closure(cls: type) -> str:
    """What a class's methods took from the function it was made in, and their defaults."""
    found = []
    for name, value in sorted(vars(cls).items()):
        if inspect.isfunction(value):
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell.cell_contents is not value]
            found.append((name, _plain(cells), _plain(value.__defaults__), _plain(value.__kwdefaults__)))
        elif not name.startswith("__") and not callable(value):
            found.append((name, _plain(value), "", ""))
    return repr(found)


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
