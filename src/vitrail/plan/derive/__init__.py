"""Deriving a plan from one recorded forward. What comes out is a proposal: shapes prove nothing, values do.

`vitrail.apply.prove` compares a proposal's values with the whole model's, and drops what is not right.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..document import Plan
from .attributes import solve
from .axes import Axis
from .choose import Choice, choose
from .numbers import Attribute
from .record import Recorder
from .trace import record
from .write import write

RULES_VERSION = 2
_ROUNDS = 24

__all__ = ["RULES_VERSION", "Derivation", "Proposal"]


@dataclass(frozen=True)
class Proposal:
    """``plan``, and for each of its axes the leaves it stands for."""

    plan: Plan
    axes: Mapping[str, tuple[Axis, ...]]
    choice: Choice


@dataclass
class Derivation:
    """A model that was recorded once, from which plans are proposed.

    ``excluded`` are leaves that must not be sharded, with the reason.
    """

    recorder: Recorder
    excluded: dict[Axis, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        calls: Mapping[str, Mapping[str, Any]],
        borrowed: Mapping[str, str] | None = None,
    ) -> Derivation:
        """Record ``model`` (parameters on meta) called with each of ``calls``. Raises `UnsupportedError`.

        ``borrowed`` are parameters that belong to another model, by name, with what to say of them.
        """
        # A forward may keep things in the model: a copy is recorded, and the model stays as it was.
        return cls(record(copy.deepcopy(model), calls, borrowed))

    def propose(self, degree: int) -> Proposal:
        """What would be sharded over ``degree`` ranks."""
        excluded = dict(self.excluded)
        attributes: dict[Attribute, Axis] = {}
        for _ in range(_ROUNDS):
            choice = choose(self.recorder, degree, excluded)
            attributes, refusals = solve(self.recorder, choice)
            found = {leaf: refusal.why for refusal in refusals for leaf in refusal.leaves}
            if not found:
                break
            # What is within another axis only adds degrees: it goes first, and perhaps alone.
            inner = {leaf: why for leaf, why in found.items() if leaf in choice.within}
            excluded |= inner or found
        else:
            choice = choose(self.recorder, degree, excluded | dict.fromkeys(choice.sharded, "nothing fits"))
            attributes = {}
        plan, axes = write(self.recorder, choice, attributes)
        return Proposal(plan, axes, choice)

    def exclude(self, proposal: Proposal, axis: str, why: str) -> None:
        """Never shard the leaves of a proposal's axis again."""
        self.excluded.update(dict.fromkeys(proposal.axes[axis], why))

    def only(self, proposal: Proposal, axes: frozenset[str]) -> Derivation:
        """The same recording, with every axis of ``proposal`` but these left out."""
        others = {leaf: "left out" for name, own in proposal.axes.items() if name not in axes for leaf in own}
        return Derivation(self.recorder, {**self.excluded, **others})
