"""Artifacts: a graph's program, from memory, from disk, or compiled and kept."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from neuron_sim import opcache
from neuron_sim.compile import program
from neuron_sim.compile.graphdata import GraphData, digest
from neuron_sim.compile.program import Runner
from neuron_sim.neffcache import Entry, EntryError, key_of


@dataclass
class Totals:
    """What the compiler did in this process. A graph is found in memory, found on disk, or compiled."""

    aot_autograd: int = 0
    compiled: int = 0
    disk_hits: int = 0
    memory_hits: int = 0


@dataclass(frozen=True)
class Artifact:
    """A graph's program, ready to run: its key in the cache, where it was found, and how long that took."""

    key: str
    run: Runner
    found: str
    seconds: float


totals = Totals()
_lock = threading.Lock()
_loaded: dict[tuple[str, tuple[str, ...], int], Runner] = {}


def artifact(graph: GraphData, core: int) -> Artifact:
    """The program of a graph for a core of this process. Raises `EntryError` for a graph that PyTorch cannot run."""
    began = time.perf_counter()
    payload = graph.payload()
    purpose = purpose_of(graph, payload)
    place = (key_of(purpose), tuple(graph.groups), core)
    with _lock:
        runner = _loaded.get(place)
        if runner is not None:
            totals.memory_hits += 1
            return Artifact(place[0], runner, "memory", time.perf_counter() - began)
        runner, found = _find_or_compile(purpose, payload, graph.groups, core)
        _loaded[place] = runner
        return Artifact(place[0], runner, found, time.perf_counter() - began)


def load(key: str, groups: Sequence[str], core: int, inputs: Sequence[dict[str, Any]]) -> Artifact | None:
    """The artifact of a key, from memory or disk; None where it is not there, or not for these inputs."""
    began = time.perf_counter()
    keeper = opcache.current().keeper
    place = (key, tuple(groups), core)
    with _lock:
        if runner := _loaded.get(place):
            totals.memory_hits += 1
            return Artifact(key, runner, "memory", time.perf_counter() - began)
        try:
            entry = keeper.find(key)
            if entry is None:
                return None
            _loaded[place] = _runner_of(entry, groups, core, inputs)
        except EntryError as error:
            keeper.spoilt(key, str(error))
            return None
        except OSError:
            return None
        totals.disk_hits += 1
        return Artifact(key, _loaded[place], "disk", time.perf_counter() - began)


def _runner_of(entry: Entry, groups: Sequence[str], core: int, inputs: Sequence[dict[str, Any]]) -> Runner:
    if entry.purpose.get("kind") != "graph" or entry.purpose.get("graph") != digest(entry.payload):
        raise EntryError("its graph is not the one that its first line names")
    data, _ = program.read_payload(entry.payload)
    if data.get("inputs") != list(inputs):
        raise EntryError("its graph has other inputs")
    return program.build(entry.payload, groups, core)


def _find_or_compile(purpose: dict[str, Any], payload: bytes, groups: Sequence[str], core: int) -> tuple[Runner, str]:
    # Built from what was just traced, before it is kept: what cannot run must not reach the cache.
    runner = program.build(payload, groups, core)

    def check(entry: Entry) -> None:
        if entry.payload != payload:
            raise EntryError("its graph is not the one that its first line names")

    _, found = opcache.current().keeper.find_or_make(purpose, lambda: payload, check)
    if found:
        totals.disk_hits += 1
    else:
        totals.compiled += 1
    return runner, "disk" if found else "compiled"


def purpose_of(graph: GraphData, payload: bytes) -> dict[str, Any]:
    """What an artifact is for: the graph, PyTorch's version, and the target. Equal in every process and rank."""
    data = graph.data
    return {
        "kind": "graph",
        "codegen": "aten",
        "graph": digest(payload),
        "call": f"graph of {len(data['operations'])} operators and {len(data['inputs'])} inputs",
        "torch": torch.__version__,
        "target": opcache.current().target,
    }


def forget_loaded() -> None:
    """Forget what is in memory, as a new process would, and count from zero. For tests and tools."""
    global totals
    with _lock:
        _loaded.clear()
        for name in vars(totals):
            setattr(totals, name, 0)
