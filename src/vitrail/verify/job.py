"""One rank of ``vitrail verify``: ``python -m vitrail.verify.job JOB.json``."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import env
from ..apply.entry import apply_tensor_parallel
from ..apply.prove import randomised, relative_error
from ..apply.trial import trials_for
from ..apply.wide import Wide, dense_flex_attention
from ..plan import Plan
from ..plan.configuration import configuration
from ..run.rank import die_with_parent, guarded
from ..run.ranks import joined
from ..run.subject import Subject, dtype_of, find
from .outputs import Difference, Outputs, block_of, differences, recorded
from .trials import Case, cases


def compare_on_ranks(case: Case, plan: Plan, mesh: Any, pad: bool = False) -> dict[str, Any]:
    """The sharded model against itself unsharded, in float64, on real ranks: the worst error and where it begins."""
    from diffusers import TensorParallelConfig

    reference_model = randomised(case.trial.model)
    sharded = apply_tensor_parallel(randomised(case.trial.model), TensorParallelConfig(mesh=mesh), plan, pad=pad)
    worst, first = 0.0, None
    for arguments in case.trial.arguments:
        with torch.no_grad(), Wide(), dense_flex_attention():
            with recorded(reference_model) as expected:
                reference = reference_model(**arguments())
            with recorded(sharded) as given:
                output = sharded(**arguments())
        error = relative_error(output, reference)
        if error > worst or not math.isfinite(error):
            worst = error
        wrong = [item for item in differences(given, expected) if item.error > 1e-9]
        if wrong and first is None:
            first = wrong[0]
    return {"error": worst, "first": _where(first, reference_model)}


def _where(first: Difference | None, model: nn.Module) -> dict[str, Any] | None:
    if first is None:
        return None
    return {"module": first.module, "block": block_of(first.module, model), "error": first.error}


def compare_checkpoint(
    subject: Subject, plan: Plan, mesh: Any, dtype: torch.dtype, pad: bool = False
) -> dict[str, Any]:
    """A real checkpoint, sharded against unsharded in the same dtype, block by block."""
    from diffusers import TensorParallelConfig

    from ..apply.entry import from_pretrained

    assert subject.folder is not None
    cls: Any = type(subject.model)
    folder = str(subject.folder)
    whole_model = cls.from_pretrained(folder, torch_dtype=dtype).eval()
    trial = trials_for(subject.model, subject.inputs)
    parallel = TensorParallelConfig(mesh=mesh)
    sharded = from_pretrained(cls, folder, parallel_config=parallel, plan=plan, dtype=dtype, pad=pad)
    arguments = _arguments_for(subject, trial, dtype)
    with torch.no_grad():
        with recorded(whole_model) as expected:
            reference = whole_model(**arguments)
        with recorded(sharded) as given:
            output = sharded(**arguments)
    return {"error": relative_error(output, reference), "blocks": _by_block(given, expected, whole_model)}


def _arguments_for(subject: Subject, trial: Any, dtype: torch.dtype) -> dict[str, Any]:
    from ..plan.catalog import probes

    config = configuration(subject.model)
    for probe in probes(type(subject.model).__name__):
        if probe.name == trial.probe:
            return probe.make(next(iter(probe.inputs)), 0, config=config, dtype=dtype)
    return {key: _as(value, dtype) for key, value in trial.arguments[0]().items()}


def _as(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _by_block(given: Outputs, expected: Outputs, model: nn.Module) -> list[dict[str, Any]]:
    """The error of each block's own output, in the order in which blocks end."""
    blocks = []
    for item in differences(given, expected):
        if item.module and block_of(item.module, model) == item.module:
            blocks.append({"block": item.module, "error": item.error})
    return blocks


def run(job: dict[str, Any]) -> dict[str, Any]:
    subjects, _ = find(job["target"], Path(job["config"]) if job["config"] else None)
    world = env.WORLD_SIZE.read() or 1
    results = []
    with joined("cpu", world) as mesh:
        for subject, plans in zip(subjects, job["plans"], strict=True):
            if job["dtype"]:
                plan = Plan.from_document(plans[0], source="verified")
                results.append(
                    {
                        "case": subject.name,
                        **compare_checkpoint(subject, plan, mesh, dtype_of(job["dtype"]), job["pad"]),
                    }
                )
                continue
            for case, document in zip(cases(subject, world), plans, strict=True):
                plan = Plan.from_document(document, source="verified")
                results.append({"case": case.name, **_worst(compare_on_ranks(case, plan, mesh, job["pad"]))})
    return {"results": results}


def _worst(mine: dict[str, Any]) -> dict[str, Any]:
    """The worst of all ranks, with the rank; NaN is worse than any number."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    rank = max(range(len(everyone)), key=lambda index: _rankable(everyone[index]["error"]))
    return {**everyone[rank], "rank": rank}


def _rankable(error: float) -> float:
    return error if math.isfinite(error) else math.inf


def main() -> None:
    die_with_parent()
    job_file = Path(sys.argv[1])
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

    def work() -> None:
        report = run(json.loads(job_file.read_text(encoding="utf-8")))
        if env.RANK.read() == 0:
            job_file.with_name("report.json").write_text(json.dumps(report), encoding="utf-8")

    guarded(work, quiet=True)


if __name__ == "__main__":
    main()
