"""Saving a sharded model as if it were whole: tensor by tensor to the axis' first rank, which writes them.

No rank ever holds more than one whole tensor. With ``sharded`` every rank writes its own slices instead (`.shards`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from torch import nn

from ..errors import CheckpointError
from ..layout import Shard, assemble
from .files import DIFFUSERS, TRANSFORMERS
from .groups import side_group
from .sharded import Sharding, sharding_of
from .shards import write_index
from .writer import Writer

LARGEST_FILE = "10GB"


def stored_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What the model's ``state_dict`` holds, as this rank has it: slices where it is sharded."""
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        found |= {prefix + name: one for name, one in module._parameters.items() if one is not None}
        found |= {
            prefix + name: one
            for name, one in module._buffers.items()
            if one is not None and name not in module._non_persistent_buffers_set
        }
    return found


def is_transformers(model: nn.Module) -> bool:
    return any(base.__module__.split(".")[0] == "transformers" for base in type(model).__mro__)


def save_configuration(model: Any, folder: Path) -> None:
    """Write what is beside the weights."""
    if is_transformers(model):
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(str(folder))
        if getattr(model, "can_generate", None) and model.can_generate():
            model.generation_config.save_pretrained(str(folder))
    else:
        model.save_config(str(folder))


def save_sharded_model(model: nn.Module, folder: Path, *, sharded: bool = False, largest: str = LARGEST_FILE) -> None:
    """Write a sharded model into ``folder``, which is there. Every rank of its axis must call this.

    Raises `CheckpointError` on every rank when one could not write.
    """
    sharding = sharding_of(model)
    assert sharding is not None
    group = side_group(sharding.axis.ranks)
    first = sharding.axis.index == 0
    mine = stored_tensors(model)
    problem: str | None = None
    try:
        if first:
            save_configuration(model, folder)
        if sharded:
            _write_own(folder, mine, sharding)
    except OSError as error:
        problem = f"rank {dist.get_rank()}: {error}"
    if not sharded:
        problem = (
            _Collector(mine, sharding, group).write(folder, _stem(model), _saved_names(model, mine), largest) or problem
        )
    told: list[Any] = [None] * sharding.axis.degree
    dist.all_gather_object(told, problem, group=group)
    if problems := [one for one in told if one]:
        raise CheckpointError(f"the model could not be saved to {folder}: {problems[0]}")


def _stem(model: nn.Module) -> str:
    return TRANSFORMERS if is_transformers(model) else DIFFUSERS


def _saved_names(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """By each name in the file, the model's own name."""
    if not is_transformers(model):
        return {name: name for name in tensors}
    from .transformers_names import saved_names

    return saved_names(model, tensors)


class _Collector:
    """Brings tensors together on the axis' first rank, one at a time, in an order that all ranks know."""

    def __init__(self, mine: Mapping[str, torch.Tensor], sharding: Sharding, group: dist.ProcessGroup) -> None:
        self.mine, self.sharding, self.group = mine, sharding, group
        self.shards: Mapping[str, Shard] = sharding.resolved.shards
        self.first = sharding.axis.index == 0

    def write(self, folder: Path, stem: str, names: Mapping[str, str], largest: str) -> str | None:
        """Write the files; what went wrong on this rank, if anything did. The others are served all the same."""
        whole = {
            saved: torch.empty(self._shape(name), dtype=self.mine[name].dtype, device="meta")
            for saved, name in names.items()
        }
        split = split_torch_state_dict_into_shards(
            whole, max_shard_size=largest, filename_pattern=stem + "{suffix}.safetensors"
        )
        problem: str | None = None
        for file, saved_names in split.filename_to_tensors.items():
            writer = Writer(folder / file, {name: (whole[name].dtype, whole[name].shape) for name in saved_names})
            problem = self._write_file(writer, names, problem)
        if self.first and split.is_sharded and problem is None:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            try:
                (folder / f"{stem}.safetensors.index.json").write_text(
                    json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
                )
            except OSError as error:
                problem = str(error)
        return problem

    def _write_file(self, writer: Writer, names: Mapping[str, str], problem: str | None) -> str | None:
        remaining = list(writer.names)
        if self.first and problem is None:
            try:
                with writer:
                    while remaining:
                        tensor = self._whole(names[remaining[0]])
                        saved = remaining.pop(0)
                        writer.write(saved, tensor)
            except OSError as error:
                problem = f"{writer.file.name}: {error}"
        for saved in remaining:
            self._whole(names[saved])
        return problem

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.shards[name].shape if name in self.shards else tuple(self.mine[name].shape)

    def _whole(self, name: str) -> torch.Tensor:
        """The whole tensor on the first rank; what the rank has, on others."""
        own = self.mine[name].detach().cpu().contiguous()
        shard = self.shards.get(name)
        if shard is None or shard.dim is None:
            return own
        ranks = self.sharding.axis.ranks
        if not self.first:
            if own.numel():
                dist.send(_bytes(own), ranks[0], group=self.group)
            return own
        parts = [own]
        for index in range(1, shard.degree):
            part = torch.empty(shard.local_shape(index), dtype=own.dtype)
            if part.numel():
                dist.recv(_bytes(part), ranks[index], group=self.group)
            parts.append(part)
        return assemble(parts, shard)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _write_own(folder: Path, mine: Mapping[str, torch.Tensor], sharding: Sharding) -> None:
    """This rank's file: its slices, and on the first rank what all have whole."""
    shards, index = sharding.resolved.shards, sharding.axis.index
    own = {name: one for name, one in mine.items() if index == 0 or (name in shards and shards[name].dim is not None)}
    kept: dict[int, str] = {}  # a tied table once
    for name, one in list(own.items()):
        if kept.setdefault(id(one), name) != name:
            del own[name]
    from .shards import file_of

    described = {name: (one.dtype, tuple(one.shape)) for name, one in own.items()}
    with Writer(folder / file_of(index, sharding.axis.degree), described) as writer:
        for name in writer.names:
            writer.write(name, own[name].detach().cpu())
    if index == 0:
        write_index(folder, mine, sharding.resolved.shards, sharding.axis.degree)
