"""What can be known of a pipeline from the JSON in its folder, without loading anything or importing torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, UnsupportedError, UsageError


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} is missing", hint="the folder is incomplete: download or copy it again"
        ) from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    return value


def read_index(folder: Path) -> dict[str, Any]:
    """The pipeline's ``model_index.json``. Raises `CheckpointError` for a folder that is no pipeline."""
    if not (folder / "model_index.json").is_file():
        single = (folder / "config.json").is_file()
        raise CheckpointError(
            f"{folder} is not a diffusers pipeline: it has no model_index.json",
            hint="it looks like one model of a pipeline; give the folder above it" if single else None,
        )
    index = read_json(folder / "model_index.json")
    if not isinstance(index.get("_class_name"), str):
        raise CheckpointError(f"{folder / 'model_index.json'} does not name a pipeline class")
    for name, entry in components(index).items():
        if not (folder / name).is_dir():
            raise CheckpointError(
                f"{folder} is incomplete: the component {name!r} ({entry[1]}) has no folder",
                hint="download or copy it again",
            )
    return index


def components(index: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """The pipeline's components by name: library and class."""
    return {
        name: (entry[0], entry[1])
        for name, entry in index.items()
        if isinstance(entry, list) and len(entry) == 2 and all(isinstance(part, str) for part in entry)
    }


def denoisers(index: dict[str, Any], folder: Path) -> dict[str, str]:
    """The components to shard, by name, with their class. Raises `UnsupportedError` when there is none."""
    found = {
        name: kind
        for name, (library, kind) in components(index).items()
        if library == "diffusers" and name.startswith("transformer")
    }
    if not found:
        unet = next((kind for name, (_, kind) in components(index).items() if name.startswith("unet")), None)
        raise UnsupportedError(
            f"{index['_class_name']} ({folder}) has no transformer to shard"
            + (f": its denoiser is a UNet ({unet}), which is not supported" if unet else ""),
            hint="run it unsharded: --tp 1",
        )
    return found


def encoders(index: dict[str, Any]) -> dict[str, str]:
    """The text and picture encoders of transformers, by name, with their class."""
    return {
        name: kind
        for name, (library, kind) in components(index).items()
        if library == "transformers" and "encoder" in name
    }


def check_files(folder: Path, index: dict[str, Any]) -> None:
    """Raise `CheckpointError` for a safetensors file that is truncated or damaged, or missing though an index names it.

    Reads headers alone; a tensor whose bytes are missing is named.
    """
    from ..apply.checkpoint import Checkpoint, read_header

    for name, (library, kind) in components(index).items():
        if library in ("diffusers", "transformers"):
            _check_component(folder / name, kind)
        for file in sorted((folder / name).glob("*.safetensors")):
            read_header(file)
        for file in sorted((folder / name).glob("*.safetensors.index*.json")):
            Checkpoint.from_index(file)


def _check_component(folder: Path, kind: str) -> None:
    """The libraries fill in for missing files: a model of default size, a tokenizer without words."""
    again = "download or copy it again"
    if "Tokenizer" in kind:
        if not any(any(folder.glob(pattern)) for pattern in _VOCABULARIES):
            raise CheckpointError(f"{folder} ({kind}) has no vocabulary", hint=again)
    elif not any(part in kind for part in ("Scheduler", "Processor", "Extractor")):
        if not any(key in read_json(folder / "config.json") for key in ("_class_name", "model_type", "architectures")):
            raise CheckpointError(f"{folder / 'config.json'} does not say what model it is of", hint=again)
        if not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
            raise CheckpointError(f"{folder} ({kind}) has no weights", hint=again)


_VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "tekken.json", "*.tiktoken", "*.spm")
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.ckpt")


@dataclass(frozen=True)
class Defaults:
    """What a model folder says is usual for it, in an optional ``vitrail.json``."""

    name: str | None = None
    height: int | None = None
    width: int | None = None
    steps: int | None = None
    guidance: float | None = None
    prompt: str | None = None

    @classmethod
    def of(cls, folder: Path) -> Defaults:
        if not (folder / "vitrail.json").is_file():
            return cls()
        document = read_json(folder / "vitrail.json")
        defaults = document.get("defaults", {})
        where = folder / "vitrail.json"
        kinds: dict[str, type | tuple[type, ...]] = {
            "height": int,
            "width": int,
            "steps": int,
            "guidance": (int, float),
        }
        kinds["prompt"] = str
        if not isinstance(defaults, dict):
            raise CheckpointError(f"{where}: 'defaults' must be an object")
        for name, value in defaults.items():
            if name not in kinds:
                raise CheckpointError(f"{where}: unknown default {name!r}; known: {', '.join(kinds)}")
            positive = name not in ("height", "width", "steps") or (isinstance(value, int) and value > 0)
            if isinstance(value, bool) or not isinstance(value, kinds[name]) or not positive:
                raise CheckpointError(f"{where}: the default {name} cannot be {value!r}")
        return cls(name=document.get("name"), **defaults)


def size_multiple(index: dict[str, Any], folder: Path) -> int | None:
    """What height and width must be multiples of, or None where the configurations do not tell.

    The VAE halves the picture with each of its blocks but the last; the pipeline packs latents into more channels
    when the transformer takes more than the VAE gives; the transformer cuts what it gets into patches.
    """
    names = components(index)
    transformer = next((name for name in names if name.startswith("transformer")), None)
    if "vae" not in names or transformer is None:
        return None
    vae = read_json(folder / "vae" / "config.json")
    config = read_json(folder / transformer / "config.json")
    blocks, latent, channels = vae.get("block_out_channels"), vae.get("latent_channels"), config.get("in_channels")
    patch = config.get("patch_size") or 1
    if not isinstance(blocks, list) or not isinstance(latent, int) or not isinstance(channels, int):
        return None
    if not isinstance(patch, int) or channels % latent:
        return None
    pack = math.isqrt(channels // latent)
    if pack * pack * latent != channels:
        return None
    return int(2 ** (len(blocks) - 1) * pack * patch)


def check_size(value: int | None, what: str, multiple: int | None) -> None:
    """Raise `UsageError` for a height or width that the model cannot make."""
    if value is None:
        return
    if value < 1:
        raise UsageError(f"--{what} {value} is not a size")
    if multiple and value % multiple:
        below, above = value // multiple * multiple, -(-value // multiple) * multiple
        raise UsageError(
            f"--{what} {value}: this model makes multiples of {multiple}",
            hint=f"the nearest are {', '.join(str(size) for size in (below, above) if size)}",
        )
