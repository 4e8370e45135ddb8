"""Artifacts: a graph's program, from memory, from disk, or compiled and kept; as data, or as a library (`aoti`)."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from neuron_sim import env, opcache
from neuron_sim.compile import aoti, program, trust
from neuron_sim.compile.graphdata import GraphData, UnsupportedGraphError, digest
from neuron_sim.compile.program import Runner
from neuron_sim.neffcache import Entry, EntryError, UntrustedError, key_of

Inputs = Sequence[dict[str, Any]]


@dataclass
class Totals:
    """What the compiler did in this process. A graph is found in memory, found on disk, or compiled."""

    aot_autograd: int = 0
    compiled: int = 0
    disk_hits: int = 0
    memory_hits: int = 0


@dataclass(frozen=True)
class Artifact:
    """A graph's program, ready to run: its key in the cache, its kind, where it was found, and how long that took."""

    key: str
    codegen: str
    run: Runner
    found: str
    seconds: float


totals = Totals()
_lock = threading.RLock()
_loaded: dict[tuple[str, tuple[str, ...], int], Runner] = {}


def artifact(graph: GraphData, core: int) -> Artifact:
    """The program of a graph for a core of this process. Raises `EntryError` for a graph that PyTorch cannot run."""
    payload = graph.payload()
    with _lock:
        if env.NEURON_SIM_CODEGEN.read() == "aoti":
            try:
                return _Request(graph, payload, core, "aoti").fulfil()
            except (UnsupportedGraphError, EntryError) as error:
                opcache.current().keeper.tell(
                    f"aoti {error}",
                    f"{env.NEURON_SIM_CODEGEN.name}=aoti: a graph is compiled to data instead and runs slower: {error}",
                )
        return _Request(graph, payload, core, "aten").fulfil()


class _Request:
    """A program that is wanted, in one of the two kinds."""

    def __init__(self, graph: GraphData, payload: bytes, core: int, codegen: str) -> None:
        self._graph, self._payload, self._core, self._codegen = graph, payload, core, codegen
        self._purpose = purpose_of(graph, payload, codegen)

    def fulfil(self) -> Artifact:
        began = time.perf_counter()
        place = (key_of(self._purpose), tuple(self._graph.groups), self._core)
        if place in _loaded:
            totals.memory_hits += 1
            found = "memory"
        else:
            _loaded[place], found = self._library() if self._codegen == "aoti" else self._program()
            totals.disk_hits += found == "disk"
            totals.compiled += found == "compiled"
        return Artifact(place[0], self._codegen, _loaded[place], found, time.perf_counter() - began)

    def _program(self) -> tuple[Runner, str]:
        # Built from what was just traced, before it is kept: what cannot run must not reach the cache.
        runner = program.build(self._payload, self._graph.groups, self._core)

        def check(entry: Entry) -> None:
            if entry.payload != self._payload:
                raise EntryError("its graph is not the one that its first line names")

        _, found = opcache.current().keeper.find_or_make(self._purpose, lambda: self._payload, check)
        return runner, "disk" if found else "compiled"

    def _library(self) -> tuple[Runner, str]:
        entry, found = opcache.current().keeper.find_or_make(
            self._purpose, lambda: aoti.compile_library(self._graph), _check_trust, trust.seal
        )
        runner, _ = aoti.load_library(entry.payload, self._core)
        return runner, "disk" if found else "compiled"


def _check_trust(entry: Entry) -> None:
    if not trust.is_trusted(entry.key, entry.payload, entry.seal):
        raise UntrustedError(
            f"it is code, and without this user's seal; {env.NEURON_SIM_TRUST_CACHE.name}=1 would load it all the same"
        )


def load(key: str, groups: Sequence[str], core: int, inputs: Inputs) -> Artifact | None:
    """The artifact of a key, from memory or disk; None where it is not there, or not for these inputs."""
    began, codegen = time.perf_counter(), env.NEURON_SIM_CODEGEN.read()
    keeper = opcache.current().keeper
    place = (key, tuple(groups), core)
    with _lock:
        if place in _loaded:
            totals.memory_hits += 1
            return Artifact(key, codegen, _loaded[place], "memory", time.perf_counter() - began)
        try:
            entry = keeper.find(key)
            if entry is None:
                return None
            runner = _runner_of(entry, codegen, groups, core, inputs)
        except EntryError as error:
            keeper.useless(key, error)
            return None
        except OSError:
            return None  # who keeps the next program tells about it
        _loaded[place] = runner
        totals.disk_hits += 1
        return Artifact(key, codegen, runner, "disk", time.perf_counter() - began)


def _runner_of(entry: Entry, codegen: str, groups: Sequence[str], core: int, inputs: Inputs) -> Runner:
    purpose = entry.purpose
    if (purpose.get("kind"), purpose.get("codegen")) != ("graph", codegen):
        raise EntryError(f"it is no graph's program of the kind {codegen}")
    if codegen == "aoti":
        if purpose.get("machine") != aoti.target(groups):
            raise EntryError("its library is for another machine")
        _check_trust(entry)
        runner, its_inputs = aoti.load_library(entry.payload, core)
    else:
        if purpose.get("graph") != digest(entry.payload):
            raise EntryError("its graph is not the one that its first line names")
        its_inputs = program.read_payload(entry.payload)[0].get("inputs", [])
        runner = program.build(entry.payload, groups, core)
    if its_inputs != list(inputs):
        raise EntryError("its graph has other inputs")
    return runner


def purpose_of(graph: GraphData, payload: bytes, codegen: str) -> dict[str, Any]:
    """What an artifact is for: the graph, PyTorch's version, and the target. Equal in every process and rank."""
    data = graph.data
    purpose = {
        "kind": "graph",
        "codegen": codegen,
        "graph": digest(payload),
        "call": f"graph of {len(data['operations'])} operators and {len(data['inputs'])} inputs",
        "torch": torch.__version__,
        "target": opcache.current().target,
    }
    return purpose | {"machine": aoti.target(graph.groups)} if codegen == "aoti" else purpose


def forget_loaded() -> None:
    """Forget what is in memory, as a new process would, and count from zero. For tests and tools."""
    with _lock:
        _loaded.clear()
        for name in vars(totals):
            setattr(totals, name, 0)
