"""Where a model's plan comes from: the caller, the catalog, the cache of earlier derivations, or a derivation now."""

from __future__ import annotations

import copy
import functools
import importlib
import logging
import os
import pkgutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import env
from ..errors import PlanError, UnsupportedError, UsageError, VitrailError
from ..plan import Plan, from_diffusers, resolve
from ..plan.catalog import is_known, lookup, probe_names, probes
from ..plan.compose import compose, held_models
from ..plan.derive import RULES_VERSION, Derivation
from ..plan.derive.portable import portable
from ..plan.guess import guess_inputs
from ..plan.probe import Probe
from ..plan.sizes import expand
from ..plan.skeleton import skeleton
from ..plan.structure import key_of, structure
from .prove import Arguments, Comparison, one_thread, prove, quiet, randomised, whole
from .wide import dense_flex_attention

log = logging.getLogger(__name__)

PlanLike = Plan | Mapping[str, Any] | None
DEGREES = (2, 3, 4)
# What a comparison in float64 may hold, in parameters: eight bytes each, and a copy for every rank.
MOST = 60_000_000


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
    """An earlier derivation for a model of the same structure, sources and rules."""
    file = _cache_file(key_of(model))
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
    file = _cache_file(key_of(model))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False, encoding="utf-8") as out:
            out.write(plan.to_json())
        os.replace(out.name, file)
    except OSError as error:  # a full or read-only disk costs a derivation the next time, nothing else
        log.warning("the derived plan could not be kept in %s: %s", file.parent, error)


# -- deriving


@dataclass(frozen=True)
class Trial:
    """A small model of some structure and ways to call it, at several sizes.

    ``calls`` are keyword arguments for a recording; ``arguments`` make float64 ones for comparing values. ``probe`` is
    the name of the catalog's probe they come from, if they do. ``alone`` is the model before it ``borrowed``
    parameters (by name, with a reason why they stay as they are) from another one.
    """

    model: nn.Module
    calls: Mapping[str, Mapping[str, Any]]
    arguments: Sequence[Arguments]
    probe: str | None = None
    borrowed: Mapping[str, str] = field(default_factory=dict)
    alone: nn.Module | None = None

    @property
    def subject(self) -> nn.Module:
        """The model that a plan is for."""
        return self.alone or self.model


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
    calls = None if inputs is None else _checked(inputs)
    with quiet():
        plan = _derive(model, calls, unproven)
    if keep and inputs is None and plan.verified:
        _store(plan, model)
    return plan


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
    trials = _probe_trials(model) if inputs is None and is_known(type(model)) else []
    if not trials:
        return _derive_from(model, inputs, unproven)
    plan, _ = prove_trial(trials[0])
    resolve(plan, model, 1)
    return plan


def trial_of(probe: Probe, config: Mapping[str, Any] | None = None) -> Trial:
    """A probe's model and calls, with another configuration if one is given."""
    cls = model_class(probe.model)
    model = skeleton(lambda: cls(**dict(probe.config if config is None else config))).eval()
    names = dict(getattr(model, "config", config or probe.config))
    alone, borrowed = None, dict[str, str]()
    if (other := probe.borrows) is not None:
        partner = skeleton(lambda: model_class(other.model)(**dict(other.config))).eval()
        alone = copy.deepcopy(model)
        own = {name for name, _ in model.named_parameters()}
        model = getattr(cls, other.by)(model, partner)
        borrowed = {
            name: f"it belongs to the {other.model} that is joined"
            for name, _ in model.named_parameters()
            if name not in own
        }

    def maker(variant: str, size: int) -> Arguments:
        return lambda: probe.make(variant, size, config=names, dtype=torch.float64)

    calls = {variant: probe.make(variant, 0, config=names) for variant in probe.inputs}
    arguments = [maker(variant, size) for variant in probe.inputs for size in range(len(probe.sizes))]
    return Trial(model, calls, arguments, probe.name, borrowed, alone)


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
    verified = {
        "degrees": [comparison.degree for comparison in comparisons],
        "error": float(f"{max(comparison.error for comparison in comparisons):.1e}"),
        "calls": len(trial.arguments),
        "rules": RULES_VERSION,
        "torch": torch.__version__.split("+")[0],
    }
    return replace(plan, verified=verified), comparisons


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


def _probe_trials(model: nn.Module) -> list[Trial]:
    """The class's own probe of the same structure, or one whose numbers serve with the model's flags and words."""
    wanted = structure(model)
    own = probes(type(model).__name__)
    for probe in own:
        trial = trial_of(probe)
        if structure(trial.subject) == wanted:
            return [trial]
    for probe in own:
        config = {**probe.config, **wanted["config"]}
        try:
            trial = trial_of(probe, config)
        except Exception as error:  # noqa: BLE001  numbers of one structure that another's __init__ refuses
            log.debug("the probe %s does not serve: %s", probe.name, error)
            continue
        if structure(trial.subject) == wanted:
            return [trial]
    return []


def _probe_calls(model: nn.Module) -> tuple[dict[str, Mapping[str, Any]], list[Arguments]] | None:
    """The calls of the class's probes that ``model``, of a structure none of them has, can run."""
    names = dict(getattr(model, "config", {}))
    calls: dict[str, Mapping[str, Any]] = {}
    arguments: list[Arguments] = []
    for probe in probes(type(model).__name__):
        for variant in probe.inputs:
            try:
                call = probe.make(variant, 0, config=names)
            except VitrailError:
                continue
            if _runs(model, call):
                calls[f"{probe.name}, {variant}"] = call
                arguments += [
                    functools.partial(probe.make, variant, size, config=names, dtype=torch.float64)
                    for size in range(len(probe.sizes))
                ]
    return (calls, arguments) if calls else None


def trials_for(model: nn.Module, inputs: Sequence[Mapping[str, Any]] | None = None) -> Trial:
    """A small model of the structure of ``model`` and calls to try it with: what a plan for it is proven on."""
    if inputs is None and is_known(type(model)) and (found := _probe_trials(model)):
        return found[0]
    bare = on_meta(model)
    if inputs is None and is_known(type(model)) and (reached := _probe_calls(bare)):
        return Trial(bare, *reached)
    given = [guess_inputs(bare)] if inputs is None else list(inputs)
    small = bare if sum(parameter.numel() for parameter in bare.parameters()) <= MOST else shortened(bare)
    calls = {str(index): _converted(call, None) for index, call in enumerate(given)}
    others = [call for call in map(_other_batch, given) if call is not None and _runs(small, call)]
    # What is right at one length may be right by chance: a single token leaves attention nothing to do.
    others += [call for call in map(_varied, given) if call is not None and _runs(small, call)]
    longer = [other for call in (*given, *others) for other in _longer(call) if _runs(small, other)]
    # What the model itself does not take (a table of positions that is too short) is no trial of a plan.
    real = randomised(small) if others or longer else small
    others = [call for call in others if _computes(real, call)]
    longer = [call for call in longer if _computes(real, call)]
    calls |= {f"longer {index}": _converted(call, None) for index, call in enumerate(longer[:1])}
    return Trial(small, calls, [_arguments(call) for call in [*given, *others, *longer[:4]]])


def _derive_from(model: nn.Module, inputs: list[Mapping[str, Any]] | None, unproven: bool) -> Plan:
    trial = trials_for(model, inputs)
    count = sum(parameter.numel() for parameter in trial.model.parameters())
    if count > MOST:
        if not unproven:
            raise PlanError(
                f"{type(model).__name__} is too large to compare a derived plan's values: {count:,} parameters in two "
                f"blocks of each list, {MOST:,} at most",
                hint="derive the plan with a smaller configuration of the same structure: the plan serves both",
            )
        bare = on_meta(model)
        return portable(Derivation.of(bare, trial.calls).propose(2).plan, bare)
    plan, _ = prove_trial(trial)
    resolve(plan, model, 1)
    if count < sum(parameter.numel() for parameter in model.parameters()):
        _same_in_full(plan, model, trial)
    return plan


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


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of ``model`` with its parameters on meta and everything else as it is."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, memo).eval()


def shortened(model: nn.Module, count: int = 2) -> nn.Module:
    """A copy with at most ``count`` elements of every list of blocks that are alike."""
    small = copy.deepcopy(model)
    for module in list(small.modules()):
        if isinstance(module, nn.ModuleList) and len(module) > count and len({type(item) for item in module}) == 1:
            del module[count:]
    return small


def _arguments(call: Mapping[str, Any]) -> Arguments:
    return lambda: _converted(call, torch.float64)


def _converted(value: Any, dtype: torch.dtype | None) -> Any:
    """Inputs on the CPU; floating-point ones in ``dtype`` if it is given. Meta tensors get random values."""
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            value = (
                torch.zeros(value.shape, dtype=value.dtype)
                if not value.is_floating_point()
                else torch.randn(value.shape, dtype=value.dtype, generator=torch.Generator().manual_seed(value.numel()))
            )
        value = value.detach().cpu()
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value.clone()
    if isinstance(value, Mapping):
        return {key: _converted(item, dtype) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_converted(item, dtype) for item in value)
    return value


def _other_batch(call: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The call at another batch size, where every tensor begins with the same one."""
    batches = {value.shape[0] if value.dim() else 0 for value in call.values() if isinstance(value, torch.Tensor)}
    if len(batches) != 1 or batches == {0}:
        return None
    batch = batches.pop()
    pick = slice(0, 1) if batch > 1 else None

    def other(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value[pick] if pick else torch.cat([value, value.flip(0) * 0.5 if value.is_floating_point() else value])

    return {name: other(value) for name, value in call.items()}


def _varied(call: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The call with random numbers where it has the same everywhere: zeros hide what is done with them."""
    generator = torch.Generator().manual_seed(3)

    def flat(value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and not value.is_meta
            and (value.numel() > 1 and bool((value == value.flatten()[0]).all()))
        )

    if not any(flat(value) for value in call.values()):
        return None
    return {
        name: torch.randn(value.shape, dtype=value.dtype, generator=generator) if flat(value) else value
        for name, value in call.items()
    }


def _longer(call: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The call with more tokens, and with larger images: where dims of one length stand, all of them grow."""
    tensors = [value for value in call.values() if isinstance(value, torch.Tensor)]
    lengths = {value.shape[1] for value in tensors if value.dim() == 3}
    variants = [
        {name: _stretched(value, 1, length) for name, value in call.items()} for length in sorted(lengths, reverse=True)
    ]
    if any(value.dim() >= 4 for value in tensors):
        variants.append({name: _stretched(value, -1, None) for name, value in call.items()})
    return list(variants)


def _stretched(value: Any, dim: int, length: int | None) -> Any:
    """``value`` grown along ``dim``, if it has ``length`` there (or is an image, without one)."""
    if not isinstance(value, torch.Tensor) or value.dim() < (2 if length is not None else 4):
        return value
    if length is not None and (value.shape[1] != length or value.dim() > 3):
        return value
    more = 2 * value.shape[dim] if length is None else value.shape[dim] // 2 + 2
    extra = torch.cat([value.flip(dim)] * (more // value.shape[dim] + 1), dim).narrow(dim, 0, more)
    return torch.cat([value, extra * 0.7 if value.is_floating_point() else extra], dim)


def _computes(model: nn.Module, call: Mapping[str, Any]) -> bool:
    """Whether the whole model, in float64, runs with a call nobody gave."""
    try:
        with one_thread(), dense_flex_attention():
            whole(model, _arguments(call))
    except Exception as error:  # noqa: BLE001  whatever a stranger's forward raises
        log.debug("a varied call does not run: %s", error)
        return False
    return True


def _runs(model: nn.Module, call: Mapping[str, Any]) -> bool:
    try:
        Derivation.of(model, {"": _converted(call, None)})
    except VitrailError:
        return False
    return True


def model_class(name: str) -> type[Any]:
    """The class of diffusers that is called ``name``. Raises `UsageError` with what is close."""
    import difflib

    import diffusers
    import diffusers.models

    if isinstance(found := getattr(diffusers, name, None), type):
        return found
    for info in pkgutil.walk_packages(diffusers.models.__path__, "diffusers.models."):
        if "transformer" not in info.name and "controlnet" not in info.name:
            continue
        try:
            module = importlib.import_module(info.name)
        except Exception as error:  # noqa: BLE001  a module whose optional dependency is missing
            log.debug("%s cannot be imported: %s", info.name, error)
            continue
        if isinstance(found := getattr(module, name, None), type):
            return found
    close = difflib.get_close_matches(name, probe_names(), 3)
    raise UsageError(
        f"diffusers {diffusers.__version__} has no class {name}",
        hint=f"did you mean {', '.join(close)}?" if close else "name a class, a model's folder or file.py:Class",
    )
