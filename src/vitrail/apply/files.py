"""Finding a model's safetensors files, in a folder or on the hub."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, UnsupportedError
from .checkpoint import Checkpoint
from .shards import INDEX, ShardCheckpoint

DIFFUSERS, TRANSFORMERS = "diffusion_pytorch_model", "model"


def find(
    path: str, subfolder: str | None, variant: str | None, hub: Mapping[str, Any], stem: str = DIFFUSERS
) -> Checkpoint:
    """The checkpoint of a model, by its library's own naming. Reads headers, no tensors."""
    dotted = f".{variant}" if variant else ""
    index_name = f"{stem}.safetensors.index{dotted}.json"
    single_name = f"{stem}{dotted}.safetensors"
    folder = Path(path) / (subfolder or "")
    if Path(path).is_dir():
        if (folder / INDEX).is_file():
            return ShardCheckpoint(folder)
        if (index := folder / index_name).is_file():
            return Checkpoint.from_index(index)
        if (single := folder / single_name).exists():
            return Checkpoint.from_file(single)
        others = sorted(
            file.name for file in folder.glob("*") if file.suffix in (".bin", ".safetensors", ".pt", ".ckpt")
        )
        if others and not any(name.endswith(".safetensors") for name in others):
            raise UnsupportedError(f"{folder} has no safetensors weights, only {', '.join(others)}: a slice needs them")
        raise CheckpointError(
            f"{folder} has neither {single_name} nor {index_name}",
            hint=f"it has {', '.join(others)}: is that another variant?" if others else "the folder is incomplete",
        )
    fetch = functools.partial(_download, path, subfolder, hub)
    index_file = fetch(index_name)
    if index_file is not None:

        def locate(name: str) -> Path:
            file = fetch(name)
            if file is None:
                raise CheckpointError(f"{path} lacks {name}, which {index_name} names")
            return file

        return Checkpoint.from_index(index_file, locate)
    if (single_file := fetch(single_name)) is None:
        raise CheckpointError(f"{path} on the hub has neither {single_name} nor {index_name}")
    return Checkpoint.from_file(single_file)


def _download(repository: str, subfolder: str | None, hub: Mapping[str, Any], name: str) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    arguments = {key: value for key, value in hub.items() if key != "proxies" and value is not None}
    try:
        return Path(hf_hub_download(repository, name, subfolder=subfolder or None, **arguments))
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"{name} of {repository} is not in the local cache, and the hub cannot be reached",
            hint="check the connection, or HF_HUB_OFFLINE",
        ) from None
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, HFValidationError) as error:
        raise CheckpointError(
            f"{repository} is no local folder and the hub refuses it: {str(error).splitlines()[0]}"
        ) from None
