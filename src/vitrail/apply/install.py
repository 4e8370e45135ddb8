"""Putting a resolved plan into a model: slices in place of tensors, classes in place of classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedError
from ..layout import Ranges, Shard, insert_zeros, take
from ..plan import ResolvedPlan
from ..plan.resolved import InputCut
from ..plan.sizes import attribute_holders
from .bare import add_up
from .collectives import Group
from .family import Family
from .held import hold
from .modules import become


def slice_tensors(model: nn.Module, shards: Mapping[str, Shard], rank: int, skip: frozenset[str] = frozenset()) -> None:
    """Replace every sharded tensor of ``model``, still whole, by the rank's slice, but those in ``skip``."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # one tensor under several names stays one
    for name, shard in shards.items():
        if name in skip:
            continue
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        tensor = getattr(module, attribute)
        if id(tensor) not in made:
            local = take(tensor.detach(), shard, rank)
            made[id(tensor)] = tensor, nn.Parameter(local, requires_grad=False) if _is_parameter(tensor) else local
        setattr(module, attribute, made[id(tensor)][1])


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def install(model: nn.Module, resolved: ResolvedPlan, rank: int, group: Group) -> None:
    """Make ``model``, which holds the rank's slices, compute with them."""
    # Norms, convolutions and modules with parameters of their own take a class too, so that they are guarded.
    owners = {name.rpartition(".")[0]: None for name in resolved.shards}
    for name in dict.fromkeys([*resolved.styles, *owners]):
        if name == "":
            continue  # the model itself is guarded as a whole
        become(model.get_submodule(name), resolved.styles.get(name), resolved.degree, group, resolved.norms.get(name))
        if resolved.styles.get(name) == "vocab":
            vars(model.get_submodule(name))["first"] = _first(resolved.shards[f"{name}.weight"], rank)
    for name in resolved.reduced:
        owner, _, attribute = name.rpartition(".")
        add_up(model.get_submodule(owner), attribute, group)
    families: dict[str, Family] = {}
    for name, family in resolved.together.items():
        module = model.get_submodule(name)
        members = families.setdefault(family, Family(resolved.degree, group))
        members.join(module)
        vars(module)["family"] = members
    if families:
        model.register_forward_pre_hook(_NewStep(tuple(families.values())))
    for name, dim in resolved.held.items():
        owner, _, attribute = name.rpartition(".")
        hold(model.get_submodule(owner), attribute, dim, resolved.shards[name].shape[dim], resolved.degree, group)
    for (owner, attribute), values in resolved.attributes.items():
        for holder, name, index in attribute_holders(model.get_submodule(owner), attribute):
            if index is None:
                setattr(holder, name, values[rank])
            else:
                items = list(getattr(holder, name))
                items[index] = values[rank]
                setattr(holder, name, type(getattr(holder, name))(items))
    hooks: dict[tuple[InputCut, ...], _CutInputs] = {}
    for name, cuts in resolved.inputs.items():
        hook = hooks.setdefault(cuts, _CutInputs(cuts, rank))
        model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
    for name in resolved.untraced:
        model.get_submodule(name).register_forward_pre_hook(_Untraced(name))


def _first(shard: Shard, rank: int) -> int:
    """Where the rank's chunk of the dimension begins."""
    assert shard.dim is not None
    return -(-shard.shape[shard.dim] // shard.degree) * rank


class _NewStep:
    """What was gathered in the last step is not of this one."""

    def __init__(self, families: tuple[Family, ...]) -> None:
        self.families = families

    def __call__(self, *_: Any) -> None:
        if torch.compiler.is_compiling():  # where each module is gathered alone
            return
        for family in self.families:
            family.clear()


class _Untraced:
    """A module that no probe reached: what it does beside sharded ones is not known."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: Any) -> None:
        raise UnsupportedError(
            f"{self.name} ran, which the sharding plan knows nothing of: no probe reached it when the plan was derived",
            hint="derive a plan with inputs that use this branch, or call the model without it",
        )


class _CutInputs:
    """Takes the rank's part of arguments that are whole outside."""

    def __init__(self, cuts: tuple[InputCut, ...], rank: int) -> None:
        self.cuts = [
            (cut.path, cut.dim, _Part(cut.whole, cut.ranges[rank], cut.zeros[rank] if cut.zeros else ()))
            for cut in cuts
        ]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = _positional(type(module))
        for (first, *rest), dim, part in self.cuts:
            if first in kwargs:
                kwargs = {**kwargs, first: _replace(kwargs[first], rest, dim, part)}
                continue
            position = int(first) if first.isdecimal() else names.index(first) if first in names else len(args)
            if position < len(args):
                changed = _replace(args[position], rest, dim, part)
                args = (*args[:position], changed, *args[position + 1 :])
        return args, kwargs


_NAMES: dict[type, list[str]] = {}


def _positional(cls: type) -> list[str]:
    if cls not in _NAMES:
        code = cls.forward.__code__  # type: ignore[attr-defined]
        _NAMES[cls] = list(code.co_varnames[1 : code.co_argcount])
    return _NAMES[cls]


@dataclass(frozen=True)
class _Part:
    """What a rank takes of ``whole`` elements: ``ranges`` of them, with ``zeros`` between."""

    whole: int
    ranges: Ranges
    zeros: Ranges


def _replace(value: Any, path: list[str], dim: int, part: _Part) -> Any:
    if path:
        if value is None:
            return None
        if isinstance(value, Mapping):
            return {**value, path[0]: _replace(value[path[0]], path[1:], dim, part)}
        index = int(path[0])
        changed = _replace(value[index], path[1:], dim, part)
        return type(value)([*value[:index], changed, *value[index + 1 :]])
    if not isinstance(value, torch.Tensor) or value.shape[dim] == 1:
        return value  # absent, or one for all
    times, rest = divmod(value.shape[dim], part.whole)
    if rest:
        raise UnsupportedError(
            f"an input of {list(value.shape)} cannot be cut for this rank: its dim {dim} should be a multiple of "
            f"{part.whole}",
            hint="the sharding plan was made for other inputs: derive it with inputs like these",
        )
    if times > 1:
        value = value.reshape(*value.shape[:dim], times, part.whole, *value.shape[dim + 1 :])
    at = dim + (times > 1)
    pieces = [value.narrow(at, start, stop - start) for start, stop in part.ranges]
    own = pieces[0] if len(pieces) == 1 else torch.cat(pieces, at)
    if part.zeros:
        own = insert_zeros(own, at, part.zeros)
    return own.flatten(dim, at) if times > 1 else own
