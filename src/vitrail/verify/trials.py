"""What a subject is verified on: small models of its structures."""

from __future__ import annotations

from dataclasses import dataclass

from ..apply.blocks import most_numel, numel
from ..apply.trial import Trial, trial_of, trials_for
from ..errors import UnsupportedError
from ..plan import Plan, valid_degrees
from ..plan.catalog import is_known, probes
from ..plan.configuration import configuration
from ..run.planning import plan_of
from ..run.subject import Subject


@dataclass(frozen=True)
class Case:
    """A small model of one structure, by name."""

    name: str
    trial: Trial


def cases(subject: Subject, degree: int) -> list[Case]:
    """The structures to try: all that the catalog knows of a class, the model's own for a folder or a file.

    Where the small model has too few units for ``degree``, one of its own sizes serves, if it is not too large.
    """
    own = probes(subject.name) if is_known(type(subject.model)) else ()
    if own and subject.folder is None:
        return [Case(f"{subject.name}, {probe.name}", trial_of(probe)) for probe in own]
    trial = trials_for(subject.model, subject.inputs)
    if not trial.arguments:
        raise UnsupportedError(
            f"{subject.name} is too large to be compared in float64 on this machine, even with two blocks of each list",
            hint="verify a smaller configuration of the same structure: --config FILE",
        )
    probe = next((probe for probe in own if probe.name == trial.probe), None)
    if probe is not None and numel(subject.model) <= most_numel():
        plan = plan_of(trial.model, subject.inputs)
        if degree not in valid_degrees(plan, trial.model) and degree in valid_degrees(plan, subject.model):
            trial = trial_of(probe, configuration(subject.model))
    return [Case(subject.name, trial)]


def plan_for_case(subject: Subject, case: Case, given: Plan | None) -> Plan:
    if given is not None:
        return given
    return plan_of(case.trial.model, subject.inputs)
