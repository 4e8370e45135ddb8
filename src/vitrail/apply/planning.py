"""Where a model's plan comes from: the caller, the catalog, the cache of earlier derivations, or a derivation now."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import env
from ..errors import PlanError, UnsupportedError, UsageError
from ..plan import Plan, from_diffusers, resolve
from ..plan.catalog import is_known, lookup
from ..plan.compose import compose, held_models
from ..plan.derive import RULES_VERSION, Derivation
from ..plan.derive.portable import portable
from ..plan.derive.trace import first_line
from ..plan.sizes import expand
from ..plan.structure import instance_key
from .blocks import most_numel, numel, prove_by_blocks
from .prove import Comparison, prove, quiet, randomised
from .trial import Trial, on_meta, probe_trials, trials_for

log = logging.getLogger(__name__)

PlanLike = Plan | Mapping[str, Any] | None
DEGREES = (2, 3, 4)


def plan_for(model: nn.Module, given: PlanLike = None) -> Plan:
    """The caller's plan, else the catalog's, else an earlier derivation's, else one derived now."""
    return known_plan(model, given) or cached(model) or derive_plan(model)


def known_plan(model: nn.Module, given: PlanLike = None) -> Plan | None:
    """The caller's plan or the catalog's: what every rank finds by itself. Raises for a U-Net, which has none."""
    if isinstance(given, Plan):
        return given
    if given is not None:
        if not isinstance(given, Mapping):
            raise UsageError(
                f"a plan is a vitrail.Plan or a dict in diffusers' form, not {type(given).__name__}",
                hint="vitrail.Plan.from_json(text) reads one",
            )
        return from_diffusers(given, model)
    if (plan := lookup(model)) is not None:
        return plan
    inner = {name: lookup(child) for name, child in held_models(model).items()}
    if inner and all(inner.values()):
        return compose(model, {name: plan for name, plan in inner.items() if plan is not None}, "catalog")
    refuse_unet(model)
    return None


def refuse_unet(model: nn.Module) -> None:
    """Raise `UnsupportedError` for a U-Net, or a ControlNet made of one's blocks."""
    name = type(model).__name__
    blocks = any(type(module).__module__.startswith("diffusers.models.unets") for module in model.modules())
    if blocks or (is_known(type(model)) and "UNet" in name):
        what = "is a U-Net" if "UNet" in name else "is made of a U-Net's blocks"
        raise UnsupportedError(
            f"{name} {what}: its convolutions and skips leave little to shard, and there is no plan for it",
            hint="run it unsharded (--tp 1)",
        )


# -- the cache


def _cache_file(key: str) -> Path:
    return Path(env.CACHE.read() or "~/.cache/vitrail").expanduser() / "plans" / f"{key}.json"


def cached(model: nn.Module) -> Plan | None:
    """An earlier derivation for a model of the same configuration, sources and rules."""
    file = _cache_file(instance_key(model))
    try:
        plan = Plan.from_json(file.read_text(encoding="utf-8"), source="derived")
        resolve(plan, model, 1)
    except OSError:
        return None
    except PlanError as error:
        log.warning("%s is not used: %s", file, error.message)
        return None
    return plan


def _store(plan: Plan, model: nn.Module) -> None:
    file = _cache_file(instance_key(model))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False, encoding="utf-8") as out:
            out.write(plan.to_json())
        os.replace(out.name, file)
    except OSError as error:  # a full or read-only disk costs a derivation the next time, nothing else
        log.warning("the derived plan could not be kept in %s: %s", file.parent, error)


# -- deriving


def derive_plan(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    *,
    unproven: bool = False,
    keep: bool = True,
) -> Plan:
    """A plan for ``model``, derived from a recorded forward and proven by its values at degrees 2, 3 and 4.

    ``inputs`` are the keyword arguments of one call, or of several that reach all its branches; without them the
    class's probes serve, or they are guessed. The weights' values do not matter: meta tensors will do. A model too
    large to be compared is cut to two blocks of each list first; where that is not possible, `PlanError` is raised
    unless ``unproven`` is given.

    Raises `UnsupportedError` when the forward cannot be traced, and says at which operation.
    """
    _check_model(model)
    calls = None if inputs is None else _checked(inputs)
    with quiet():
        plan = _derive(model, calls, unproven)
    if keep and inputs is None and plan.verified:
        _store(plan, model)
    return plan


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise UsageError(f"a model is needed, not {what}", hint="derive_plan(MyTransformer(...))")
    name = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedError(
            f"{name} is a TorchScript module, whose forward cannot be seen; pass the nn.Module itself"
        )
    for parameter_name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UsageError(
                f"the parameter {parameter_name} of {name} has no shape yet",
                hint="run the model once before planning it",
            )
    try:
        on_meta(model)
    except Exception as error:
        raise UnsupportedError(
            f"{name} cannot be copied, and a copy is needed to try a plan on: {first_line(error)}",
            hint="keep what cannot be copied (files, locks, connections) out of the model, or pass a plan (plan=...)",
        ) from error


def _checked(inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    calls = [inputs] if isinstance(inputs, Mapping) else list(inputs) if isinstance(inputs, (list, tuple)) else []
    if not calls or not all(isinstance(call, Mapping) for call in calls):
        raise UsageError(
            f"inputs are a {type(inputs).__name__}"
            + (f" of {type(calls[0]).__name__}" if calls else "")
            + "; the keyword arguments of one call (a dict) are needed, or a list of such",
            hint="derive_plan(model, {'x': tensor})",
        )
    for call in calls:
        for name, value in call.items():
            if isinstance(value, torch.Tensor) and not value.numel():
                raise UsageError(f"the input {name!r} is empty, {list(value.shape)}: it shows nothing of what is done")
    return calls


def _derive(model: nn.Module, inputs: list[Mapping[str, Any]] | None, unproven: bool) -> Plan:
    trials = probe_trials(model) if inputs is None and is_known(type(model)) else []
    if not trials:
        return _derive_from(model, inputs, unproven)
    plan, _ = prove_trial(trials[0])
    resolve(plan, model, 1)
    return plan


def prove_trial(trial: Trial, degrees: Sequence[int] = DEGREES) -> tuple[Plan, list[Comparison]]:
    """The proven, portable plan of a trial, with the comparisons that say so."""
    try:
        derivation = Derivation.of(trial.model, trial.calls, trial.borrowed)
    except UnsupportedError:
        # A forward that reads values of what comes from weights (routers do): with real ones, on the small model.
        real = randomised(trial.model)
        calls = {str(index): arguments() for index, arguments in enumerate(trial.arguments)}
        derivation = Derivation.of(real, calls, trial.borrowed)
    proposal, comparisons = prove(derivation, randomised(trial.model), trial.arguments, degrees)
    plan = _own(portable(proposal.plan, trial.model), trial)
    return replace(plan, verified=_record(comparisons, len(trial.arguments))), comparisons


def _record(comparisons: Sequence[Comparison], calls: int) -> dict[str, Any]:
    return {
        "degrees": [comparison.degree for comparison in comparisons],
        "error": float(f"{max(comparison.error for comparison in comparisons):.1e}"),
        "calls": calls,
        "rules": RULES_VERSION,
        "torch": torch.__version__.split("+")[0],
    }


def _own(plan: Plan, trial: Trial) -> Plan:
    """The plan without what it says of modules that the model only borrowed."""
    if trial.alone is None:
        return plan
    own = [*dict(trial.alone.named_modules()), *dict(trial.alone.named_parameters())]
    return replace(
        plan,
        whole={name: why for name, why in plan.whole.items() if expand(name, own)},
        untraced=tuple(name for name in plan.untraced if expand(name, own)),
    )


def _derive_from(model: nn.Module, inputs: list[Mapping[str, Any]] | None, unproven: bool) -> Plan:
    trial = trials_for(model, inputs)
    if not trial.arguments:
        plan = _derive_by_blocks(trial, unproven)
    else:
        plan, _ = prove_trial(trial)
    resolve(plan, model, 1)
    if numel(trial.model) < numel(model):
        _same_in_full(plan, model, trial)
    return plan


def _derive_by_blocks(trial: Trial, unproven: bool) -> Plan:
    """A plan for a model that is too large to be run whole in float64, however few its blocks."""
    derivation = Derivation.of(trial.model, trial.calls)
    if unproven:
        return portable(derivation.propose(2).plan, trial.model)
    proposal, comparisons, units = prove_by_blocks(derivation, trial.model, DEGREES, most_numel())
    plan = portable(proposal.plan, trial.model)
    return replace(plan, verified={**_record(comparisons, len(trial.calls)), "blocks": units})


def _same_in_full(plan: Plan, model: nn.Module, trial: Trial) -> None:
    """Raise `PlanError` where blocks that were left out of the comparison are not as those that were in it."""
    bare = on_meta(model)
    proposal = Derivation.of(bare, trial.calls).propose(2)
    full = portable(proposal.plan, bare).to_document()
    short = plan.to_document()
    for part in ("modules", "tensors", "held", "inputs", "attributes"):
        if full.get(part, {}) != short.get(part, {}):
            raise PlanError(
                f"the blocks of {type(model).__name__} are not all alike, and it is too large to compare a plan's "
                "values in full",
                hint="derive the plan with a smaller configuration of the same structure, and pass it (plan=...)",
            )
