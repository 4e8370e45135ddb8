"""The way around AOTAutograd: what Dynamo traced before, here or elsewhere, leads straight to its artifact.

Only inference graphs that write to no input can take it: then the artifact's results are the graph's results, each a
new tensor, a view of an input, or an input itself.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from neuron_sim import env, opcache
from neuron_sim.compile import aoti, torch_private
from neuron_sim.compile.artifacts import Artifact, load
from neuron_sim.compile.graphdata import GraphData
from neuron_sim.compile.record import Count
from neuron_sim.compile.tracekey import TraceKey
from neuron_sim.neffcache import Entry, EntryError, key_of

FORMAT = "neuron-sim trace 1"
_remembered: dict[str, dict[str, Any]] = {}


@dataclass(frozen=True)
class Shortcut:
    """An artifact, for each result the input that it is, or None, and what the rulebook found (`notes`)."""

    artifact: Artifact
    same_as: tuple[int | None, ...]
    findings: list[Any]

    def callable(self, count: Count) -> Callable[..., Any]:
        """What takes the graph's inputs and returns its results, and counts."""
        run = self.artifact.run
        same = [(place, which) for place, which in enumerate(self.same_as) if which is not None]

        def call(*inputs: Any) -> list[Any]:
            count.runs += 1
            results = run(list(inputs))
            for place, which in same:
                results[place] = inputs[which]
            return results

        return call


def purpose_of(key: TraceKey) -> dict[str, Any]:
    """What the note of a trace is for: the trace, PyTorch's version and the target."""
    data = key.data
    codegen = env.NEURON_SIM_CODEGEN.read()
    return {
        "kind": "trace",
        "codegen": [codegen, aoti.target(key.groups)] if codegen == "aoti" else [codegen],
        "trace": key.name,
        "call": f"trace of {len(data['nodes'])} nodes and {len(data['inputs'])} inputs",
        "torch": torch.__version__,
        "target": opcache.current().target,
    }


def find(key: TraceKey, core: int) -> Shortcut | None:
    """The shortcut for a trace, from memory or disk. What is found and cannot be used is told, and as if not there."""
    keeper = opcache.current().keeper
    name = key_of(purpose_of(key))
    note = _remembered.get(name)
    if note is None:
        entry = _on_disk(name)
        if entry is None:
            return None
        try:
            note = _read(entry.payload, key)
        except EntryError as error:
            keeper.useless(name, error)
            return None
    groups = [key.groups[place] for place in note["groups"]]
    artifact = load(note["artifact"], groups, core, [_without_grad(described) for described in key.data["inputs"]])
    if artifact is None:
        return None
    _remembered[name] = note
    return Shortcut(artifact, tuple(note["same_as"]), note["findings"])


def _on_disk(name: str) -> Entry | None:
    try:
        return opcache.current().keeper.find(name)
    except OSError:
        return None  # who keeps the next artifact tells about it


def keep(key: TraceKey, graph: GraphData, artifact: Artifact, findings: list[Any] | None) -> None:
    """Note the artifact of a trace, if a process that finds it can do without AOTAutograd. Called while it compiles.

    `findings` are the rulebook's, None where they cannot be written down.
    """
    if findings is None or artifact.codegen != env.NEURON_SIM_CODEGEN.read():
        return
    same_as = torch_private.results_that_are_inputs()
    inputs = [_without_grad(described) for described in key.data["inputs"]]
    if same_as is None or graph.ignored or graph.data["inputs"] != inputs or len(same_as) != len(graph.data["outputs"]):
        return
    note = {
        "format": FORMAT,
        "artifact": artifact.key,
        "groups": [key.groups.index(name) for name in graph.groups],
        "same_as": same_as,
        "findings": findings,
    }
    purpose = purpose_of(key)
    opcache.current().keeper.find_or_make(purpose, lambda: json.dumps(note, sort_keys=True).encode())
    _remembered[key_of(purpose)] = note


def _without_grad(described: dict[str, Any]) -> dict[str, Any]:
    return {name: described[name] for name in ("dtype", "shape", "stride", "device")}


def _read(payload: bytes, key: TraceKey) -> dict[str, Any]:
    try:
        note = json.loads(payload)
        if note["format"] != FORMAT:
            raise EntryError(f"its note is of the format {note['format']!r}, not {FORMAT!r}")
        is_right = (
            isinstance(note["artifact"], str)
            and isinstance(note["findings"], list)
            and all(type(place) is int and 0 <= place < len(key.groups) for place in note["groups"])
            and all(
                place is None or (type(place) is int and 0 <= place < len(key.data["inputs"]))
                for place in note["same_as"]
            )
        )
    except EntryError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise EntryError(f"its note cannot be read: {error}") from error
    if not is_right:
        raise EntryError("its note names what is not there")
    return dict(note)


def forget() -> None:
    """Forget what is in memory. For tests and tools."""
    _remembered.clear()
