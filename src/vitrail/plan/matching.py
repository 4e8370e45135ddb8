"""What a plan's patterns match in a model: the first half of working a plan out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import PlanError
from .document import CHUNKED, Cut, Held, Plan, Rule, Style
from .norms import Norm
from .sizes import Match, attribute_holders, matches, split_attribute
from .skeleton import tied_parameters
from .tables import is_table

LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class CutTensor:
    """A tensor that is cut along ``dim``, and the parts of that dimension."""

    name: str
    shape: tuple[int, ...]
    dim: int
    parts: tuple[str | int, ...]
    key: str


class Matching:
    """What a plan's patterns match in a model, checked: ``styles`` by module, ``tensors`` to cut, those ``chunked``.

    Raises `PlanError` for what the model does not have, or has otherwise than the plan takes it to be.
    """

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self.plan, self.model = plan, model
        self.where = f"the plan for {plan.model} ({plan.source})"
        if plan.model not in {cls.__name__ for cls in type(model).__mro__}:
            raise PlanError(f"{self.where} is not for {type(model).__name__}")
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self.owned = _tensors_of(model)
        self.tied = tied_parameters(model)
        self.total = sum(parameter.numel() for parameter in model.parameters())
        self.skipped: dict[str, str] = {}
        self.norms: dict[str, Norm] = {}
        self.styles: dict[str, Style] = {}
        self.together: dict[str, str] = {}
        self.reduced: list[str] = []
        self.chunked: list[tuple[str, tuple[int, ...], int]] = []
        self.tensors: list[CutTensor] = []
        for match, module, rule in self._matches():
            self._module(match, module, rule)
        for pattern, cut in plan.tensors.items():
            self._tensor(pattern, cut)
        self.held: dict[str, int] = {}
        for pattern, held in plan.held.items():
            self._hold(pattern, held)
        self._check_ties()
        if not self.tensors and not self.chunked:
            raise PlanError(f"{self.where} shards nothing of {type(model).__name__}")
        self.counted = list(self._counted())

    # -- what the plan's patterns match

    def _matches(self) -> Iterator[tuple[Match, nn.Module, Rule]]:
        for rule in self.plan.rules:
            found = matches(rule.module, list(self.modules))
            if not found and not rule.optional:
                raise PlanError(
                    f"{self.where} names module {rule.module!r}, which {type(self.model).__name__} does not have",
                    hint="check that the plan is for this class and configuration, or mark the rule optional",
                )
            for match in found:
                module = self.modules[match.name]
                self._check_type(match.name, module, rule)
                yield match, module, rule

    def _check_type(self, name: str, module: nn.Module, rule: Rule) -> None:
        if rule.style == "norm":
            return
        # A subclass may do more in its forward than multiply, and what that does to a shard is not known.
        known = type(module) in LINEAR and rule.style != "vocab"
        if isinstance(module, nn.Embedding):
            known = rule.style in CHUNKED and ("forward" in vars(module) or is_table(module))
        if not known:
            raise PlanError(
                f"{self.where} shards {name!r}, which is a {type(module).__name__}; it can only shard Linear, "
                "convolutions and, gathered, embeddings",
                hint="unload adapters and quantisation before sharding" if isinstance(module, nn.Linear) else None,
            )
        # Layerwise casting and diffusers' hooks put a function of their own there.
        if "forward" in vars(module):
            raise PlanError(
                f"{self.where} shards {name!r}, whose forward was replaced: it would bypass the collective",
                hint="shard first, and add casting, hooks or caches afterwards",
            )

    def _module(self, match: Match, module: nn.Module, rule: Rule) -> None:
        name = match.name
        if name in self.styles:
            raise PlanError(f"{self.where}: two rules match module {name!r}")
        if rule.style == "norm":
            self._norm(match, module, rule)
            return
        weight = getattr(module, "weight", None)
        assert isinstance(weight, nn.Parameter)
        bias = getattr(module, "bias", None)
        shape = tuple(weight.shape)
        if rule.style in CHUNKED:
            if self._small(name, weight, rule.above):
                return
            self.styles[name] = rule.style
            if rule.together and type(module) is nn.Linear:
                self.together[name] = rule.together
            dim = 1 if isinstance(module, nn.Embedding) and rule.style == "gathered" else 0
            self.chunked.append((f"{name}.weight", shape, dim))
            if isinstance(bias, nn.Parameter):
                self.chunked.append((f"{name}.bias", tuple(bias.shape), 0))
            return
        self._untied(f"{name}.weight")
        self.styles[name] = rule.style
        dim = 1 if rule.style == "rowwise" else 0
        self.tensors.append(CutTensor(f"{name}.weight", shape, dim, rule.parts, match.key))
        if isinstance(bias, nn.Parameter) and rule.style != "rowwise":
            self.tensors.append(CutTensor(f"{name}.bias", tuple(bias.shape), 0, rule.parts, match.key))

    def _small(self, name: str, tensor: torch.Tensor, above: float | None) -> bool:
        if above is None or tensor.numel() > above * self.total:
            return False
        self.skipped[name] = f"its {tensor.numel():,} elements are not worth a collective"
        return True

    def _hold(self, pattern: str, held: Held) -> None:
        found = matches(pattern, list(self.owned))
        if not found:
            raise PlanError(f"{self.where} holds tensor {pattern!r}, which {type(self.model).__name__} does not have")
        for match in found:
            tensor = self.owned[match.name]
            if held.dim >= tensor.dim():
                raise PlanError(
                    f"{self.where} cuts dim {held.dim} of {match.name!r}: its shape is {list(tensor.shape)}"
                )
            self._untied(match.name)
            if not self._small(match.name, tensor, held.above):
                self.held[match.name] = held.dim
                self.chunked.append((match.name, tuple(tensor.shape), held.dim))

    def _norm(self, match: Match, module: nn.Module, rule: Rule) -> None:
        vectors = {name: parameter for name, parameter in module.named_parameters() if parameter is not None}
        for name, parameter in vectors.items():
            self.tensors.append(CutTensor(f"{match.name}.{name}", tuple(parameter.shape), 0, rule.parts, match.key))
        self.styles[match.name] = "norm"

    def _tensor(self, pattern: str, cut: Cut) -> None:
        dim = cut.dim
        found = matches(pattern, list(self.owned))
        if not found:
            raise PlanError(f"{self.where} names tensor {pattern!r}, which {type(self.model).__name__} does not have")
        for match in found:
            shape = tuple(self.owned[match.name].shape)
            if dim >= len(shape):
                raise PlanError(f"{self.where} cuts dim {dim} of {match.name!r}, whose shape is {list(shape)}")
            self._untied(match.name)
            self.tensors.append(CutTensor(match.name, shape, dim, cut.parts, match.key))
            if cut.reduce:
                if "." not in match.name:
                    raise PlanError(f"{self.where} adds up products of {match.name!r}, which the model itself holds")
                self.reduced.append(match.name)

    def _untied(self, name: str) -> None:
        if name in self.tied:
            raise PlanError(f"{self.where}: {name} is tied to {self.tied[name]}, so it cannot be cut alone")

    def _check_ties(self) -> None:
        """A tensor under several names is cut under all of them, and alike."""
        dims = {name: dim for name, _, dim in self.chunked}
        for name, other in self.tied.items():
            if name in dims and dims[name] != dims.get(other):
                raise PlanError(
                    f"{self.where}: {name} is tied to {other}, so it cannot be cut alone",
                    hint="an embedding that is also a linear's weight takes the style vocab, the linear gathered",
                )

    def _counted(self) -> Iterator[tuple[Match, str, str, int]]:
        """Every attribute to rescale: the module, the attribute, its formula and value."""
        for pattern, text in self.plan.attributes.items():
            module_pattern, attribute = split_attribute(
                pattern, self.modules, lambda name: matches(name, list(self.modules))
            )
            found = False
            for match in matches(module_pattern, list(self.modules)):
                for holder, name, index in attribute_holders(self.modules[match.name], attribute):
                    found = True
                    value: Any = getattr(holder, name)
                    value = value[index] if index is not None else value
                    if isinstance(value, bool) or not isinstance(value, int):
                        raise PlanError(f"{self.where}: {match.name}.{attribute} is {value!r}, not an integer")
                    yield match, attribute, text, value
            optional = any(rule.optional for rule in self.plan.rules if rule.module.startswith(module_pattern + "."))
            if not found and not optional:
                raise PlanError(
                    f"{self.where} names attribute {pattern!r}, which {type(self.model).__name__} does not have"
                )


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor the model's modules hold: parameters, buffers and plain attributes."""
    found: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                found[f"{path}.{name}" if path else name] = value
    return found
