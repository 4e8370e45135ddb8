"""The rulebook at work: what the core reports, told or raised as the profile and the strictness have it.

Strictness (NEURON_SIM_STRICT):

- `warn`, the default: as the real device. What it refuses raises in its words; what it does silently (a conversion, an
  operator on the host) is done and told, once for each line.
- `raise`: what the real device does silently is an error too.
- `off`: no rules. float64 stays float64. Only what no device can do, such as mixing devices, still raises.
"""

import threading
import warnings
from collections import Counter
from dataclasses import dataclass

from neuron_sim import env
from neuron_sim.errors import NeuronRuleError, NeuronRuleWarning
from neuron_sim.location import Location, user_location
from neuron_sim.profiles import Profile, RuleText, profile


@dataclass(frozen=True)
class Event:
    """A rule that applied to an operator at a line."""

    rule: str
    op: str
    where: Location


class Rulebook:
    """One profile at one strictness, and what it saw."""

    def __init__(self, rules: Profile, strictness: str, decomposes_complex: bool | None = None) -> None:
        self.profile = rules
        self.strictness = strictness
        self._decomposes_complex = decomposes_complex
        self._lock = threading.Lock()
        self.events: Counter[Event] = Counter()

    @classmethod
    def from_environment(cls) -> "Rulebook":
        """The rulebook that the environment asks for. Raises `ConfigurationError` when it is malformed."""
        return cls(profile(env.NEURON_SIM_PROFILE.read()), env.NEURON_SIM_STRICT.read(), env.COMPLEX_DECOMPOSE.read())

    def watches(self) -> tuple[bool, bool, bool]:
        """Whether the core must watch for float64, for complex numbers, and for operators that fall back."""
        if self.strictness == "off":
            return False, False, False
        refuses_complex = self.profile.rules["complex"].action == "refuse"
        if self._decomposes_complex is not None and self.profile.rules["complex"].action == "allow":
            refuses_complex = not self._decomposes_complex
        return self.profile.rules["float64"].action == "convert", refuses_complex, True

    def classify(self, op: str) -> tuple[bool, bool]:
        """Whether an operator may take tensors of the host beside the device's, and whether it falls back."""
        return self.profile.rules["mixed_devices"].exempts(op), self.profile.rules["fallback"].is_about(op)

    def apply(self, rule: str, op: str, detail: str) -> None:
        """A rule applies to an operator. Raises `NeuronRuleError` when it refuses, warns once a line when it tells."""
        text = self.profile.rules[rule]
        event = Event(rule, op, user_location())
        with self._lock:
            self.events[event] += 1
            is_first = self.events[event] == 1
        message = self._explain(text, event, detail)
        if text.action in ("refuse", "allow") or self.strictness == "raise":
            raise NeuronRuleError(message)
        if is_first and self.strictness != "off":
            where = event.where
            warnings.warn_explicit(message, NeuronRuleWarning, where.file, where.line, where.module or None)

    def _explain(self, text: RuleText, event: Event, detail: str) -> str:
        words = text.message.format(op=event.op, detail=detail)
        return f"{words} [{event.op} at {event.where}; rule {text.name} of profile {self.profile.name}; {text.advice}]"


_current: Rulebook | None = None


def current() -> Rulebook:
    """The rulebook in force, read from the environment the first time."""
    global _current
    if _current is None:
        _current = Rulebook.from_environment()
    return _current


def use(rulebook: Rulebook) -> Rulebook | None:
    """Put a rulebook in force, and return the one that was. For tests and tools."""
    global _current
    from neuron_sim import _core

    previous, _current = _current, rulebook
    _core.watch(*rulebook.watches())
    return previous
