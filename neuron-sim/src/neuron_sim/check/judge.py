"""The verdict of a check: for eager mode, for compiled mode, and of both together, by the rules of the report's."""

import dataclasses
from typing import Any

from neuron_sim.check.trace import Mode
from neuron_sim.report.verdict import EXIT_REFUSED, Verdict
from neuron_sim.report.verdict import judge as judge_run

MOST = 6
_WORST = ("refused", "failed", "falls back", "runs")


def judge(document: dict[str, Any], mode: Mode, no_fallbacks: bool) -> dict[str, Verdict]:
    """A verdict for each mode that was followed, and `both`: the worse of them."""
    modes = [name for name in ("eager", "compiled") if mode in (name, "both")]
    verdicts = {name: _of_mode(document, name, no_fallbacks) for name in modes}
    worst = min(verdicts.values(), key=lambda verdict: _WORST.index(verdict.word))
    if len(verdicts) > 1:
        why = dict.fromkeys(f"{name}: {reason}" for name, verdict in verdicts.items() for reason in verdict.why)
        worst = Verdict(worst.word, worst.instance, tuple(why), worst.exit_code)
    return {**verdicts, "all": worst}


def _of_mode(document: dict[str, Any], mode: str, no_fallbacks: bool) -> Verdict:
    instance = document["instance"]
    rules = [entry for entry in document["rules"] if entry["mode"] == mode]
    refusals = list(dict.fromkeys(entry["message"] for entry in rules if entry["action"] == "refuse"))
    memory = document["memory"]
    if memory["total_bytes_estimate"] > memory["capacity_bytes"]:
        refusals.append(_too_much(memory))
    problems = [
        f"{part['name']} could not be followed: {part['problem']}"
        for part in document["parts"]
        if part["problem"] and (mode == "compiled" or not part["problem"].startswith("compiled: "))
    ]
    if refusals:
        more = [f"and {len(refusals) - MOST} more; --json has all rules"] if len(refusals) > MOST else []
        return Verdict("refused", instance, (*refusals[:MOST], *more, *problems), EXIT_REFUSED)
    if problems:
        return Verdict("failed", instance, tuple(problems), 1)
    verdict = judge_run({"processes": [], "rules": rules}, instance, 0, no_fallbacks)
    near = dict.fromkeys(f"it may be refused: {e['message']}" for e in rules if e["rule"] == "instructions")
    return dataclasses.replace(verdict, why=(*verdict.why, *near))


def _too_much(memory: dict[str, Any]) -> str:
    total, there = memory["total_bytes_estimate"], memory["capacity_bytes"]
    return (
        f"a core has {there / 2**30:.2f} GiB, and {memory['weights_bytes'] / 2**30:.2f} GiB of weights with about "
        f"{memory['activations_bytes_estimate'] / 2**30:.2f} GiB of activations (an estimate) need "
        f"{total / 2**30:.2f} GiB: shard over more cores, or keep parts on other cores or on the host"
    )
