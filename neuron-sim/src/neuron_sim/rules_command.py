"""`neuron-sim rules`: the rulebook, to be read."""

import dataclasses
import json
import textwrap

from neuron_sim import env
from neuron_sim.policy import Rulebook
from neuron_sim.profiles import Profile, RuleText, profile

_MEANING = {
    "refuse": "raises",
    "convert": "converts silently; told here",
    "tell": "does it silently; told here",
    "allow": "allows it",
}


def run(name: str | None, as_json: bool) -> int:
    """Print a profile's rules, NEURON_SIM_PROFILE's unless named. Raises `ConfigurationError` for an unknown name."""
    rules = profile(name or env.NEURON_SIM_PROFILE.read())
    if as_json:
        print(json.dumps(dataclasses.asdict(rules), indent=2))
    else:
        print(text(rules))
    return 0


def text(rules: Profile) -> str:
    """The rulebook in paragraphs of at most 100 columns."""
    lines = [f"{rules.name}: {rules.describes}", "", "settings and their defaults:"]
    lines += [f"  {name}={int(value)}" for name, value in rules.settings.items()]
    warn, strict = (Rulebook(rules, strictness).actions for strictness in ("warn", "raise"))
    for rule in rules.rules.values():
        lines += ["", f"{rule.name}: {rule.title}"]
        lines += _field("device", _MEANING[warn[rule.name]])
        if strict[rule.name] != warn[rule.name]:
            lines += _field("strict", "NEURON_SIM_STRICT=raise makes it an error")
        lines += _field("says", _example(rule))
        lines += _field("do", rule.advice)
        for override in rule.overrides:
            lines += _field("setting", f"{override.setting}={int(override.equals)}: {_MEANING[override.action]}")
        if rule.ops:
            lines += _field("about", " ".join(rule.ops))
        if rule.exempt:
            lines += _field("not", " ".join(rule.exempt))
        lines += _field("source", rule.source)
    return "\n".join(lines)


def _example(rule: RuleText) -> str:
    return rule.message.format(op="<operator>", detail="<what>") + (
        "" if rule.error == "RuntimeError" else f" ({rule.error})"
    )


def _field(name: str, content: str) -> list[str]:
    return textwrap.wrap(
        content, 100, initial_indent=f"  {name:<8}", subsequent_indent=" " * 10, break_long_words=False
    )
