"""Puts the reports of one run's processes together."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from neuron_sim.errors import ConfigurationError
from neuron_sim.report.recorder import FORMAT

Report = dict[str, Any]


def read(file: Path) -> Report:
    """A process's report. Raises `ConfigurationError` for a file that is none."""
    try:
        report = json.loads(file.read_text("utf-8"))
        if report["format"] != FORMAT:
            raise ValueError(f"its format is {report['format']!r}, not {FORMAT!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{file} is no report of this neuron-sim: {error}") from error
    return dict(report)


def merge(reports: Iterable[Report]) -> Report | None:
    """One report of several processes: counts added up, processes side by side. None for none."""
    ordered = sorted(reports, key=lambda r: (r["process"]["rank"] is None, r["process"]["rank"], r["process"]["pid"]))
    if not ordered:
        return None
    first = ordered[0]
    programs = [report["programs"] for report in ordered]
    return {
        "format": FORMAT,
        "versions": first["versions"],
        "profile": first["profile"],
        "strictness": first["strictness"],
        "settings": first["settings"],
        "instance": first["instance"],
        "processes": [report["process"] for report in ordered],
        "operators": {
            kind: _added(report["operators"][kind] for report in ordered) for kind in ("native", "fallen_back")
        },
        "programs": {
            **{k: sum(p[k] for p in programs) for k in ("compiled", "disk_hits", "memory_hits", "rewritten")},
            "disk": programs[0]["disk"],
            "by_operator": _most(report["programs"]["by_operator"] for report in ordered),
        },
        "compiler": _compiler([report["compiler"] for report in ordered if report["compiler"]]),
        "rules": _same_added((r for report in ordered for r in report["rules"]), ("rule", "op", "file", "line", "via")),
        "host_syncs": {
            "by_kind": _added(report["host_syncs"]["by_kind"] for report in ordered),
            "by_line": _same_added(
                (line for report in ordered for line in report["host_syncs"]["by_line"]),
                ("kind", "file", "line", "via"),
            ),
        },
        "collectives": {
            name: {
                key: sum(report["collectives"].get(name, {}).get(key, 0) for report in ordered)
                for key in ("calls", "bytes")
            }
            for name in sorted({name for report in ordered for name in report["collectives"]})
        },
    }


def _compiler(reports: list[Report]) -> Report | None:
    """The ranks' graphs put together: the same graph of several ranks is one, with the runs of all."""
    if not reports:
        return None
    graphs: dict[tuple[Any, ...], Report] = {}
    for report in reports:
        for graph in report["graphs"]:
            keys = tuple(program["key"] for program in graph["programs"])
            same = graphs.setdefault((graph["name"], graph["code"], *keys), graph | {"runs": 0, "processes": 0})
            same["runs"] += graph["runs"]
            same["processes"] += 1
    counts = ("aot_autograd", "compiled", "disk_hits", "memory_hits")
    return {name: sum(report[name] for report in reports) for name in counts} | {"graphs": list(graphs.values())}


def _added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))


def _most(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    # Every rank meets much the same programs, so a sum would say nothing.
    most: dict[str, int] = {}
    for count in counts:
        for name, number in count.items():
            most[name] = max(number, most.get(name, 0))
    return dict(sorted(most.items(), key=lambda item: (-item[1], item[0])))


def _same_added(entries: Iterable[Report], keys: tuple[str, ...]) -> list[Report]:
    found: dict[tuple[Any, ...], Report] = {}
    for entry in entries:
        same = found.setdefault(tuple(entry[key] for key in keys), entry | {"count": 0})
        same["count"] += entry["count"]
    return sorted(found.values(), key=lambda entry: -entry["count"])
