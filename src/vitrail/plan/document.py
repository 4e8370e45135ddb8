"""A plan, as the JSON document that people read, review and pass on. docs/reference/plan.md describes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from ..errors import PlanError
from ..layout import Formula

FORMAT = 1
# A weight below this part of the model is not worth a collective of its own.
WORTH = 0.001
_KEYS = {
    "vitrail_plan", "model", "axes", "dims", "modules", "tensors", "held", "inputs", "attributes", "whole", "untraced",
    "verified",
}  # fmt: skip

Style: TypeAlias = Literal["colwise", "rowwise", "gathered", "norm", "depthwise", "vocab"]
# Cut in chunks of one length: nothing is said of what the dimension consists of.
CHUNKED: tuple[Style, ...] = ("gathered", "vocab")


@dataclass(frozen=True)
class Axis:
    """Something a model has a number of, which is shared out over the ranks: attention heads, feed-forward columns.

    ``size`` counts the indivisible units and ``width`` the elements of one: integers, or keys of the model's
    configuration. Without a size the axis is read off the weights' shapes, in units of one element. An axis ``within``
    another counts the parts of one of its units, and is cut where the other has fewer units than there are ranks.
    """

    size: int | str | None = None
    width: int | str | None = None
    what: str = ""
    within: str = ""


@dataclass(frozen=True)
class Rule:
    """How the linear modules that match ``module`` are sharded (``*`` stands for one component of a name).

    Linear, convolution and embedding modules are meant, and norms by the style ``norm``.

    ``colwise`` shards the output features and leaves the output sharded; ``rowwise`` takes a sharded input and adds
    up the ranks' partial sums (its bias is added after the reduce: replicated); ``gathered`` shards the output
    features and gathers the output whole; ``norm`` normalises over a sharded dimension, adding up the ranks' sums;
    ``depthwise`` is a convolution of each channel by itself; ``vocab`` shards the rows of an embedding, looks up those
    it has and adds up over the ranks, for a table that is also a linear's weight. ``parts`` name, in order, what the
    sharded dimension consists of: formulas over axes (``heads*64``), or proportions as integers. ``optional`` rules may
    match nothing. Modules that hold no more than the part ``above`` of the model's parameters are left whole: a
    collective of their own would not be worth it. Gathered modules that name the same ``together`` are given the same
    input in a step, and are gathered at once.
    """

    module: str
    style: Style
    parts: tuple[str | int, ...] = ()
    optional: bool = False
    above: float | None = None
    together: str = ""
    why: str = ""


@dataclass(frozen=True)
class Cut:
    """One dimension of a tensor that is cut, and the ``parts`` it consists of.

    A parameter with ``reduce`` is contracted over that dimension in its module's forward: every product it is in is
    added up over the ranks.
    """

    dim: int
    parts: tuple[str | int, ...]
    reduce: bool = False


@dataclass(frozen=True)
class Held:
    """A parameter of which every rank keeps a part along ``dim``, and which is gathered whenever it is used.

    For what no other style fits. Parameters no larger than the part ``above`` of the model are left whole.
    """

    dim: int
    above: float | None = None


@dataclass(frozen=True)
class Plan:
    """Which modules of one model class are sharded, along which axes.

    ``dims`` are sizes in formulas that are not sharded: integers, keys of the configuration, attributes of modules
    (with a dot), or None for what follows from the weights. ``tensors`` are parameters and buffers cut by themselves,
    ``held`` ones gathered at use; ``inputs`` are arguments of modules' forwards that are cut as they enter.
    ``attributes`` name integers that count something sharded and become the rank's own count, by a formula. ``whole``
    gives reasons for what stays replicated; ``untraced`` modules must not run, because nothing is known of what they
    do. ``verified`` says how the plan was compared with the whole model.
    """

    model: str
    axes: Mapping[str, Axis]
    rules: tuple[Rule, ...]
    attributes: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    source: str = "caller"
    dims: Mapping[str, int | str | None] = field(default_factory=dict)
    tensors: Mapping[str, Cut] = field(default_factory=dict)
    held: Mapping[str, Held] = field(default_factory=dict)
    inputs: Mapping[str, Mapping[str, tuple[Cut, ...]]] = field(default_factory=dict)
    untraced: tuple[str, ...] = ()
    verified: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str, *, source: str = "caller") -> Plan:
        """Read a plan. Raises `PlanError` that names the offending key, value or axis."""
        try:
            document = json.loads(text, object_pairs_hook=lambda pairs: _once(pairs, f"the plan ({source})"))
        except (json.JSONDecodeError, TypeError) as error:
            raise PlanError(f"the plan ({source}) is not JSON: {error}") from None
        return cls.from_document(document, source=source)

    @classmethod
    def from_document(cls, document: Any, *, source: str = "caller") -> Plan:
        where = f"the plan ({source})"
        if not isinstance(document, dict) or "vitrail_plan" not in document:
            raise PlanError(f"{where} is not a vitrail plan: the key 'vitrail_plan' is missing")
        if document["vitrail_plan"] != FORMAT:
            raise PlanError(f"{where} has format {document['vitrail_plan']!r}; this vitrail reads format {FORMAT}")
        _known(document, _KEYS, where)
        if not isinstance(document.get("model"), str) or not document["model"]:
            raise PlanError(f"{where} does not name the model's class: the key 'model' is missing")
        axes = {}
        for name, entry in _mapping(document, "axes", where).items():
            _known(entry, {"size", "width", "within", "what"}, f"{where}: axis {name!r}")
            axes[name] = Axis(**entry)
        rules = []
        for module, entry in _mapping(document, "modules", where).items():
            _known(entry, {"style", "parts", "optional", "above", "together", "why"}, f"{where}: module {module!r}")
            if "style" not in entry:
                raise PlanError(f"{where}: module {module!r} has no style")
            rules.append(Rule(module, **{**entry, "parts": _part_list(entry, f"{where}: module {module!r}")}))
        tensors = {
            name: _cut(entry, f"{where}: tensor {name!r}")
            for name, entry in _mapping(document, "tensors", where).items()
        }
        held = {}
        for name, entry in _mapping(document, "held", where).items():
            _known(entry, {"dim", "above"}, f"{where}: held parameter {name!r}")
            held[name] = Held(_dim(entry, f"{where}: held parameter {name!r}"), entry.get("above"))
        inputs: dict[str, dict[str, tuple[Cut, ...]]] = {}
        for module, entries in _mapping(document, "inputs", where).items():
            here = f"{where}: the inputs of {module!r}"
            if not isinstance(entries, dict):
                raise PlanError(f"{here} must be an object, not {type(entries).__name__}")
            inputs[module] = {
                path: tuple(_cut(item, here) for item in (cuts if isinstance(cuts, list) else [cuts]))
                for path, cuts in entries.items()
            }
        untraced = document.get("untraced", [])
        if not isinstance(untraced, list) or not all(isinstance(name, str) for name in untraced):
            raise PlanError(f"{where}: 'untraced' must be a list of modules' names")
        plan = cls(
            model=document["model"],
            axes=axes,
            rules=tuple(rules),
            attributes=dict(_mapping(document, "attributes", where)),
            whole=dict(_mapping(document, "whole", where)),
            source=source,
            dims=dict(_mapping(document, "dims", where)),
            tensors=tensors,
            held=held,
            inputs=inputs,
            untraced=tuple(untraced),
            verified=dict(_mapping(document, "verified", where)),
        )
        plan.check()
        return plan

    def to_document(self) -> dict[str, Any]:
        def entry(item: Axis | Rule | Held) -> dict[str, Any]:
            values = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(item).items()}
            return {
                key: value
                for key, value in values.items()
                if key != "module" and (value not in (None, "", [], False) or key == "dim")
            }

        document: dict[str, Any] = {
            "vitrail_plan": FORMAT,
            "model": self.model,
            "verified": dict(self.verified),
            "axes": {name: entry(axis) for name, axis in self.axes.items()},
            "dims": dict(self.dims),
            "modules": {rule.module: entry(rule) for rule in self.rules},
            "tensors": {name: _cut_document(cut) for name, cut in self.tensors.items()},
            "held": {name: entry(held) for name, held in self.held.items()},
            "inputs": {
                module: {path: [_cut_document(cut) for cut in cuts] for path, cuts in entries.items()}
                for module, entries in self.inputs.items()
            },
            "attributes": dict(self.attributes),
            "whole": dict(self.whole),
            "untraced": list(self.untraced),
        }
        kept = ("vitrail_plan", "model", "axes", "modules", "attributes", "whole")
        return {key: value for key, value in document.items() if value or key in kept}

    def to_json(self) -> str:
        return _lines(self.to_document()) + "\n"

    def check(self) -> None:
        """Raise `PlanError` unless the document makes sense by itself, whatever the model."""
        where = f"the plan ({self.source})"
        self._check_pairs(where)
        for rule in self.rules:
            if rule.style not in get_args(Style):
                raise PlanError(f"{where}: module {rule.module!r} has style {rule.style!r}; known: {get_args(Style)}")
            here = f"{where}: module {rule.module!r}"
            if (rule.style in CHUNKED) == bool(rule.parts):
                needs = "no parts" if rule.style in CHUNKED else "the parts its sharded dimension consists of"
                raise PlanError(f"{here} is {rule.style}, which takes {needs}")
            self._check_parts(rule.parts, here)
        for name, cut in self.tensors.items():
            self._check_parts(cut.parts, f"{where}: tensor {name!r}")
        for module, entries in self.inputs.items():
            for path, cuts in entries.items():
                for cut in cuts:
                    self._check_parts(cut.parts, f"{where}: input {path!r} of {module!r}")
        for name, text in self.attributes.items():
            if not name or name.startswith(".") or name.endswith("."):
                raise PlanError(f"{where}: attribute {name!r} must be a module's name, a dot and the attribute")
            self._check_parts((text,), f"{where}: attribute {name!r}")

    def _check_pairs(self, where: str) -> None:
        outer: dict[str, str] = {}
        for name, axis in self.axes.items():
            if not axis.within:
                continue
            here = f"{where}: axis {name!r} is within {axis.within!r}"
            if axis.within not in self.axes:
                raise PlanError(f"{here}, which the plan does not declare")
            if self.axes[axis.within].within:
                raise PlanError(f"{here}, which is within another itself; one level is possible")
            if axis.within in outer:
                raise PlanError(f"{here}, as {outer[axis.within]!r} is; one axis can be within another")
            outer[axis.within] = name

    def _check_parts(self, parts: tuple[str | int, ...], here: str) -> None:
        kinds = {type(part) for part in parts}
        for part in parts:
            if isinstance(part, bool) or not isinstance(part, (int, str)) or (isinstance(part, int) and part < 1):
                raise PlanError(f"{here} has part {part!r}; parts are formulas over axes, or proportions")
            if isinstance(part, str):
                try:
                    names = list(Formula.parse(part).names())
                except ValueError as error:
                    raise PlanError(f"{here}: {error}") from None
                for name in names:
                    if name not in self.axes and name not in self.dims:
                        raise PlanError(f"{here} names axis {name!r}, which the plan does not declare")
        if len(kinds) > 1:
            raise PlanError(f"{here} mixes axes and proportions: {list(parts)}")
        if kinds == {str} and not any(name in self.axes for part in parts for name in Formula.parse(part).names()):
            raise PlanError(f"{here} names no axis, so nothing of it is sharded")


def _part_list(entry: dict[str, Any], where: str) -> tuple[str | int, ...]:
    parts = entry.get("parts", [])
    if not isinstance(parts, list):
        raise PlanError(f"{where}: 'parts' must be a list, not {type(parts).__name__}")
    return tuple(parts)


def _cut(entry: Any, where: str) -> Cut:
    _known(entry, {"dim", "parts", "reduce"}, where)
    if not entry.get("parts"):
        raise PlanError(f"{where} needs the 'parts' that the dimension consists of")
    return Cut(_dim(entry, where), _part_list(entry, where), entry.get("reduce") is True)


def _dim(entry: dict[str, Any], where: str) -> int:
    dim = entry.get("dim")
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 0:
        raise PlanError(f"{where} needs the dimension that is cut ('dim', from 0), not {dim!r}")
    return dim


def _cut_document(cut: Cut) -> dict[str, Any]:
    return {"dim": cut.dim, "parts": list(cut.parts), **({"reduce": True} if cut.reduce else {})}


def _lines(document: Mapping[str, Any]) -> str:
    """JSON with one entry a line, so that a plan is read and compared line by line."""

    def compact(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    sections = []
    for key, value in document.items():
        if isinstance(value, dict) and value and key != "verified":
            body = ",\n".join(f"    {compact(name)}: {compact(item)}" for name, item in value.items())
            sections.append(f"  {compact(key)}: {{\n{body}\n  }}")
        else:
            sections.append(f"  {compact(key)}: {compact(value)}")
    return "{\n" + ",\n".join(sections) + "\n}"


def _once(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise PlanError(f"{where} has the key {twice[0]!r} twice in one object")
    return dict(pairs)


def _mapping(document: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = document.get(key, {})
    if not isinstance(value, dict):
        raise PlanError(f"{where}: {key!r} must be an object, not {type(value).__name__}")
    return value


def _known(entry: Any, known: set[str], where: str) -> None:
    if not isinstance(entry, dict):
        raise PlanError(f"{where} must be an object, not {type(entry).__name__}")
    if unknown := sorted(set(entry) - known):
        raise PlanError(f"{where} has unknown keys {unknown}; known: {sorted(known)}")
