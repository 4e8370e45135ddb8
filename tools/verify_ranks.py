"""Verifies every plan of the catalog on real ranks: values at degrees 2, 3 and 4 against the whole model, in float64.

    torchrun --nproc-per-node 4 tools/verify_ranks.py [CLASS ...] [--degrees 2 3 4] [--output results.json]

`verify_all.py` does the same on simulated ranks, and drops collectives; ``vitrail verify CLASS`` does one class.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vitrail.apply.trial import trial_of
from vitrail.plan import catalog, valid_degrees
from vitrail.verify.job import compare_on_ranks
from vitrail.verify.trials import Case

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.torchvision_stand_in import stand_in


def verify(name: str, meshes: dict[int, DeviceMesh]) -> list[dict[str, Any]]:
    """One row for each structure of a class: the worst error of any rank, by degree."""
    probes = {probe.name: probe for probe in catalog.probes(name)}
    rows = []
    for entry in catalog.entries(name):
        trial = trial_of(probes[entry.probe])
        possible = valid_degrees(entry.plan, trial.model)
        errors: dict[int, float] = {}
        for degree, mesh in meshes.items():
            if degree not in possible:
                continue
            mine = 0.0
            if mesh.get_coordinate() is not None:
                mine = compare_on_ranks(Case(name, trial), entry.plan, mesh)["error"]
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine if math.isfinite(mine) else 1e300)
            errors[degree] = max(everyone)
        rows.append({"class": name, "structure": entry.probe, "errors": errors})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("classes", nargs="*")
    parser.add_argument("--degrees", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    diffusers.utils.logging.set_verbosity_error()
    stand_in()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    meshes = {degree: DeviceMesh("cpu", list(range(degree))) for degree in options.degrees}
    rows: list[dict[str, Any]] = []
    for name in options.classes or catalog.names():
        for row in verify(name, meshes):
            rows.append(row)
            if first:
                print(json.dumps(row), file=sys.stderr, flush=True)
        if first and options.output:
            options.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    wrong = [row for row in rows if not all(error <= 1e-9 for error in row["errors"].values())]
    if first:
        worst = max((error for row in rows for error in row["errors"].values()), default=0.0)
        classes = len({row["class"] for row in rows})
        print(f"{len(rows)} structures of {classes} classes, {len(wrong)} wrong; the largest error is {worst:.1e}")
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
