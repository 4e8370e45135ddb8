"""The verdict for an instance type: would the program run there, fall back to the host, or be refused, and why."""

from dataclasses import dataclass
from typing import Any, Literal

from neuron_sim.instances import instance

Word = Literal["runs", "falls back", "refused", "failed", "device not used"]
EXIT_REFUSED = 3
ON_HOST = ("fallback", "dynamic_shape")
CHANGES = ("float64", "int64")


@dataclass(frozen=True)
class Verdict:
    """One word and its reasons. `exit_code` is what `neuron-sim report` returns."""

    word: Word
    instance: str
    why: tuple[str, ...]
    exit_code: int


def judge(report: dict[str, Any] | None, instance_name: str, program_exit: int, no_fallbacks: bool) -> Verdict:
    """Judge a run by its merged report (None: no process used the device) and its program's exit code.

    A refusal that the program caught and survived is told, but does not refuse it: the real device would have raised in
    the same place, and been survived. A failure of another kind is the program's own; its exit code is passed on, but
    never as the code that says "refused".
    """
    own = 1 if program_exit == EXIT_REFUSED else program_exit
    if report is None:
        if program_exit:
            why = f"the program ended with exit code {program_exit}, before it used the neuron device"
            return Verdict("failed", instance_name, (why,), own)
        return Verdict("device not used", instance_name, ("no process of the program used the neuron device",), 0)
    refusals = _refusals(report, program_exit)
    if refusals:
        return Verdict("refused", instance_name, tuple(refusals), EXIT_REFUSED)
    notes = _notes(report, instance_name)
    if program_exit:
        return Verdict("failed", instance_name, (_own_failure(report, program_exit), *notes), own)
    on_host = [entry for entry in report["rules"] if entry["rule"] in ON_HOST and entry["action"] == "tell"]
    if not on_host:
        return Verdict("runs", instance_name, tuple(notes), 0)
    calls, lines = sum(entry["count"] for entry in on_host), len({(e["file"], e["line"]) for e in on_host})
    ops = ", ".join(dict.fromkeys(entry["op"] for entry in on_host))
    why = f"{_times(calls)} an operator ran on the host, from {_number(lines, 'line')}: {ops}"
    if no_fallbacks:
        return Verdict("refused", instance_name, (f"{why} (--no-fallbacks)", *notes), EXIT_REFUSED)
    return Verdict("falls back", instance_name, (why, *notes), 0)


def _refusals(report: dict[str, Any], program_exit: int) -> list[str]:
    ends = [(process["rank"], process["ended"]) for process in report["processes"]]
    found = [_of_rank(rank, end["refusal"]) for rank, end in ends if end.get("refusal")]
    if found:
        return list(dict.fromkeys(found))
    if program_exit and not any(end["how"] == "exception" for _, end in ends):
        # It ended with a code of its own choosing (a test runner, say) after the device had refused something.
        return [entry["message"] for entry in report["rules"] if entry["action"] == "refuse"]
    return []


def _of_rank(rank: int | None, message: str) -> str:
    return message if rank is None else f"rank {rank}: {message}"


def _own_failure(report: dict[str, Any], program_exit: int) -> str:
    for process in report["processes"]:
        end = process["ended"]
        if end["how"] == "exception":
            return _of_rank(process["rank"], f"the program's own failure: {end['type']}: {end['message']}")
    return f"the program's own failure: exit code {program_exit}"


def _notes(report: dict[str, Any], instance_name: str) -> list[str]:
    notes = []
    for entry in report["rules"]:
        if entry["action"] == "refuse":
            notes.append(f"{_times(entry['count'])} refused, and survived by the program: {entry['message']}")
        elif entry["rule"] in CHANGES:
            notes.append(f"{_times(entry['count'])} silently another result: {entry['message']}")
    ooms = sum(core["out_of_memory"] for process in report["processes"] for core in process["memory"])
    if ooms:
        notes.append(f"{_times(ooms)} out of the device's memory, and survived by the program")
    there = instance(instance_name).host_bytes
    device = sum(core["peak_bytes"] for process in report["processes"] for core in process["memory"])
    host = sum(process["host_peak_bytes"] for process in report["processes"]) - device
    if there is not None and host > there:
        notes.append(f"the processes held {host / 2**30:.1f} GiB on the host, and {instance_name} has {there >> 30}")
    return notes


def _number(count: int, thing: str) -> str:
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
