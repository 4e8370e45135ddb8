"""The check for a terminal: plain text, aligned, the verdict last."""

import json
import os
from collections import Counter
from typing import Any

from neuron_sim.report.text import SHOWN, coloured, human_size
from neuron_sim.report.verdict import Verdict


def render(document: dict[str, Any], verdicts: dict[str, Verdict], colour: bool = False) -> str:
    """The whole text."""
    lines: list[str] = []
    for part in (_head, _parts, _rules, _graphs, _collectives, _memory):
        lines += part(document)
    lines += ["", f"verdict for {document['instance']}: {coloured(verdicts['all'].word, colour)}"]
    if len(verdicts) > 2:
        words = ", ".join(f"{name}: {verdict.word}" for name, verdict in verdicts.items() if name != "all")
        lines.append(f"  {words}")
    lines += [f"  {reason}" for reason in verdicts["all"].why]
    return "\n".join(lines)


def _head(document: dict[str, Any]) -> list[str]:
    width, height = document["size"]
    there = document["topology"]
    groups = "" if there["groups"] == 1 else f", which has room for {there['groups']} such groups"
    cores = f"{there['cores']} of {there['of']} cores{groups}" + ("; the group routes" if there["cores"] > 1 else "")
    return [
        f"{document['model']} at {width}x{height}, {document['dtype']}, profile {document['profile']}; "
        f"checked in {document['seconds']:.1f} s, without weights",
        f"{document['instance']}: {cores}",
    ]


def _parts(document: dict[str, Any]) -> list[str]:
    lines = ["", "parts"]
    for part in document["parts"]:
        how = f"sharded, {part['plan']} plan" if part["is_sharded"] else "whole on every core"
        lines.append(f"  {part['name']}: {part['parameters']:,} parameters, {how}")
        lines += [f"    {name} {shape}" for name, shape in part["inputs"].items()]
        lines += [f"    {note}" for note in part["notes"]]
        syncs = ", ".join(f"{count:,} {kind}" for kind, count in part["host_syncs"].items())
        lines.append(
            f"    eager: {part['operators']:,} operators, about {part['programs_estimate']:,} programs to compile; "
            f"the host waits: {syncs or 'never'}"
        )
        if part["problem"]:
            lines.append(f"    could not be followed: {part['problem']}")
    return lines


def _rules(document: dict[str, Any]) -> list[str]:
    rules = document["rules"]
    if not rules:
        return ["", "rules: none apply"]
    lines = ["", "rules that apply, by line"]
    for entry in rules[:SHOWN]:
        file = entry["file"].rpartition("site-packages" + os.sep)[2].removeprefix(os.getcwd() + os.sep)
        where = f"{file}:{entry['line']}"
        via = f" (in {entry['via']})" if entry["via"] else ""
        lines.append(f"  {entry['rule']:<16}{entry['mode']:<10}{entry['count']:>6,}  {where}{via}  {entry['op']}")
    if len(rules) > SHOWN:
        lines.append(f"  … and {len(rules) - SHOWN} more; --json has all")
    return lines


def _graphs(document: dict[str, Any]) -> list[str]:
    graphs = [graph for part in document["parts"] for graph in part["graphs"]]
    breaks = {reason: count for part in document["parts"] for reason, count in part["graph_breaks"].items()}
    if not graphs:
        return []
    lines = ["", f"graphs to compile: {len(graphs)}  (instructions, memory and seconds are estimates)"]
    alike = Counter(json.dumps(graph) for graph in graphs)
    for text, count in alike.items():
        graph = json.loads(text)
        name = graph["unit"] + (f" ({count} alike)" if count > 1 else "")
        lines.append(
            f"  {name:<40}{graph['operators']:>6,} operators{graph['instructions_estimate']:>12,} instructions"
            f"{human_size(graph['peak_bytes_estimate']):>12}{_duration(graph['compile_seconds_estimate']):>10}"
        )
    lines.append(
        f"  in all about {_duration(document['graphs']['compile_seconds_estimate'])} to compile, one after the other; "
        f"scaled by instructions from {document['graphs']['basis']}"
    )
    return lines + [f"  graph break, {count} times: {reason}" for reason, count in breaks.items()]


def _collectives(document: dict[str, Any]) -> list[str]:
    rows = [
        f"  {name:<28}{found['calls']:>8,} calls, {human_size(found['bytes'])} on each rank"
        for part in document["parts"]
        for name, found in part["collectives"].items()
    ]
    return ["", "collectives of one step", *rows] if rows else []


def _memory(document: dict[str, Any]) -> list[str]:
    memory = document["memory"]
    lines = ["", "memory of a core"]
    for part in document["parts"]:
        size = human_size(part["weights_bytes"])
        lines.append(f"  {part['name'] + ', weights':<44}{size:>12}")
    lines.append(f"  {'activations, at most (estimate)':<44}{human_size(memory['activations_bytes_estimate']):>12}")
    share = memory["total_bytes_estimate"] / memory["capacity_bytes"]
    total = human_size(memory["total_bytes_estimate"])
    return [*lines, f"  {'in all':<44}{total:>12}  of {human_size(memory['capacity_bytes'])} ({share:.1%})"]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
