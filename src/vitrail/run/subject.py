"""What a plan is made for: a class of diffusers, a class in a file, or the models of a folder. No weights are read."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..apply.classes import model_class
from ..errors import CheckpointError, UsageError
from ..plan.derive.trace import first_line
from ..plan.skeleton import skeleton
from .folder import components, denoisers, read_index, read_json

INPUTS = "vitrail_inputs"


@dataclass(frozen=True)
class Subject:
    """One model: ``build`` makes it anew, with weights; ``model`` has its parameters on meta.

    ``inputs`` are its file's own, if it has a function ``vitrail_inputs``. ``folder`` has its weights, if any.
    """

    name: str
    build: Callable[[], nn.Module]
    model: nn.Module
    inputs: Sequence[Mapping[str, Any]] | None = None
    folder: Path | None = None


@dataclass(frozen=True)
class Component:
    """A part of a pipeline that is not sharded: its class and the bytes of its weights."""

    name: str
    kind: str
    nbytes: int


def find(target: str, config: Path | None = None) -> tuple[list[Subject], list[Component]]:
    """The models that ``target`` names, and what else is in the pipeline.

    ``target`` is a pipeline's folder, a model's folder, a class of diffusers, or ``path/to/file.py:Class``. ``config``
    is a JSON file of constructor arguments.
    """
    arguments = _config(config) if config is not None else {}
    path, colon, name = target.rpartition(":")
    if colon and path.endswith(".py"):
        return [_from_file(Path(path), name, arguments)], []
    if target.endswith(".py"):
        raise UsageError(f"{target} names a file and no class", hint=f"name the class too: {target}:MyTransformer")
    if Path(target).is_dir():
        if config is not None:
            raise UsageError("--config goes with a class; a folder has its own config.json")
        return _from_folder(Path(target))
    if "/" in target or target.startswith("."):
        if config is not None:
            raise UsageError("--config goes with a class; a model of the hub has its own config.json")
        return _from_folder(_configurations(target))
    cls = model_class(target)
    return [_subject(target, cls, arguments)], []


def _configurations(name: str) -> Path:
    """The JSON files of a model on the hub: all that a plan needs."""
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise CheckpointError(
            f"there is no folder {name}", hint="give a folder, a class of diffusers, or path/to/file.py:Class"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*/*.json"]))
    except Exception as error:  # noqa: BLE001  whatever the client of the hub raises
        raise CheckpointError(
            f"there is no folder {name}, and the hub did not give it: {first_line(error)}",
            hint="give a folder, a class of diffusers, or path/to/file.py:Class; HF_TOKEN and HF_HUB_OFFLINE matter",
        ) from None


def _config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise UsageError(f"--config {file}: there is no such file")
    values = read_json(file)
    return {key: value for key, value in values.items() if not key.startswith("_")}


def _subject(name: str, cls: Any, arguments: Mapping[str, Any], **more: Any) -> Subject:
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise UsageError(f"{name} is not a model (a torch.nn.Module)")

    def build() -> nn.Module:
        try:
            return cls(**arguments).eval()
        except Exception as error:
            raise UsageError(
                f"{name} cannot be made from its configuration: {first_line(error)}",
                hint="give the constructor's arguments as JSON: --config FILE",
            ) from error

    return Subject(name, build, skeleton(build), **more)


def _from_file(file: Path, name: str, arguments: Mapping[str, Any]) -> Subject:
    if not file.is_file():
        raise UsageError(f"there is no file {file}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.resolve().parent))  # as `python file.py` would: it may import what lies beside it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{file} cannot be imported: {first_line(error)}") from error
    cls = getattr(module, name, None)
    if cls is None:
        classes = [
            key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, nn.Module)
        ]
        raise UsageError(f"{file} has no class {name}", hint=f"it has {', '.join(classes)}" if classes else None)
    subject = _subject(name, cls, arguments)
    make = getattr(module, INPUTS, None)
    if make is None:
        return subject
    torch.manual_seed(0)  # every rank calls it, and they must agree
    try:
        given = make(subject.model)
    except Exception as error:
        raise UsageError(f"{INPUTS}(model) in {file} failed: {first_line(error)}") from error
    calls = [given] if isinstance(given, Mapping) else list(given) if isinstance(given, (list, tuple)) else []
    if not calls or not all(isinstance(call, Mapping) for call in calls):
        raise UsageError(
            f"{INPUTS}(model) in {file} gave {type(given).__name__}",
            hint="it must return the keyword arguments of one call, or a list of such",
        )
    return Subject(subject.name, subject.build, subject.model, calls)


def _from_folder(folder: Path) -> tuple[list[Subject], list[Component]]:
    if (folder / "model_index.json").is_file():
        index = read_index(folder)
        shard = denoisers(index, folder)
        subjects = [_in_folder(folder / name, kind) for name, kind in shard.items()]
        others = [
            Component(name, kind, _weights(folder / name))
            for name, (_, kind) in components(index).items()
            if name not in shard
        ]
        return subjects, [other for other in others if other.nbytes]
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has neither model_index.json nor config.json: it is no model")
    kind = read_json(folder / "config.json").get("_class_name")
    if not isinstance(kind, str):
        raise CheckpointError(f"{folder / 'config.json'} does not name a class (_class_name)")
    return [_in_folder(folder, kind)], []


def _in_folder(folder: Path, kind: str) -> Subject:
    cls = model_class(kind)
    config = {key: value for key, value in read_json(folder / "config.json").items() if not key.startswith("_")}

    def build() -> nn.Module:
        try:
            model = cls.from_config(config) if hasattr(cls, "from_config") else cls(**config)
        except Exception as error:
            raise CheckpointError(
                f"{kind} cannot be made from {folder / 'config.json'}: {first_line(error)}"
            ) from error
        assert isinstance(model, nn.Module)
        return model.eval()

    return Subject(kind, build, skeleton(build), folder=folder)


def _weights(folder: Path) -> int:
    """The bytes of the tensors in a folder's safetensors files, from their headers."""
    total = sum(
        int(read_json(file).get("metadata", {}).get("total_size", 0))
        for file in folder.glob("*.safetensors.index.json")
    )
    if total:
        return total
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        total += max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    return total


def dtype_of(name: str | None) -> torch.dtype:
    dtypes = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name is None:
        return torch.bfloat16
    if name not in dtypes:
        raise UsageError(f"--dtype {name}: known are {', '.join(dtypes)}")
    return dtypes[name]
