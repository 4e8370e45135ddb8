"""Small models of a structure, and calls to try them with: what a plan is derived from and proven on."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import VitrailError
from ..plan.catalog import is_known, probes
from ..plan.configuration import configuration, with_words
from ..plan.derive import Derivation
from ..plan.guess import guess_inputs
from ..plan.probe import Probe
from ..plan.skeleton import skeleton
from ..plan.structure import structure
from .blocks import most_numel, numel
from .classes import made, model_class
from .prove import Arguments, one_thread, randomised, whole
from .variants import arguments_of, converted, other_batches, varied
from .variants import longer as longer_ones
from .wide import dense_flex_attention

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trial:
    """A small model of some structure and ways to call it, at several sizes.

    ``calls`` are keyword arguments for a recording; ``arguments`` make float64 ones for comparing values
    (none for a model that is too large to be run whole). ``probe`` is
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


def trial_of(probe: Probe, config: Mapping[str, Any] | None = None) -> Trial:
    """A probe's model and calls, with another configuration if one is given."""
    cls = model_class(probe.model)
    model = skeleton(lambda: made(cls, probe.config if config is None else config)).eval()
    names = configuration(model) or dict(config or probe.config)
    alone, borrowed = None, dict[str, str]()
    if (other := probe.borrows) is not None:
        partner = skeleton(lambda: made(model_class(other.model), other.config)).eval()
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


def probe_trials(model: nn.Module) -> list[Trial]:
    """The class's own probe of the same structure, or one whose numbers serve with the model's flags and words."""
    wanted = structure(model)
    own = probes(type(model).__name__)
    for probe in own:
        trial = trial_of(probe)
        if structure(trial.subject) == wanted:
            return [trial]
    for probe in own:
        config = with_words(probe.config, wanted["config"])
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
    names = configuration(model)
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
    if inputs is None and is_known(type(model)) and (found := probe_trials(model)):
        return found[0]
    bare = on_meta(model)
    if inputs is None and is_known(type(model)) and (reached := _probe_calls(bare)):
        return Trial(bare, *reached)
    given = [guess_inputs(bare)] if inputs is None else list(inputs)
    small = bare if numel(bare) <= most_numel() else shortened(bare)
    calls = {str(index): converted(call, None) for index, call in enumerate(given)}
    others = [other for call in given for other in other_batches(call) if _runs(small, other)]
    # What is right at one length may be right by chance: a single token leaves attention nothing to do.
    others += [call for call in map(varied, given) if call is not None and _runs(small, call)]
    longer = [other for call in (*given, *others) for other in longer_ones(call) if _runs(small, other)]
    if numel(small) > most_numel():  # it is not run whole
        calls |= {f"varied {index}": converted(call, None) for index, call in enumerate([*others, *longer[:1]])}
        return Trial(small, calls, [])
    # What the model itself does not take (a table of positions that is too short) is no trial of a plan.
    real = randomised(small) if others or longer else small
    others = [call for call in others if _computes(real, call)]
    longer = [call for call in longer if _computes(real, call)]
    calls |= {f"longer {index}": converted(call, None) for index, call in enumerate(longer[:1])}
    return Trial(small, calls, [arguments_of(call) for call in [*given, *others, *longer[:4]]])


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


def _computes(model: nn.Module, call: Mapping[str, Any]) -> bool:
    """Whether the whole model, in float64, runs with a call nobody gave."""
    try:
        with one_thread(), dense_flex_attention():
            whole(model, arguments_of(call))
    except Exception as error:  # noqa: BLE001  whatever a stranger's forward raises
        log.debug("a varied call does not run: %s", error)
        return False
    return True


def _runs(model: nn.Module, call: Mapping[str, Any]) -> bool:
    try:
        Derivation.of(model, {"": converted(call, None)})
    except VitrailError:
        return False
    return True
