"""Profiles: the rules of one release of the real backend, as data.

`rulebook.json` holds what every profile shares, each rule's words and the operators it is about; `profiles/*.json` say
what each release does, on which settings that depends, and where it is read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from neuron_sim.errors import ConfigurationError

Action = Literal["convert", "refuse", "tell", "allow"]
Scope = Literal["both", "compile"]


@dataclass(frozen=True)
class Override:
    """Another action where an environment variable of the backend has a value."""

    setting: str
    equals: bool
    action: Action


@dataclass(frozen=True)
class Case:
    """One call that a rule is about: an operator whose argument has a value, or so many dimensions."""

    op: str
    argument: int
    detail: str
    equals: str | None = None
    dimensions: int | None = None


@dataclass(frozen=True)
class RuleText:
    """One rule. `action` is what the real device does: `convert` and `tell` are silent there, `refuse` raises.

    `strict` is the action under NEURON_SIM_STRICT=raise. `ops` are the operators the rule is about and `exempt` those
    it is not about, as shell patterns of "aten::name.overload". A rule of scope "compile" is about compiled graphs
    alone. `limit` is the number that a rule compares with; where what it compares is an estimate, what lies between the
    limit divided and multiplied by `margin` is told and not refused.
    """

    name: str
    title: str
    action: Action
    strict: Action
    message: str
    source: str
    advice: str
    error: str = "RuntimeError"
    scope: Scope = "both"
    limit: int | None = None
    margin: float = 1.0
    overrides: tuple[Override, ...] = ()
    ops: tuple[str, ...] = ()
    exempt: tuple[str, ...] = ()
    cases: tuple[Case, ...] = ()

    def is_about(self, op: str) -> bool:
        """Whether an operator is among `ops`."""
        return any(fnmatchcase(op, pattern) for pattern in self.ops)

    def exempts(self, op: str) -> bool:
        """Whether an operator is among `exempt`."""
        return any(fnmatchcase(op, pattern) for pattern in self.exempt)

    def effective(self, settings: Mapping[str, bool], strictness: str) -> Action:
        """What happens under these settings and this strictness."""
        action = next((o.action for o in self.overrides if settings.get(o.setting) == o.equals), self.action)
        return self.strict if strictness == "raise" and action in ("convert", "tell") else action


@dataclass(frozen=True)
class Profile:
    """The rules of one release, and the defaults of the settings that they depend on."""

    name: str
    describes: str
    settings: dict[str, bool] = field(default_factory=dict)
    rules: dict[str, RuleText] = field(default_factory=dict)


def names() -> list[str]:
    """The profiles that are there."""
    entries = files("neuron_sim").joinpath("profiles").iterdir()
    return sorted(entry.name.removesuffix(".json") for entry in entries if entry.name.endswith(".json"))


@cache
def host_operators() -> dict[str, tuple[str, ...]]:
    """The operators without a kernel on the device, by kind, as shell patterns."""
    return {kind: tuple(patterns) for kind, patterns in _load("rulebook.json")["host_operators"].items()}


@cache
def profile(name: str) -> Profile:
    """The profile of that name. Raises `ConfigurationError`, which lists the names known, for any other."""
    if name not in names():
        raise ConfigurationError(f"unknown profile {name!r} (NEURON_SIM_PROFILE); known: {', '.join(names())}")
    shared = _load("rulebook.json")["rules"]
    data = _load("profiles", f"{name}.json")
    rules = {rule: _rule(rule, words | data["rules"][rule]) for rule, words in shared.items()}
    return Profile(name=data["name"], describes=data["describes"], settings=data["settings"], rules=rules)


def _rule(name: str, entry: dict[str, Any]) -> RuleText:
    ops = entry.get("ops", ())
    if name == "fallback":
        ops = [pattern for patterns in host_operators().values() for pattern in patterns]
    return RuleText(
        name=name,
        title=entry["title"],
        action=entry["action"],
        strict=entry.get("strict", entry["action"]),
        message=entry["message"],
        source=entry["source"],
        advice=entry["advice"],
        error=entry.get("error", "RuntimeError"),
        scope=entry.get("scope", "both"),
        limit=entry.get("limit"),
        margin=entry.get("margin", 1.0),
        overrides=tuple(Override(**override) for override in entry.get("settings", ())),
        ops=tuple(ops),
        exempt=tuple(entry.get("except", ())),
        cases=tuple(Case(**case) for case in entry.get("cases", ())),
    )


def _load(*path: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(files("neuron_sim").joinpath(*path).read_text("utf-8"))
    return loaded
