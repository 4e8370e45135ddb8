"""Verifies every plan of the catalog: values at degrees 2, 3 and 4, and every collective dropped in turn.

    python tools/verify_all.py [CLASS ...] [--degrees 2 3 4] [--output results.json] [--table docs/reference/catalog.md]

The ranks are simulated; ``vitrail verify CLASS --mutate`` does the same for one class on real ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import diffusers

from vitrail.apply.prove import compare, randomised
from vitrail.apply.trial import trial_of
from vitrail.plan import catalog, resolve, valid_degrees
from vitrail.plan.report import summarise
from vitrail.verify.mutate import mutate

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.torchvision_stand_in import stand_in


def verify(name: str, degrees: list[int]) -> list[dict[str, Any]]:
    """One row for each structure of a class: errors and mutations by degree, and whether the plan is full."""
    probes = {probe.name: probe for probe in catalog.probes(name)}
    rows = []
    for number, entry in enumerate(catalog.entries(name)):
        started = time.monotonic()
        trial = trial_of(probes[entry.probe])
        model = randomised(trial.model)
        row: dict[str, Any] = {"class": name, "structure": entry.probe, "errors": {}, "mutations": {}}
        possible = valid_degrees(entry.plan, model)
        for degree in [degree for degree in degrees if degree in possible]:
            comparison = compare(entry.plan, model, trial.arguments, degree)
            row["errors"][degree] = comparison.error if comparison.ok else comparison.trouble or comparison.error
            if number == 0:
                found = mutate(resolve(entry.plan, model, degree), model, trial.arguments[0])
                row["mutations"][degree] = {
                    "dropped": found.dropped, "planned": found.planned, "unnoticed": list(found.unnoticed)
                }  # fmt: skip
        import torch

        summary = summarise(resolve(entry.plan, trial.subject, 2), trial.subject, [], torch.float32)
        row |= {"full": summary.full, "left": [left.name for left in summary.leftovers if left.share > 0.001]}
        row["seconds"] = round(time.monotonic() - started, 1)
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("classes", nargs="*")
    parser.add_argument("--degrees", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    diffusers.utils.logging.set_verbosity_error()
    stand_in()
    rows = []
    for name in options.classes or catalog.names():
        for row in verify(name, options.degrees):
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
        if options.output:
            options.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if options.table:
        options.table.write_text(table(rows), encoding="utf-8")
    wrong = [row for row in rows if not _right(row)]
    print(f"{len(rows)} structures of {len({row['class'] for row in rows})} classes, {len(wrong)} wrong")
    return 1 if wrong else 0


def table(rows: list[dict[str, Any]]) -> str:
    """The reference page: one line a class."""
    import torch
    import transformers

    lines = [
        "# The catalog",
        "",
        "Every class that has a plan, with what `python tools/verify_all.py --table docs/reference/catalog.md`",
        "found on the small configurations of the [probes](probes.md), with random weights, in float64: the largest",
        "relative error of any structure at degrees 2, 3 and 4; how many collectives one call runs, each of which was",
        "dropped in turn at each degree (on the first structure) and noticed; and whether the plan is *full*: every",
        "parameter of two or more dimensions above 0.1 % of the total is sharded.",
        "",
        f"diffusers {diffusers.__version__}, transformers {transformers.__version__}, "
        f"torch {torch.__version__.split('+')[0]}.",
        "",
        "| class | structures | error | collectives | drops unnoticed | full |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(row["class"] for row in rows):
        own = [row for row in rows if row["class"] == name]
        errors = [error for row in own for error in row["errors"].values()]
        worst = max(errors) if all(isinstance(error, float) for error in errors) else "failed"
        mutations = list(own[0]["mutations"].values())
        dropped = "/".join(str(count) for count in dict.fromkeys(found["dropped"] for found in mutations))
        unnoticed = sum(len(found["unnoticed"]) for found in mutations)
        left = sorted({tensor for row in own for tensor in row["left"]})
        full = "yes" if not left else "no: " + ", ".join(f"`{tensor}`" for tensor in left[:3])
        shown = worst if isinstance(worst, str) else f"{worst:.0e}"
        lines.append(f"| {name} | {len(own)} | {shown} | {dropped} | {unnoticed} | {full} |")
    return "\n".join(lines) + "\n"


def _right(row: dict[str, Any]) -> bool:
    errors = all(isinstance(error, float) and error <= 1e-9 for error in row["errors"].values())
    return errors and all(m["dropped"] == m["planned"] and not m["unnoticed"] for m in row["mutations"].values())


if __name__ == "__main__":
    sys.exit(main())
