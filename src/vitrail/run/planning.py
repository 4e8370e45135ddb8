"""Plans for whatever the command line names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..apply.planning import derive_plan, plan_for
from ..bundled import model_folder
from ..errors import UsageError
from ..plan import Plan, ResolvedPlan, resolve, valid_degrees
from ..plan.report import Summary, summarise
from .payload import Payload, payload
from .subject import Component, Subject, dtype_of, find


@dataclass(frozen=True)
class Planned:
    subject: Subject
    resolved: ResolvedPlan
    summary: Summary
    payload: Payload | None = None


def planned(
    target: str | None,
    degree: int,
    *,
    config: Path | None = None,
    plan_file: Path | None = None,
    dtype: str | None = None,
    fresh: bool = False,
    count_payload: bool = False,
    pad: bool = False,
) -> tuple[list[Planned], list[Component]]:
    """The plan of every model of ``target`` that is sharded, worked out over ``degree`` ranks."""
    if degree < 1:
        raise UsageError(f"--tp {degree}: the degree must be at least 1")
    kind = dtype_of(dtype)
    subjects, others = find(target or str(model_folder()), config)
    given = read_plan(plan_file) if plan_file is not None else None
    found = []
    for subject in subjects:
        plan = given or plan_of(subject.model, subject.inputs, fresh)
        resolved = resolve(plan, subject.model, degree, pad)
        degrees = valid_degrees(plan, subject.model)
        carried = payload(subject.model, resolved) if count_payload else None
        found.append(Planned(subject, resolved, summarise(resolved, subject.model, degrees, kind), carried))
    return found, others


def plan_of(model: nn.Module, inputs: Sequence[Mapping[str, Any]] | None, fresh: bool = False) -> Plan:
    if inputs is not None:
        return derive_plan(model, list(inputs))
    return derive_plan(model, keep=False) if fresh else plan_for(model)


def read_plan(file: Path) -> Plan:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the plan {file} cannot be read: {error}") from None
    return Plan.from_json(text, source=file.name)
