"""Profiles: the rules of one release of the real backend, as data in `profiles/*.json`."""

import json
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Literal

from neuron_sim.errors import ConfigurationError

Action = Literal["convert", "refuse", "tell", "allow"]


@dataclass(frozen=True)
class RuleText:
    """One rule. `action` is what the real device does: `convert` and `tell` are silent there, `refuse` raises.

    `ops` are the operators it is about and `exempt` those it is not about, as shell patterns of "aten::name.overload".
    """

    name: str
    action: Action
    message: str
    source: str
    advice: str
    ops: tuple[str, ...] = ()
    exempt: tuple[str, ...] = ()

    def is_about(self, op: str) -> bool:
        """Whether an operator is among `ops`."""
        return any(fnmatchcase(op, pattern) for pattern in self.ops)

    def exempts(self, op: str) -> bool:
        """Whether an operator is among `exempt`."""
        return any(fnmatchcase(op, pattern) for pattern in self.exempt)


@dataclass(frozen=True)
class Profile:
    """The rules of one release."""

    name: str
    describes: str
    rules: dict[str, RuleText] = field(default_factory=dict)


def names() -> list[str]:
    """The profiles that are there."""
    entries = files("neuron_sim").joinpath("profiles").iterdir()
    return sorted(entry.name.removesuffix(".json") for entry in entries if entry.name.endswith(".json"))


@cache
def profile(name: str) -> Profile:
    """The profile of that name. Raises `ConfigurationError`, which lists the names known, for any other."""
    if name not in names():
        raise ConfigurationError(f"unknown profile {name!r} (NEURON_SIM_PROFILE); known: {', '.join(names())}")
    data = json.loads(files("neuron_sim").joinpath("profiles", f"{name}.json").read_text("utf-8"))
    rules = {
        rule: RuleText(
            name=rule,
            action=text["action"],
            message=text["message"],
            source=text["source"],
            advice=text["advice"],
            ops=tuple(text.get("ops", ())),
            exempt=tuple(text.get("except", ())),
        )
        for rule, text in data["rules"].items()
    }
    return Profile(name=data["name"], describes=data["describes"], rules=rules)
