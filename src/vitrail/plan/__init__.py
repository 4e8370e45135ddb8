"""What is sharded: a plan, and what it comes to on a given model and degree. Pure: no ranks, no accelerator."""

from .document import FORMAT, Axis, Plan, Rule, Style
from .foreign import from_diffusers
from .resolve import degrees_beyond, resolve, valid_degrees
from .resolved import ResolvedPlan

__all__ = [
    "FORMAT",
    "Axis",
    "Plan",
    "ResolvedPlan",
    "Rule",
    "Style",
    "degrees_beyond",
    "from_diffusers",
    "resolve",
    "valid_degrees",
]
