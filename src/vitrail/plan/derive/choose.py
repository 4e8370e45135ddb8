"""Choosing what to shard: axes that weights produce and other weights contract, weighed by what they save and move.

Nothing here looks at names of classes. An axis is a candidate unless it was blocked; a contraction over sharded axes
needs a module that adds up the ranks' sums, a statistic over one a norm that does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from ..norms import Norm, recognise
from ..skeleton import tied_groups
from ..tables import is_table
from .axes import Axis, factors, find, leaves, terms
from .numbers import is_builtin
from .record import Contraction, Crossing, Recorder

CONTRACTING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Group:
    """Leaves that are sharded together or not at all. ``saved`` and ``moved`` count elements."""

    leaves: tuple[Axis, ...]
    sources: tuple[str, ...]
    rowwise: tuple[str, ...]
    saved: int
    moved: int


@dataclass
class Choice:
    groups: list[Group] = field(default_factory=list)
    rowwise: dict[str, int] = field(default_factory=dict)
    gathered: dict[str, int] = field(default_factory=dict)
    vocab: set[str] = field(default_factory=set)
    bare: set[str] = field(default_factory=set)
    norms: dict[str, Norm] = field(default_factory=dict)
    together: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    cuts: list[Crossing] = field(default_factory=list)
    dims: dict[str, int] = field(default_factory=dict)
    within: dict[Axis, Axis] = field(default_factory=dict)
    reasons: dict[Axis, str] = field(default_factory=dict)
    refused: dict[Axis, str] = field(default_factory=dict)

    @property
    def sharded(self) -> set[Axis]:
        return {leaf for group in self.groups for leaf in group.leaves} | set(self.within)


def touches(axis: Axis, chosen: Collection[Axis]) -> bool:
    return any(leaf in chosen for leaf in leaves(axis))


def is_exact(module: nn.Module | None) -> bool:
    """A module whose forward is known: not a subclass, which may do more, and not with a replaced forward."""
    return type(module) in CONTRACTING and "forward" not in vars(module)


class _Sets:
    """Disjoint sets of leaves."""

    def __init__(self) -> None:
        self.parent: dict[Axis, Axis] = {}

    def root(self, leaf: Axis) -> Axis:
        while self.parent.setdefault(leaf, leaf) is not leaf:
            leaf = self.parent[leaf]
        return leaf

    def join(self, members: Iterable[Axis]) -> None:
        first, *rest = (self.root(member) for member in members)
        for other in rest:
            self.parent[other] = first


def choose(recorder: Recorder, degree: int, excluded: dict[Axis, str] | None = None) -> Choice:
    """What to shard over ``degree`` ranks, leaving out ``excluded`` leaves, which have reasons."""
    usage = _usage(recorder)
    reasons = {find(leaf): why for leaf, why in (excluded or {}).items()}
    reasons |= {leaf: why for leaf, why in _forbidden(recorder).items() if leaf not in reasons}
    for leaf in usage:
        if leaf.blocked:
            reasons.setdefault(leaf, leaf.blocked)
        elif leaf.size < degree:
            reasons.setdefault(leaf, f"{leaf.size} units are fewer than {degree} ranks")
    candidates = {leaf for leaf in usage if leaf not in reasons and leaf.size > 1}
    weight = {leaf: sum(recorder.sources[name].tensor.numel() for name in usage[leaf]) for leaf in candidates}
    sets = _constrain(recorder, candidates, weight, reasons)
    choice = Choice(reasons=reasons, refused={find(leaf): why for leaf, why in (excluded or {}).items()})
    groups = sorted(_groups(recorder, candidates, sets, usage), key=lambda group: -group.saved / (group.moved + 1))
    for group in groups:
        if why := _conflict(recorder, choice, group, usage):
            for leaf in group.leaves:
                reasons.setdefault(leaf, why)
            continue
        choice.groups.append(group)
        for leaf in group.leaves:
            choice.dims.update(usage[leaf])
    choice.within = _within(recorder, choice, usage)
    chosen = choice.sharded
    for contraction in recorder.contractions:
        if touches(contraction.axis, chosen) and not _by_module(recorder, contraction):
            assert contraction.weight is not None
            choice.bare.add(contraction.weight)
        elif touches(contraction.axis, chosen):
            choice.rowwise[contraction.module] = choice.rowwise.get(contraction.module, 0) + contraction.numel
    for reduction in recorder.reductions:
        if any(touches(axis, chosen) for axis in reduction.axes):
            norm = _norm(recorder, reduction.module)
            assert norm is not None
            choice.norms[reduction.module] = norm
    choice.cuts = [
        crossing
        for crossing in recorder.crossings
        if any(
            touches(inner, chosen) and not touches(outer, chosen)
            for outer, inner in zip(crossing.outer, crossing.inner, strict=True)
        )
    ]
    _gather(recorder, choice)
    return choice


def _usage(recorder: Recorder) -> dict[Axis, dict[str, int]]:
    """For each leaf, the tensors that have it and the dimension it is in."""
    usage: dict[Axis, dict[str, int]] = defaultdict(dict)
    for source in recorder.sources.values():
        for dim, axis in enumerate(source.axes):
            for leaf in leaves(axis):
                usage[leaf][source.name] = dim
    return {
        leaf: uses for leaf, uses in usage.items() if any(recorder.sources[name].kind == "parameter" for name in uses)
    }


def _norm(recorder: Recorder, path: str) -> Norm | None:
    axes = recorder.norm_inputs.get(path)
    return recognise(recorder.modules[path], find(axes[-1]).size) if axes else None


def _forbidden(recorder: Recorder) -> dict[Axis, str]:
    """Leaves that no run-time part could serve, with the reason."""
    reasons: dict[Axis, str] = {}
    norms: dict[str, Norm | None] = {}

    def forbid(axes: Iterable[Axis], why: str) -> None:
        for axis in axes:
            for leaf in leaves(axis):
                reasons.setdefault(leaf, why)

    mixed = _used_otherwise(recorder)
    for contraction in recorder.contractions:
        where = contraction.module or "the model's forward"
        if contraction.weight is None:
            forbid([contraction.axis], f"two activations are contracted over it in {where}")
        elif not _by_module(recorder, contraction) and (why := mixed.get(contraction.weight)):
            forbid([contraction.axis], f"{contraction.weight} is contracted over it in {where}, and {why}")
    for reduction in recorder.reductions:
        if reduction.module not in norms:
            norms[reduction.module] = _norm(recorder, reduction.module)
        if norms[reduction.module] is None:
            forbid(reduction.axes, f"{reduction.kind} runs over it in {reduction.module or 'the forward'}")
    for source in recorder.sources.values():
        seen: set[Axis] = set()
        for axis in source.axes:
            own = set(leaves(axis))
            forbid(own & seen, f"it is two dimensions of {source.name}")
            seen |= own
    return reasons


def _by_module(recorder: Recorder, contraction: Contraction) -> bool:
    """Whether a module whose forward is known does the contraction; else a forward does it with a bare parameter."""
    return is_exact(recorder.modules.get(contraction.module)) and contraction.weight == f"{contraction.module}.weight"


def _used_otherwise(recorder: Recorder) -> dict[str, str]:
    """Weights whose sums cannot be added up where a forward uses them, with the reason.

    A bare parameter adds up every product it is in: it must be contracted over the same axis each time.
    """
    axes: dict[str, set[frozenset[Axis]]] = defaultdict(set)
    reasons: dict[str, str] = {}
    for contraction in recorder.contractions:
        if contraction.weight is None:
            continue
        axes[contraction.weight].add(frozenset(leaves(contraction.axis)))
        source = recorder.sources[contraction.weight]
        if source.kind != "parameter":
            reasons[contraction.weight] = f"it is a {source.kind}"
        owner = contraction.weight.rpartition(".")[0]
        if not owner or is_builtin(recorder.modules[owner]):
            reasons[contraction.weight] = "it belongs to a module that may use it by itself"
    reasons |= {name: "it is also contracted over another" for name, found in axes.items() if len(found) > 1}
    return reasons


def _constrain(recorder: Recorder, candidates: set[Axis], weight: dict[Axis, int], reasons: dict[Axis, str]) -> _Sets:
    """Every term of a contracted dimension is sharded, or none: a whole term would be added up once a rank."""
    while True:
        sets, changed = _Sets(), False
        for contraction in recorder.contractions:
            options = [
                [leaf for leaf in leaves(term) if leaf in candidates]
                for term in terms(contraction.axis)
                if find(term).size > 1
            ]
            if not any(options):
                continue
            if not all(options):
                for leaf in (leaf for option in options for leaf in option if leaf in candidates):
                    candidates.discard(leaf)
                    reasons.setdefault(leaf, f"{contraction.module} also contracts something whole beside it")
                    changed = True
                continue
            sets.join([max(option, key=lambda leaf: weight[leaf]) for option in options])
        if not changed:
            return sets


def _groups(
    recorder: Recorder, candidates: set[Axis], sets: _Sets, usage: dict[Axis, dict[str, int]]
) -> Iterator[Group]:
    members: dict[Axis, list[Axis]] = defaultdict(list)
    for leaf in usage:  # in the order of the model, so that equals are chosen the same every time
        if leaf in candidates and leaf in sets.parent:
            members[sets.root(leaf)].append(leaf)
    rows: dict[Axis, list[Contraction]] = defaultdict(list)
    made: dict[Axis, list[Contraction]] = defaultdict(list)
    for contraction in recorder.contractions:
        for leaf in set(leaves(contraction.axis)):
            rows[leaf].append(contraction)
        for leaf in {leaf for axis in contraction.out for leaf in leaves(axis)}:
            made[leaf].append(contraction)
    for group in members.values():
        own_rows = {id(row): row for leaf in group for row in rows[leaf]}
        own_made = {id(row): row for leaf in group for row in made[leaf] if row.weight is not None}
        if not own_rows:
            continue
        names = sorted({name for leaf in group for name in usage[leaf]})
        saved = sum(recorder.sources[name].tensor.numel() for name in names)
        moved = sum(row.numel for row in own_rows.values())
        gathered = sum(row.numel for row in own_made.values())
        # An all-reduce moves twice what a gather of the same tensor does. Where gathering every one of these modules
        # would move less, that is done instead: `_gather` takes what no group does.
        if 2 * moved > gathered + moved:
            continue
        yield Group(tuple(group), tuple(names), tuple({row.module for row in own_rows.values()}), saved, moved)


def _within(recorder: Recorder, choice: Choice, usage: dict[Axis, dict[str, int]]) -> dict[Axis, Axis]:
    """Query heads that share a key head: with fewer key heads than ranks, they can be cut where those cannot.

    They are leaves beside a chosen one in every weight they are in, where some weights have only the chosen one.
    """
    found: dict[Axis, Axis] = {}
    heads = {leaf for event in recorder.attention for leaf in leaves(event.heads)}
    for leaf in usage:
        if leaf not in heads or leaf in choice.reasons or leaf in choice.sharded or leaf.size < 2 or leaf.blocked:
            continue
        outer = _beside(recorder, choice, leaf, usage)
        if outer is not None and outer not in found.values() and not set(usage[outer]) <= set(usage[leaf]):
            found[leaf] = outer
    return found


def _beside(recorder: Recorder, choice: Choice, leaf: Axis, usage: dict[Axis, dict[str, int]]) -> Axis | None:
    """The one chosen leaf in every term that ``leaf`` is in."""
    beside: set[Axis] = set()
    chosen = choice.sharded
    for name, dim in usage[leaf].items():
        if choice.dims.get(name) != dim:
            return None
        for term in terms(recorder.sources[name].axes[dim]):
            if leaf in leaves(term):
                own = [other for other in leaves(term) if other in chosen]
                beside.update(own)
                if len(own) != 1:
                    return None
    return beside.pop() if len(beside) == 1 else None


def _conflict(recorder: Recorder, choice: Choice, group: Group, usage: dict[Axis, dict[str, int]]) -> str | None:
    """Why ``group`` cannot join what was chosen: a tensor is cut in one dimension, and there in one factor."""
    chosen = choice.sharded
    for leaf in group.leaves:
        for name, dim in usage[leaf].items():
            if name not in choice.dims:
                continue
            if choice.dims[name] != dim:
                return f"{name} is sharded along another dimension already"
            for term in terms(recorder.sources[name].axes[dim]):
                own = list(leaves(term))
                if leaf in own and any(other in chosen for other in own) and len(factors(term)) > 1:
                    return f"{name} is sharded along another factor already"
    return None


def _gather(recorder: Recorder, choice: Choice) -> None:
    """What is left of the contracting modules: cut by columns, and the output gathered."""
    for contraction in recorder.contractions:
        module = recorder.modules.get(contraction.module)
        if contraction.weight != f"{contraction.module}.weight" or contraction.weight in choice.dims:
            continue
        if contraction.weight in recorder.kept or recorder.users[contraction.weight] != {contraction.module}:
            continue
        if (
            is_exact(module)
            and getattr(module, "groups", 1) == 1
            and find(contraction.out[-1 if isinstance(module, nn.Linear) else 1]).size > 1
        ):
            choice.gathered[contraction.module] = choice.gathered.get(contraction.module, 0) + contraction.numel
    for path in recorder.ran:
        module = recorder.modules[path]
        free = f"{path}.weight" not in choice.dims and f"{path}.weight" not in recorder.kept
        free = free and recorder.users[f"{path}.weight"] <= {path}
        if _is_looked_up(recorder, path) and free:
            choice.gathered.setdefault(path, 0)
    _join(recorder, choice)
    _share_tables(recorder, choice)
    # Any other weight is kept in parts and gathered at use, which is right whatever is done with it.
    for name, source in recorder.sources.items():
        path = name.rpartition(".")[0]
        left = name not in choice.dims and path not in choice.gathered and name not in recorder.kept
        if source.kind == "parameter" and source.tensor.dim() > 1 and left:
            sizes = list(source.tensor.shape)
            choice.held[name] = sizes.index(max(sizes))


def _is_looked_up(recorder: Recorder, path: str) -> bool:
    """A table of embeddings whose forward looks up what it is given, and does nothing else with the weight."""
    module = recorder.modules[path]
    if not is_table(module) or getattr(module, "max_norm", None):
        return False
    if type(module) is nn.Embedding:
        return True
    given = [args[0] if args else next(iter(kwargs.values()), None) for args, kwargs in recorder.entered[path]]
    once = recorder.uses[recorder.source_name(f"{path}.weight"), path] == recorder.ran[path]
    return once and all(isinstance(value, torch.Tensor) for value in given)


def _share_tables(recorder: Recorder, choice: Choice) -> None:
    """Tables of embeddings that several modules hold: by columns among embeddings, by rows beside a linear."""
    for names in tied_groups(recorder.model):
        owners = [name.rpartition(".")[0] for name in names]
        modules = [recorder.modules[path] for path in owners]
        users = recorder.users[names[0]]
        plain = all(
            name == f"{path}.weight"
            and (_is_looked_up(recorder, path) or (type(module) is nn.Linear and "forward" not in vars(module)))
            for path, module, name in zip(owners, modules, names, strict=True)
        )
        if not plain or not users <= set(owners):
            continue
        rows = any(isinstance(module, nn.Linear) for module in modules)
        for path, module in zip(owners, modules, strict=True):
            if rows and isinstance(module, nn.Embedding):
                choice.vocab.add(path)
            else:
                choice.gathered.setdefault(path, 0)


def _join(recorder: Recorder, choice: Choice) -> None:
    """Gathered modules that are given the same value in every call of the model are gathered together."""
    inputs: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for contraction in recorder.contractions:
        if contraction.module in choice.gathered and type(recorder.modules[contraction.module]) is nn.Linear:
            inputs[contraction.module][contraction.call].append(contraction.value)
    families: dict[object, list[str]] = defaultdict(list)
    # A module that runs again in one call is gathered alone from the second time on.
    for module, calls in inputs.items():
        families[tuple((call, values[0]) for call, values in sorted(calls.items()))].append(module)
    for number, members in enumerate(members for members in families.values() if len(members) > 1):
        choice.together.update(dict.fromkeys(members, number))
