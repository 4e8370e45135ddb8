"""Writes a synthetic FLUX.2 transformer in diffusers' format: random weights in bfloat16, of any size."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import Flux2Transformer2DModel

STEM = "diffusion_pytorch_model"
ITEM = torch.bfloat16.itemsize
CHUNK = 1 << 22

Shapes = dict[str, tuple[int, ...]]


def configuration(gigabytes: float, heads: int) -> dict[str, Any]:
    """A FLUX.2 of at least that size, with three single blocks to a double one."""
    config: dict[str, Any] = {
        "in_channels": 128,
        "attention_head_dim": 128,
        "num_attention_heads": heads,
        "joint_attention_dim": 4096,
        "mlp_ratio": 3.0,
        "axes_dims_rope": (32, 32, 32, 32),
        "guidance_embeds": False,
        "num_layers": 1,
        "num_single_layers": 1,
    }
    while ITEM * elements(shapes(config)) < gigabytes * 1e9:
        single = config["num_single_layers"] < 3 * config["num_layers"]
        config["num_single_layers" if single else "num_layers"] += 1
    return config


def shapes(config: Mapping[str, Any]) -> Shapes:
    with init_empty_weights():
        model = Flux2Transformer2DModel(**config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def elements(tensors: Shapes) -> int:
    return sum(map(math.prod, tensors.values()))


def write_model(folder: Path, config: Mapping[str, Any], files: int) -> None:
    """Write the model as about that many files, a little at a time. One that lies there complete is kept."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tensors = shapes(config)
    limit = elements(tensors) / files
    groups: list[Shapes] = [{}]
    filled = 0
    for name, shape in tensors.items():
        if filled >= limit:
            groups.append({})
            filled = 0
        groups[-1][name] = shape
        filled += math.prod(shape)
    weight_map: dict[str, str] = {}
    for index, group in enumerate(groups, start=1):
        file = f"{STEM}-{index:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else f"{STEM}.safetensors"
        _write_safetensors(folder / file, group)
        weight_map |= dict.fromkeys(group, file)
    if len(groups) > 1:
        index_document = {"metadata": {"total_size": ITEM * elements(tensors)}, "weight_map": weight_map}
        (folder / f"{STEM}.safetensors.index.json").write_text(json.dumps(index_document), encoding="utf-8")
    # Last, as the sign that the folder is complete.
    config_document = {"_class_name": Flux2Transformer2DModel.__name__, **config}
    (folder / "config.json").write_text(json.dumps(config_document), encoding="utf-8")


def _write_safetensors(file: Path, tensors: Shapes) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors.items():
        size = ITEM * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = torch.Generator().manual_seed(0)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for shape in tensors.values():
            for start in range(0, math.prod(shape), CHUNK):
                count = min(CHUNK, math.prod(shape) - start)
                values = torch.randn(count, generator=generator).mul_(0.02).to(torch.bfloat16)
                stream.write(memoryview(values.view(torch.uint8).numpy()))  # type: ignore[arg-type]
        stream.flush()
        os.fsync(stream.fileno())  # what is not on the disk yet cannot be dropped from the page cache


def prepare_cache(folder: Path, cold: bool) -> None:
    """Have the weights in the page cache, or out of it."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            if cold:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while os.read(descriptor, 1 << 24):
                    pass
        finally:
            os.close(descriptor)
