"""The rules of collectives, and what was counted of them. The rules' texts are data in `collectives.json`.

A rule refuses with `NeuronRuleError`, or tells once a line; under NEURON_SIM_STRICT=raise telling is an error too, and
under `off` there are no rules: then everything runs that the host's backend can run.
"""

import json
import sys
import threading
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import FrameType

from neuron_sim import policy
from neuron_sim.errors import NeuronRuleError, NeuronRuleWarning
from neuron_sim.location import Location, user_location


@dataclass(frozen=True)
class CollectiveRule:
    """One rule: the message to give, where the rule comes from, what to do about it, and whether it only tells."""

    name: str
    message: str
    source: str
    advice: str
    tells: bool = False


@dataclass(frozen=True)
class Collective:
    """A collective about to run on this rank: its name in `torch.distributed`, and what the rules ask about."""

    name: str
    reduce_op: str
    dtype: str
    elements: int
    bytes: int
    root: int
    is_uneven: bool

    def __str__(self) -> str:
        words = [self.name]
        if self.reduce_op:
            words.append(self.reduce_op)
        if self.dtype:
            words += ["of", str(self.elements), self.dtype]
        if self.root >= 0:
            words += ["with root", str(self.root)]
        return " ".join(words)


@dataclass(frozen=True)
class CollectiveCount:
    """Calls of one collective and their bytes: of each call the larger of what the rank gave and what it got."""

    name: str
    calls: int
    bytes: int


@dataclass
class Applied:
    """What was said the first time that a rule applied at a line, and how often it did."""

    message: str
    count: int = 0


@cache
def rules() -> dict[str, CollectiveRule]:
    """All rules by name."""
    data = json.loads(files("neuron_sim").joinpath("collectives.json").read_text("utf-8"))
    return {name: CollectiveRule(name=name, **text) for name, text in data["rules"].items()}


def check(collective: Collective, is_default_group: bool) -> None:
    """Raise `NeuronRuleError` for a collective that the native backend refuses; tell about one that is unverified."""
    if policy.current().strictness == "off":
        return
    name = collective.name
    if name == "barrier" and not is_default_group:
        apply("barrier", name)
    elif name == "reduce_scatter_tensor_coalesced":
        apply("reduce_scatter_coalesced", name)
    elif name in ("monitored_barrier", "recv_anysource"):
        apply(name, name)
    elif name in ("send", "recv"):
        apply("point_to_point", name, name)
    elif name.startswith("reduce_scatter") and collective.reduce_op == "PRODUCT":
        apply("reduce_scatter_product", name)
    elif name.startswith("all_to_all") and collective.is_uneven:
        apply("uneven_splits", name, name)
    elif collective.dtype in ("uint8", "int64") and (caller := _object_collective()):
        apply("object_collectives", caller, caller)


def apply(rule: str, op: str, detail: str = "") -> None:
    """A rule applies: raise `NeuronRuleError`, or warn if the rule only tells. Nothing under NEURON_SIM_STRICT=off."""
    book = policy.current()
    if book.strictness == "off":
        return
    text, where = rules()[rule], user_location()
    message = (
        f"{text.message.format(detail=detail)} [{op} at {where}; rule {rule} of profile {book.profile.name}; "
        f"{text.advice}]"
    )
    with _lock:
        first = _applied.setdefault((rule, op, where), Applied(message))
        first.count += 1
        is_first = first.count == 1
    if not text.tells or book.strictness == "raise":
        raise NeuronRuleError(message)
    if is_first:
        warnings.warn_explicit(message, NeuronRuleWarning, where.file, where.line, where.module or None)


def count(collective: Collective) -> None:
    """Count a collective that runs."""
    with _lock:
        _calls[collective.name] += 1
        _bytes[collective.name] += collective.bytes


def counts() -> list[CollectiveCount]:
    """What this rank ran since the start or the last `reset_counts`, by name."""
    with _lock:
        return [CollectiveCount(name, calls, _bytes[name]) for name, calls in sorted(_calls.items())]


def applied() -> dict[tuple[str, str, Location], Applied]:
    """How often each rule applied, and in which words, by rule, operation and line."""
    with _lock:
        return dict(_applied)


def reset_counts() -> None:
    """Forget what was counted."""
    with _lock:
        _calls.clear()
        _bytes.clear()
        _applied.clear()


_lock = threading.Lock()
_calls: Counter[str] = Counter()
_bytes: Counter[str] = Counter()
_applied: dict[tuple[str, str, Location], Applied] = {}

_OBJECT_COLLECTIVES = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")


def _object_collective() -> str | None:
    """The object collective of `torch.distributed` that the calling thread is in, if it is in one."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "") != "__main__":
        if frame.f_code.co_name in _OBJECT_COLLECTIVES and frame.f_globals["__name__"].startswith("torch."):
            return frame.f_code.co_name
        frame = frame.f_back
    return None
