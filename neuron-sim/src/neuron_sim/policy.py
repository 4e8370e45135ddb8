"""The rulebook at work: what the core reports, told or raised as the profile, the settings and the strictness have it.

Strictness (NEURON_SIM_STRICT):

- `warn`, the default: as the real device. What it refuses raises in its words; what it does silently (a conversion, an
  operator on the host) is done and told, once for each line.
- `raise`: what changes a result silently is an error too. An operator that runs on the host gives the same result and
  stays told; `neuron-sim report --no-fallbacks` gates on those.
- `off`: no rules. float64 stays float64. Only what no device can do, such as mixing devices, still raises.
"""

import threading
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from neuron_sim import env, signatures
from neuron_sim.errors import NeuronRuleError, NeuronRuleTypeError, NeuronRuleWarning
from neuron_sim.location import Location, user_location
from neuron_sim.profiles import Action, Profile, profile

ERRORS: dict[str, type[NeuronRuleError]] = {"RuntimeError": NeuronRuleError, "TypeError": NeuronRuleTypeError}
# Asked of a call's description, the first time it is seen, and not by the core.
BY_SIGNATURE = ("untested",)


@dataclass(frozen=True)
class Event:
    """A rule that applied to an operator at a line."""

    rule: str
    op: str
    where: Location


class Rulebook:
    """One profile under settings at one strictness, and what it saw.

    `settings` are the backend's environment variables that the rules depend on, over the profile's defaults.
    """

    def __init__(self, rules: Profile, strictness: str, settings: Mapping[str, bool] | None = None) -> None:
        self.profile = rules
        self.strictness = strictness
        self.settings = rules.settings | dict(settings or {})
        self.actions: dict[str, Action] = {
            name: rule.effective(self.settings, strictness) for name, rule in rules.rules.items()
        }
        self._lock = threading.Lock()
        self.events: Counter[Event] = Counter()
        self.details: dict[Event, str] = {}

    @classmethod
    def from_environment(cls) -> "Rulebook":
        """The rulebook that the environment asks for. Raises `ConfigurationError` when it is malformed."""
        settings = {variable.name: variable.read() for variable in env.RULE_SETTINGS}
        chosen = {name: value for name, value in settings.items() if value is not None}
        return cls(profile(env.NEURON_SIM_PROFILE.read()), env.NEURON_SIM_STRICT.read(), chosen)

    def watches(self) -> list[str]:
        """The rules that the core must report."""
        if self.strictness == "off":
            return []
        return [
            name
            for name, action in self.actions.items()
            if action != "allow" and name not in BY_SIGNATURE and self.profile.rules[name].scope != "compile"
        ]

    def classify(self, op: str) -> tuple[bool, bool, bool]:
        """Whether an operator may take tensors of the host beside the device's, falls back, has a static shape."""
        rules = self.profile.rules
        return rules["mixed_devices"].exempts(op), rules["fallback"].is_about(op), rules["dynamic_shape"].exempts(op)

    def look_at(self, op: str, signature: str) -> None:
        """The rules that a call's description decides, before a call runs that was not seen yet. Raises as `apply`."""
        if self.strictness == "off":
            return
        for case in self.profile.rules["untested"].cases:
            if case.op == op and signatures.matches(signature, case):
                self.apply("untested", op, case.detail)
        if self.profile.rules["int64"].is_about(op) and (number := signatures.number_beyond_int32(signature)):
            self.apply("int64", op, number)

    def apply(self, rule: str, op: str, detail: str) -> None:
        """A rule applies to an operator. Raises `NeuronRuleError` when it refuses, warns once a line when it tells."""
        event = Event(rule, op, user_location())
        # The core reports rules that are allowed or off only where there is no other way (mixed devices).
        self.record(event, self.explain(event, detail), refuses=self.actions[rule] in ("refuse", "allow"))

    def record(self, event: Event, message: str, refuses: bool) -> None:
        """Note an event, then raise or tell it as `apply` does. For what is found in another way than by running."""
        rule = event.rule
        with self._lock:
            self.events[event] += 1
            is_first = self.events[event] == 1
            self.details.setdefault(event, message)
        if refuses:
            error = ERRORS[self.profile.rules[rule].error](message)
            error.rule = rule
            raise error
        if is_first and self.strictness != "off":
            where = event.where
            # Python drops a warning whose module is None, without a word.
            warnings.warn_explicit(message, NeuronRuleWarning, where.file, where.line, where.module or where.file)

    def explain(self, event: Event, detail: str) -> str:
        """A rule's words for an event, with its line, the rule's name and what to do."""
        text = self.profile.rules[event.rule]
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
    _core.watch(rulebook.watches())
    _core.forget_signatures()
    return previous
