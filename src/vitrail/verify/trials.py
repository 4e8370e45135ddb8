"""What a subject is verified on: small models of its structures."""

from __future__ import annotations

from dataclasses import dataclass

from ..apply.planning import Trial, trial_of, trials_for
from ..plan import Plan
from ..plan.catalog import is_known, probes
from ..run.planning import plan_of
from ..run.subject import Subject


@dataclass(frozen=True)
class Case:
    """A small model of one structure, by name."""

    name: str
    trial: Trial


def cases(subject: Subject, every: bool | None = None) -> list[Case]:
    """The structures to try: all that the catalog knows of a class, the model's own for a folder or a file."""
    own = probes(subject.name) if is_known(type(subject.model)) else ()
    if own and (subject.folder is None if every is None else every):
        return [Case(f"{subject.name}, {probe.name}", trial_of(probe)) for probe in own]
    return [Case(subject.name, trials_for(subject.model, subject.inputs))]


def plan_for_case(subject: Subject, case: Case, given: Plan | None) -> Plan:
    if given is not None:
        return given
    return plan_of(case.trial.model, subject.inputs)
