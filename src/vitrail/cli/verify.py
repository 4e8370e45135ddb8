"""``vitrail verify``: is what is sharded right?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ..errors import PlanError, UsageError


def verify(
    target: str | None = None,
    /,
    *,
    tp: int = 2,
    config: Path | None = None,
    plan: Path | None = None,
    dtype: str | None = None,
    mutate: Annotated[bool, Parameter(negative="")] = False,
    pad: Annotated[bool, Parameter(negative="")] = False,
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Compare a sharded model with the unsharded one, on --tp real ranks of this machine's CPU.

    In float64, on a small configuration with random weights, the relative error must be 1e-9 at most; where it is
    more, the first block and module that differ are named. Exit code 1 when anything is wrong.

    Parameters
    ----------
    target
        A folder with a pipeline or a model, a class of diffusers, or your own path/to/file.py:Class.
        Default: the bundled model.
    tp
        The degree: over how many ranks.
    config
        A JSON file with the arguments of the class' constructor.
    plan
        Verify this plan instead of the catalog's or a derived one.
    dtype
        Compare a folder's own weights in this dtype, block by block, instead of a small float64 model. An output
        that is off by more than 20 percent counts as wrong: rounding alone adds up to a few.
    mutate
        Also drop every collective in turn: each drop must be noticed, and their number be the plan's.
    pad
        Verify ranks of equal shapes, with zeros where units do not divide.
    json_
        Print JSON.
    """
    from ..bundled import model_folder
    from ..run.launch import Interrupted, launch_ranks
    from ..run.planning import read_plan
    from ..run.subject import dtype_of, find
    from ..verify.trials import cases, plan_for_case

    if tp < 2:
        raise UsageError(f"--tp {tp}: comparing takes at least 2 ranks")
    named = target or str(model_folder())
    subjects, _ = find(named, config)
    given = read_plan(plan) if plan is not None else None
    if dtype is not None:
        dtype_of(dtype)
        if any(subject.folder is None for subject in subjects):
            raise UsageError("--dtype compares a folder's weights; a class has none", hint="leave --dtype out")
    plans: list[list[dict[str, Any]]] = []
    mutations = []
    for subject in subjects:
        own = []
        for case in cases(subject, tp) if dtype is None else cases(subject, tp)[:1]:
            made = plan_for_case(subject, case, given)
            own.append(made.to_document())
            if given is not None and dtype is None and (trouble := _trouble(case, made, tp, pad)):
                raise PlanError(f"{made.source} does not run on {case.name}, over {tp} ranks: {trouble}")
            if mutate:
                mutations.append((case.name, _mutated(case, made, tp, pad)))
        plans.append(own)
    job = {"target": named, "config": str(config) if config else None, "dtype": dtype, "pad": pad, "plans": plans}
    try:
        report = launch_ranks(tp, "vitrail.verify.job", json.dumps(job))
    except Interrupted as interrupted:
        sys.exit(interrupted.exit_code)
    report |= {"tp": tp, "mutations": [{"case": name, **_document(found)} for name, found in mutations]}
    ok = _ok(report, dtype)
    if json_:
        print(json.dumps({**report, "ok": ok}, indent=2))
    else:
        _show(report, dtype)
    if not ok:
        sys.exit(1)


def _trouble(case: Any, plan: Any, degree: int, pad: bool) -> str:
    """What stops the ranks from running a plan that came from a file; found on simulated ranks."""
    from ..apply.prove import compare, randomised

    return compare(plan, randomised(case.trial.model), case.trial.arguments[:1], degree, pad).trouble


def _mutated(case: Any, plan: Any, degree: int, pad: bool) -> Any:
    from ..apply.prove import randomised
    from ..plan import resolve
    from ..verify.mutate import mutate

    model = randomised(case.trial.model)
    return mutate(resolve(plan, model, degree, pad), model, case.trial.arguments[0])


def _document(mutation: Any) -> dict[str, Any]:
    return {**vars(mutation), "unnoticed": list(mutation.unnoticed), "idle": list(mutation.idle), "ok": mutation.ok}


def _ok(report: dict[str, Any], dtype: str | None) -> bool:
    # `not <=` and not `>`: NaN never passes.
    limits = [result["error"] <= (1e-9 if dtype is None else 0.2) for result in report["results"]]
    return all(limits) and all(mutation["ok"] for mutation in report["mutations"])


def _show(report: dict[str, Any], dtype: str | None) -> None:
    for result in report["results"]:
        good = result["error"] <= (1e-9 if dtype is None else 0.2)
        said = "right" if good else "WRONG"
        print(f"{said}: {result['case']}: relative error {result['error']:.1e} over {report['tp']} ranks")
        if result.get("first") and not good:
            first = result["first"]
            print(f"  the first to differ is {first['module']!r} in block {first['block']!r}, by {first['error']:.1e}")
        for block in result.get("blocks", ()):
            print(f"  {block['block']}: {block['error']:.1e}")
    for mutation in report["mutations"]:
        good = mutation["ok"]
        print(
            f"{'right' if good else 'WRONG'}: {mutation['case']}: {mutation['dropped']} collectives dropped in turn, "
            f"{mutation['planned']} planned, {len(mutation['unnoticed'])} drops unnoticed"
        )
        for name in mutation["unnoticed"]:
            print(f"  not noticed: {name}")
