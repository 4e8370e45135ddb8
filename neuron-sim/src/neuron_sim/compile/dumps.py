"""TORCH_NEURONX_DEBUG_DIR: the graphs that were compiled, as readable text, in a folder for each rank (`proc_0`)."""

import itertools
import os
from pathlib import Path

from torch.fx import GraphModule

from neuron_sim import env, opcache

_numbers = itertools.count()


def dump(graph: GraphModule, kind: str) -> None:
    """Write a graph's text, if that is asked for. A folder that cannot be written is told once."""
    folder = env.DEBUG_DIR.read()
    if folder is None:
        return
    rank = os.environ.get("RANK", "0")
    file = Path(folder, f"proc_{rank}", f"graph_{next(_numbers):04}_{kind}.txt")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(graph.print_readable(print_output=False), "utf-8")
    except OSError as error:
        opcache.current().keeper.tell("debug", f"{env.DEBUG_DIR.name}={folder}: graphs cannot be written: {error}")
