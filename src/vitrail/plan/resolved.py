"""What a plan comes to on one model and degree, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from ..layout import Ranges, Shard
from .document import Plan, Style
from .norms import Norm


@dataclass(frozen=True)
class InputCut:
    """An argument of a module's forward, cut as it enters: ``path`` is its name, then indices or keys."""

    path: tuple[str, ...]
    dim: int
    whole: int
    ranges: tuple[Ranges, ...]
    zeros: tuple[Ranges, ...] = ()


@dataclass(frozen=True)
class ResolvedPlan:
    """``shards`` by tensor name; ``styles`` by module name; ``attributes`` by (module, attribute): one per rank.

    A tensor that is not in ``shards`` is whole on every rank. ``norms`` are the modules of that style; ``inputs`` by
    module; ``untraced`` modules must not run; ``held`` parameters are gathered at use, along a dim. ``skipped`` says
    which rules were left out as not worth it, and why. Gathered modules of one name in ``together`` share a collective;
    products of ``reduced`` parameters are added up.
    """

    plan: Plan
    degree: int
    shards: Mapping[str, Shard]
    styles: Mapping[str, Style]
    attributes: Mapping[tuple[str, str], tuple[int, ...]]
    norms: Mapping[str, Norm] = field(default_factory=dict)
    inputs: Mapping[str, tuple[InputCut, ...]] = field(default_factory=dict)
    untraced: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    together: Mapping[str, str] = field(default_factory=dict)
    reduced: tuple[str, ...] = ()

    @property
    def collectives(self) -> int:
        """Those of one step, when every module runs once and every held parameter is read once."""
        single = [name for name, style in self.styles.items() if style in ("rowwise", "gathered", "norm")]
        alone = sum(name not in self.together for name in single)
        return alone + len(set(self.together.values())) + len(self.held) + len(self.reduced)

    def parameter_numel(self, model: nn.Module, rank: int) -> int:
        """How many parameters of ``model``, still whole (or on meta), ``rank`` will hold."""
        whole = ((name, param.numel()) for name, param in model.named_parameters())
        return sum(self.shards[name].numel(rank) if name in self.shards else numel for name, numel in whole)
