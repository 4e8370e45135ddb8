"""The plans that ship with vitrail, one JSON file per diffusers class."""

from __future__ import annotations

from importlib.resources import files

from ..document import Plan


def names() -> list[str]:
    """The diffusers classes with a plan, sorted."""
    return sorted(
        entry.name.removesuffix(".json") for entry in files(__name__).iterdir() if entry.name.endswith(".json")
    )


def lookup(model_class: type) -> Plan | None:
    """The plan for exactly this class of diffusers, or None. A subclass may compute something else: it has none."""
    if model_class.__module__.split(".")[0] != "diffusers":
        return None
    return load(model_class.__name__)


def load(name: str) -> Plan | None:
    """The plan of the diffusers class called ``name``, or None."""
    if name not in names():
        return None
    text = files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8")
    return Plan.from_json(text, source="catalog")
