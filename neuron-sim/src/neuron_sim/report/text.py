"""The report for a terminal: plain text, aligned, the verdict last. Colour only for the verdict, where there is any."""

import os
from typing import Any, TextIO

from neuron_sim.report import graphs
from neuron_sim.report.verdict import Verdict, Word

_COLOURS: dict[Word, str] = {"runs": "32", "falls back": "33", "refused": "31", "failed": "31", "device not used": "33"}
SHOWN = 12


def render(report: dict[str, Any] | None, verdict: Verdict, colour: bool = False) -> str:
    """The whole report."""
    lines: list[str] = []
    if report is not None:
        for part in (_head, _operators, _programs, _graphs, _rules, _syncs, _collectives, _memory):
            lines += part(report)
    lines += ["", f"verdict for {verdict.instance}: {coloured(verdict.word, colour)}"]
    lines += [f"  {reason}" for reason in verdict.why]
    return "\n".join(lines)


def coloured(word: Word, colour: bool) -> str:
    """A verdict's word, in its colour where there is any."""
    return f"\033[1;{_COLOURS[word]}m{word}\033[0m" if colour else word


def wants_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal that shows colours, and nobody said NO_COLOR."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _head(report: dict[str, Any]) -> list[str]:
    processes = report["processes"]
    seconds = max(process["seconds"] for process in processes)
    return [
        f"neuron-sim {report['versions']['neuron-sim']}, torch {report['versions']['torch']}, profile "
        f"{report['profile']}, strictness {report['strictness']}",
        f"{report['instance']}, {len(processes)} process{'es' if len(processes) > 1 else ''}, {seconds:.1f} s "
        "on the host (no measure of the device's speed)",
    ]


def _operators(report: dict[str, Any]) -> list[str]:
    native, fallen = report["operators"]["native"], report["operators"]["fallen_back"]
    lines = ["", "operators"]
    lines += _table([("on the device", sum(native.values()), f"{len(native)} different")])
    lines += _table([("on the host", sum(fallen.values()), ", ".join(fallen) or "none")])
    return lines


def _programs(report: dict[str, Any]) -> list[str]:
    programs = report["programs"]
    busiest = [f"{name} {count}" for name, count in list(programs["by_operator"].items())[:4] if count > 1]
    return [
        "",
        "programs that the device compiles: one for each operator's shapes, dtypes and static arguments",
        *_table(
            [
                ("compiled", programs["compiled"], "most: " + ", ".join(busiest) if busiest else ""),
                ("found on disk", programs["disk_hits"], programs["disk"] or "no cache on disk"),
                ("found in memory", programs["memory_hits"], ""),
            ]
        ),
    ]


def _graphs(report: dict[str, Any]) -> list[str]:
    return graphs.render(report["compiler"])


def _rules(report: dict[str, Any]) -> list[str]:
    rules = report["rules"]
    if not rules:
        return ["", "rules: none applied"]
    lines = ["", "rules that applied, by line"]
    for entry in rules[:SHOWN]:
        lines += _table([(entry["rule"], entry["count"], f"{_place(entry)}  {entry['op']}")])
    return lines + _rest(rules)


def _syncs(report: dict[str, Any]) -> list[str]:
    kinds, places = report["host_syncs"]["by_kind"], report["host_syncs"]["by_line"]
    if not kinds:
        return ["", "host synchronisations: none"]
    lines = ["", "host synchronisations: " + ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())]
    for entry in places[:SHOWN]:
        lines += _table([(entry["kind"], entry["count"], _place(entry))])
    return lines + _rest(places)


def _collectives(report: dict[str, Any]) -> list[str]:
    if not report["collectives"]:
        return []
    rows = [
        (name.removeprefix("c10d::").rstrip("_"), found["calls"], f"{human_size(found['bytes'])} in all ranks")
        for name, found in report["collectives"].items()
    ]
    return ["", "collectives", *_table(rows)]


def _memory(report: dict[str, Any]) -> list[str]:
    lines = ["", "peak memory"]
    for process in report["processes"]:
        rank = "" if process["rank"] is None else f"rank {process['rank']}, "
        for core in process["memory"]:
            share = core["peak_bytes"] / core["capacity_bytes"]
            full = f", {core['out_of_memory']} times out of memory" if core["out_of_memory"] else ""
            lines.append(
                f"  {rank + 'core ' + str(core['core']):<18}{human_size(core['peak_bytes']):>12}  of "
                f"{human_size(core['capacity_bytes'])} ({share:.1%}){full}"
            )
    return lines


def _table(rows: list[tuple[str, int, str]]) -> list[str]:
    return [f"  {name:<18}{number:>12,}  {note}".rstrip() for name, number, note in rows]


def _rest(entries: list[Any]) -> list[str]:
    return [f"  … and {len(entries) - SHOWN} more; --json has all"] if len(entries) > SHOWN else []


def _place(entry: dict[str, Any]) -> str:
    folder = os.getcwd() + os.sep
    where = f"{entry['file'].removeprefix(folder)}:{entry['line']}"
    return f"{where} (in {entry['via']})" if entry["via"] else where


def human_size(count: int) -> str:
    """Bytes, with a unit."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.2f} GiB"
