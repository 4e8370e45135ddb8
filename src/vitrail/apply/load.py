"""Loading a model whose ranks each read their slice."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError, UnsupportedError, UsageError
from ..layout import Shard
from ..plan.skeleton import skeleton
from .checkpoint import Checkpoint
from .files import find
from .install import slice_tensors

log = logging.getLogger(__name__)

# What diffusers' from_pretrained accepts and sharding on load cannot honour, with the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "device_map": (None,),
    "max_memory": (None,),
    "offload_folder": (None,),
    "offload_state_dict": (None, False),
    "quantization_config": (None,),
    "use_flashpack": (None, False),
    "flashpack_kwargs": (None,),
    "use_safetensors": (None, True),
    "low_cpu_mem_usage": (None, True),
    "ignore_mismatched_sizes": (None, False),
    "output_loading_info": (None, False),
}
_HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")


@dataclass(frozen=True)
class Request:
    """One model to load: its class, where it is, and diffusers' arguments."""

    cls: type[Any]
    path: str
    subfolder: str | None
    variant: str | None
    dtype: torch.dtype | None
    hub: Mapping[str, Any]
    config: Mapping[str, Any]

    @classmethod
    def of(cls, model_class: type[Any], path: str, arguments: Mapping[str, Any]) -> Request:
        rest = dict(arguments)
        for name, harmless in _REFUSED.items():
            if (value := rest.pop(name, None)) not in harmless:
                raise UnsupportedError(
                    f"{name}={value!r} cannot be combined with sharding on load: each rank reads its own slice",
                    hint=f"leave {name} out",
                )
        rest.pop("disable_mmap", None)  # nothing is mapped
        torch_dtype = rest.pop("torch_dtype", None)
        dtype = rest.pop("dtype", None) or torch_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise UsageError(f"dtype must be a floating-point torch.dtype, not {dtype!r}")
        hub = {name: rest.pop(name) for name in _HUB if name in rest}
        kind = cls
        if model_class.__module__.split(".")[0] == "transformers":
            from .encoder import EncoderRequest

            kind = EncoderRequest
        return kind(model_class, str(path), rest.pop("subfolder", None), rest.pop("variant", None), dtype, hub, rest)

    def skeleton(self) -> nn.Module:
        """The model with its parameters on meta. Buffers are real: what ``__init__`` computed cannot be loaded."""
        where = f"{self.path}/{self.subfolder}" if self.subfolder else self.path
        try:
            config, unused = self.cls.load_config(
                self.path, subfolder=self.subfolder, return_unused_kwargs=True, **self.hub, **self.config
            )
        except OSError as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"there is no model configuration at {where}: {reason}") from None
        known = inspect.signature(self.cls.__init__).parameters
        if strange := sorted(set(unused) - set(known)):
            raise UsageError(f"from_pretrained got {strange[0]!r}, which {self.cls.__name__} does not know")
        default = torch.get_default_dtype()
        try:
            torch.set_default_dtype(
                self.dtype if self.dtype in (torch.float16, torch.bfloat16, torch.float64) else default
            )
            model = skeleton(lambda: self.cls.from_config(config, **unused))
        finally:
            torch.set_default_dtype(default)
        assert isinstance(model, nn.Module)
        model.register_to_config(_name_or_path=self.path)  # type: ignore[operator]
        return model

    def checkpoint(self, model: nn.Module) -> Checkpoint:
        """The files, checked against ``model``: every tensor there, with the right shape."""
        checkpoint = self.files(model)
        where = f"the checkpoint at {self.path}" + (f"/{self.subfolder}" if self.subfolder else "")
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        lacking = sorted(set(expected) - set(checkpoint.entries))
        if missing := [name for name in lacking if not self.may_lack(model, name)]:
            raise CheckpointError(
                f"{where} lacks {len(missing)} of {len(expected)} tensors of {type(model).__name__}, "
                f"the first {missing[0]!r}"
            )
        for name, shape in expected.items():
            if name in checkpoint.entries and checkpoint.entries[name].shape != shape:
                raise CheckpointError(
                    f"{where}: tensor {name!r} has shape {checkpoint.entries[name].shape} in "
                    f"{checkpoint.entries[name].file.name}, but {type(model).__name__}'s configuration makes it {shape}"
                )
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
        unexpected = sorted(set(checkpoint.entries) - set(expected))
        if unexpected := [name for name in unexpected if not any(re.search(pattern, name) for pattern in ignored)]:
            log.warning("%s has %d tensors that the model does not use: %s", where, len(unexpected), unexpected[:5])
        return checkpoint

    def files(self, model: nn.Module) -> Checkpoint:  # noqa: ARG002 - what renames needs it
        """The tensors in the files, by the model's names."""
        return find(self.path, self.subfolder, self.variant, self.hub)

    def may_lack(self, model: nn.Module, name: str) -> bool:  # noqa: ARG002
        """Whether the files may lack a tensor that the model computes by itself."""
        return False

    def dtype_for(self, model: nn.Module) -> DtypeRule:
        keep = getattr(model, "_keep_in_fp32_modules", None) or []
        return DtypeRule(self.dtype or torch.get_default_dtype(), tuple([keep] if isinstance(keep, str) else keep))


@dataclass(frozen=True)
class DtypeRule:
    """diffusers' rule: only floating-point tensors are converted, and the modules a class names stay in float32."""

    dtype: torch.dtype
    keep_in_float32: tuple[str, ...]

    def __call__(self, name: str, stored: torch.dtype) -> torch.dtype:
        if not stored.is_floating_point:
            return stored
        if any(kept in name.split(".") for kept in self.keep_in_float32):
            return torch.float32
        return self.dtype


def load(
    model: nn.Module,
    checkpoint: Checkpoint,
    shards: Mapping[str, Shard],
    rank: int,
    dtype_rule: DtypeRule,
    device: torch.device,
) -> None:
    """Read this rank's part of every tensor of ``model`` into it, one at a time, on ``device``."""
    with checkpoint:
        made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # one tensor under several names is read once
        for name, tensor in model.state_dict(keep_vars=True).items():
            owner, _, attribute = name.rpartition(".")
            if id(tensor) in made:
                setattr(model.get_submodule(owner), attribute, made[id(tensor)][1])
                continue
            if name not in checkpoint.entries:  # what its __init__ computed stays
                continue
            shard = shards.get(name) or Shard.whole(tuple(tensor.shape), 1)
            index = rank if name in shards else 0
            value = checkpoint.read(name, shard, index, dtype_rule(name, checkpoint.entries[name].dtype)).to(device)
            if isinstance(tensor, nn.Parameter):
                value = nn.Parameter(value, requires_grad=False)
            made[id(tensor)] = tensor, value
            setattr(model.get_submodule(owner), attribute, value)
    stored = frozenset(model.state_dict(keep_vars=True))
    slice_tensors(model, shards, rank, skip=stored)
    # Non-persistent buffers are in no checkpoint; left behind, they meet the weights on another device.
    for name, buffer in list(model.named_buffers()):
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer.to(device))
