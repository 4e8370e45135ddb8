"""A sharded model: the class it takes, and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedError
from ..layout import MeshAxis
from ..plan import ResolvedPlan
from .agree import Agreement
from .flight import FLIGHT
from .guard import GuardedRoot
from .modules import sharded_class


@dataclass(frozen=True)
class Sharding:
    """What was applied to a model: ``resolved`` holds the plan and every shard, ``axis`` where this rank stands."""

    resolved: ResolvedPlan
    axis: MeshAxis
    agreement: Agreement


class ShardedRoot(GuardedRoot, nn.Module):
    """In front of the class of a sharded model: ranks agree on the inputs before each step."""

    sharding: Sharding

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        FLIGHT.enter_step()
        self.sharding.agreement.check(self, args, kwargs)
        try:
            return super().__call__(*args, **kwargs)
        finally:
            FLIGHT.phase("between steps")

    def enable_parallelism(self, *_: Any, **__: Any) -> None:
        raise UnsupportedError(f"this {type(self).__name__} is sharded already; a model can be sharded once")


def mark(model: nn.Module, sharding: Sharding) -> None:
    """Turn ``model``, whose modules are sharded, into its sharded class."""
    FLIGHT.name_modules(model)
    model.__class__ = sharded_class(type(model), ShardedRoot)
    object.__setattr__(model, "sharding", sharding)


def sharding_of(model: nn.Module) -> Sharding | None:
    """What was applied to ``model``, or None for a whole one."""
    return model.sharding if isinstance(model, ShardedRoot) else None


def is_sharded(model: nn.Module) -> bool:
    return sharding_of(model) is not None
