"""The plans that ship with vitrail: one JSON file per diffusers class, with a plan for each structure it comes in.

``probes/`` has the small configurations and inputs they were derived from. A plan serves a model with the same key:
the same structure, and the same sources of everything in it (`vitrail.plan.structure`).
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from ..document import Plan
from ..probe import Probe, read_probes

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Entry:
    """The plan for models whose key is ``key``, derived from the probe of that name."""

    probe: str
    key: str
    plan: Plan


def _names(folder: str) -> list[str]:
    found = files(__name__).joinpath(folder) if folder else files(__name__)
    return sorted(entry.name.removesuffix(".json") for entry in found.iterdir() if entry.name.endswith(".json"))


@functools.cache
def names() -> tuple[str, ...]:
    """The diffusers classes with a plan, sorted."""
    return tuple(_names(""))


@functools.cache
def probe_names() -> tuple[str, ...]:
    """The diffusers classes with probes, sorted."""
    return tuple(_names("probes"))


@functools.cache
def entries(name: str) -> tuple[Entry, ...]:
    """The plans of the diffusers class called ``name``; none for a class that is not in the catalog."""
    if name not in names():
        return ()
    text = files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8")
    return tuple(
        Entry(item["probe"], item["key"], Plan.from_document(item["plan"], source="catalog"))
        for item in json.loads(text)["plans"]
    )


@functools.cache
def probes(name: str) -> tuple[Probe, ...]:
    """The probes of the diffusers class called ``name``."""
    if name not in probe_names():
        return ()
    path = files(__name__).joinpath("probes").joinpath(f"{name}.json")
    return read_probes(path.read_text(encoding="utf-8"), f"{name}.json")


def is_known(model_class: type) -> bool:
    """Whether this is exactly a class of diffusers or transformers, not one of the same name or derived from one."""
    return model_class.__module__.split(".")[0] in ("diffusers", "transformers")


def lookup(model: nn.Module) -> Plan | None:
    """The plan for exactly this class and structure, or None. A subclass may compute something else: it has none."""
    from ..structure import key_of

    if not is_known(type(model)) or not entries(type(model).__name__):
        return None
    key = key_of(model)
    return next((entry.plan for entry in entries(type(model).__name__) if entry.key == key), None)


def write(name: str, items: list[Entry]) -> str:
    """The text of a catalog file."""
    blocks = []
    for entry in items:
        plan = "\n".join("    " + line for line in entry.plan.to_json().rstrip().splitlines()).lstrip()
        head = f'    "probe": {json.dumps(entry.probe)},\n    "key": {json.dumps(entry.key)},\n'
        blocks.append(f'  {{\n{head}    "plan": {plan}\n  }}')
    return f'{{"vitrail_catalog": 1, "model": {json.dumps(name)}, "plans": [\n' + ",\n".join(blocks) + "\n]}\n"
