"""Derives and proves every plan of the catalog afresh from its probes, and writes the catalog's files.

    python tools/build_catalog.py [CLASS ...] [--check]

With ``--check`` nothing is written: the files must be what comes out.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

import diffusers

from vitrail.apply.planning import prove_trial
from vitrail.apply.trial import trial_of
from vitrail.errors import VitrailError
from vitrail.plan import catalog
from vitrail.plan.structure import key_of

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.torchvision_stand_in import stand_in

FOLDER = Path(catalog.__file__).parent


def build(name: str) -> str:
    """The text of one class's file."""
    found: dict[str, catalog.Entry] = {}
    for probe in catalog.probes(name):
        trial = trial_of(probe)
        key = key_of(trial.subject)
        if key in found:
            print(f"{name}: {probe.name!r} has the structure of {found[key].probe!r}", file=sys.stderr)
            continue
        started = time.monotonic()
        plan, comparisons = prove_trial(trial)
        found[key] = catalog.Entry(probe.name, key, plan)
        worst = max(comparison.error for comparison in comparisons)
        print(f"{name}: {probe.name}: {worst:.1e} in {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    return catalog.write(name, list(found.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("classes", nargs="*")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    diffusers.utils.logging.set_verbosity_error()
    stand_in()
    wrong = []
    for name in options.classes or catalog.probe_names():
        try:
            text = build(name)
        except VitrailError as error:
            print(f"{name}: {error}", file=sys.stderr)
            wrong.append(name)
            continue
        file = FOLDER / f"{name}.json"
        if not options.check:
            file.write_text(text, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            print(f"{name}: the file is not what the rules give now", file=sys.stderr)
            wrong.append(name)
    print(
        f"{len(wrong)} of {len(options.classes or catalog.probe_names())} failed: {', '.join(wrong)}"
        if wrong
        else "all well"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
