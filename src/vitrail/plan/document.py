"""A plan, as the JSON document that people read, review and pass on. docs/reference/plan.md describes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from ..errors import PlanError

FORMAT = 1

Style: TypeAlias = Literal["colwise", "rowwise", "gathered"]


@dataclass(frozen=True)
class Axis:
    """Something a model has a number of, which is shared out over the ranks: attention heads, feed-forward columns.

    ``size`` counts the indivisible units and ``width`` the elements of one: integers, or keys of the model's
    configuration. Without a size the axis is read off the weights' shapes, in units of one element.
    """

    size: int | str | None = None
    width: int | str | None = None
    what: str = ""


@dataclass(frozen=True)
class Rule:
    """How the linear modules that match ``module`` are sharded (``*`` stands for one component of a name).

    ``colwise`` shards the output features and leaves the output sharded; ``rowwise`` takes a sharded input and adds
    up the ranks' partial sums (its bias is added after the reduce: replicated); ``gathered`` shards the output
    features and gathers the output whole. ``parts`` name, in order, what the sharded dimension consists of: axes, or
    proportions as integers. ``optional`` rules may match nothing.
    """

    module: str
    style: Style
    parts: tuple[str | int, ...] = ()
    optional: bool = False
    why: str = ""


@dataclass(frozen=True)
class Plan:
    """Which modules of one model class are sharded, along which axes.

    ``attributes`` name integers that count an axis' units or elements and become the rank's own count. ``whole``
    gives reasons for what stays replicated.
    """

    model: str
    axes: Mapping[str, Axis]
    rules: tuple[Rule, ...]
    attributes: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    source: str = "caller"

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
        _known(document, {"vitrail_plan", "model", "axes", "modules", "attributes", "whole"}, where)
        if not isinstance(document.get("model"), str) or not document["model"]:
            raise PlanError(f"{where} does not name the model's class: the key 'model' is missing")
        axes = {}
        for name, entry in _mapping(document, "axes", where).items():
            _known(entry, {"size", "width", "what"}, f"{where}: axis {name!r}")
            axes[name] = Axis(**entry)
        rules = []
        for module, entry in _mapping(document, "modules", where).items():
            _known(entry, {"style", "parts", "optional", "why"}, f"{where}: module {module!r}")
            if "style" not in entry:
                raise PlanError(f"{where}: module {module!r} has no style")
            rules.append(Rule(module, **{**entry, "parts": tuple(entry.get("parts", ()))}))
        plan = cls(
            model=document["model"],
            axes=axes,
            rules=tuple(rules),
            attributes=dict(_mapping(document, "attributes", where)),
            whole=dict(_mapping(document, "whole", where)),
            source=source,
        )
        plan.check()
        return plan

    def to_document(self) -> dict[str, Any]:
        def entry(item: Axis | Rule) -> dict[str, Any]:
            values = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(item).items()}
            return {
                key: value for key, value in values.items() if key != "module" and value not in (None, "", [], False)
            }

        return {
            "vitrail_plan": FORMAT,
            "model": self.model,
            "axes": {name: entry(axis) for name, axis in self.axes.items()},
            "modules": {rule.module: entry(rule) for rule in self.rules},
            "attributes": dict(self.attributes),
            "whole": dict(self.whole),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_document(), indent=2, ensure_ascii=False) + "\n"

    def check(self) -> None:
        """Raise `PlanError` unless the document makes sense by itself, whatever the model."""
        where = f"the plan ({self.source})"
        for rule in self.rules:
            if rule.style not in get_args(Style):
                raise PlanError(f"{where}: module {rule.module!r} has style {rule.style!r}; known: {get_args(Style)}")
            if (rule.style == "gathered") == bool(rule.parts):
                needs = "no parts" if rule.style == "gathered" else "the parts its sharded dimension consists of"
                raise PlanError(f"{where}: module {rule.module!r} is {rule.style}, which takes {needs}")
            for part in rule.parts:
                if isinstance(part, bool) or not isinstance(part, (int, str)) or (isinstance(part, int) and part < 1):
                    raise PlanError(f"{where}: module {rule.module!r} has part {part!r}; parts are axes or proportions")
                if isinstance(part, str) and part not in self.axes:
                    raise PlanError(
                        f"{where}: module {rule.module!r} names axis {part!r}, which the plan does not declare"
                    )
            if len({type(part) for part in rule.parts}) > 1:
                raise PlanError(f"{where}: module {rule.module!r} mixes axes and proportions: {list(rule.parts)}")
        for name, axis in self.attributes.items():
            if axis not in self.axes:
                raise PlanError(f"{where}: attribute {name!r} names axis {axis!r}, which the plan does not declare")
            if "." not in name:
                raise PlanError(f"{where}: attribute {name!r} must be a module's name, a dot and the attribute")


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
