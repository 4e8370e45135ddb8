"""Which components of a pipeline are sharded: what was asked for, or all that can be."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..apply.classes import model_class
from ..apply.load import Request
from ..errors import UnsupportedError, UsageError, VitrailError
from ..plan import catalog, valid_degrees
from .folder import denoisers, encoders

log = logging.getLogger(__name__)

PARTS = ("transformer", "text_encoder")


def check_parts(parts: Sequence[str] | None) -> None:
    """Raise `UsageError` for a part that cannot be asked for."""
    known = (*PARTS, "none")
    if parts is not None and (unknown := [part for part in parts if part not in known]):
        raise UsageError(f"unknown parts to shard: {', '.join(unknown)}", hint=f"known: {', '.join(known)}")
    if parts and "none" in parts and len(parts) > 1:
        raise UsageError("to shard 'none' and something else is a contradiction")


def to_shard(
    index: dict[str, Any],
    folder: Path,
    degree: int,
    parts: Sequence[str] | None,
    hub: Mapping[str, Any],
) -> dict[str, str]:
    """The components to shard over ``degree`` ranks, by name, with their class.

    ``parts`` are any of `PARTS`, or "none"; None is all. An encoder that is not asked for by name stays whole where
    it has no plan, or none for the degree; the log says so.
    """
    check_parts(parts)
    found: dict[str, str] = {}
    if parts is None or "transformer" in parts:
        found |= denoisers(index, folder)
    if parts is None or "text_encoder" in parts:
        candidates = encoders(index)
        if parts is not None and not candidates:
            raise UnsupportedError(f"{index['_class_name']} ({folder}) has no text encoder to shard")
        for name, kind in candidates.items():
            why = reason_against(folder, name, kind, degree, hub)
            if why is None:
                found[name] = kind
            elif parts is not None:
                raise UnsupportedError(f"{name} ({kind}) cannot be sharded over {degree} ranks: {why}")
            else:
                log.info("%s (%s) stays whole on every rank: %s", name, kind, why)
    return found


def reason_against(folder: Path, name: str, kind: str, degree: int, hub: Mapping[str, Any]) -> str | None:
    """Why an encoder stays whole, or None when it is sharded. Reads its configuration, no weights."""
    if kind not in catalog.names():
        return "the catalog has no plan for its class"
    try:
        model = Request.of(model_class(kind), str(folder), {"subfolder": name, **hub}).skeleton()
        plan = catalog.lookup(model)
        if plan is None:
            return "the catalog has no plan for its configuration"
        degrees = valid_degrees(plan, model)
    except VitrailError as error:
        return error.message
    return None if degree in degrees else f"its plan works at {', '.join(map(str, degrees))}"
