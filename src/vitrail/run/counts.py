"""What ``torch.compile`` did so far in this process: graphs, and whether each was compiled or found in a cache.

Inductor's numbers come from ``torch._dynamo.utils.counters``, which is private to PyTorch (tested: 2.13.0); the neuron
backend counts its own.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Counts:
    """``graphs`` were asked for; ``compiled`` of them were compiled, ``found`` were in a cache on disk.

    ``kept`` of the compiled ones were written to the cache. ``traced`` went through AOTAutograd, which a graph that is
    found need not. ``breaks`` counts places where a graph had to be split.
    """

    graphs: int = 0
    compiled: int = 0
    found: int = 0
    kept: int = 0
    traced: int = 0
    breaks: int = 0

    def __sub__(self, other: Counts) -> Counts:
        before = asdict(other)
        return Counts(**{name: value - before[name] for name, value in asdict(self).items()})

    def __add__(self, other: Counts) -> Counts:
        more = asdict(other)
        return Counts(**{name: value + more[name] for name, value in asdict(self).items()})


def counts(device: str) -> Counts:
    """The counts of this process for ``device``'s backend. All zero before the first graph."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return Counts()
    counters = dynamo.counters
    breaks = sum(counters["graph_break"].values())
    if device == "neuron":
        return _neuron(breaks) or Counts(graphs=counters["stats"]["unique_graphs"], breaks=breaks)
    cache = counters["aot_autograd"]
    found = cache["autograd_cache_hit"]
    return Counts(
        graphs=cache["total"],
        compiled=cache["total"] - found,
        found=found,
        kept=cache["autograd_cache_saved"],
        traced=cache["total"] - found,
        breaks=breaks,
    )


def _neuron(breaks: int) -> Counts | None:
    """The simulated backend's own counts; the real one tells none."""
    artifacts, opcache = sys.modules.get("neuron_sim.compile.artifacts"), sys.modules.get("neuron_sim.opcache")
    if artifacts is None or opcache is None:
        return None
    own = artifacts.totals
    return Counts(
        graphs=own.compiled + own.disk_hits,
        compiled=own.compiled,
        found=own.disk_hits,
        kept=own.compiled if opcache.current().disk is not None else 0,
        traced=own.aot_autograd,
        breaks=breaks,
    )
