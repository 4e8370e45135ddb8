"""Compiling ahead: one denoising step at each size, so that the caches hold what ``generate --compile`` will want."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from .caches import cache_of
from .compiling import compile_pipeline
from .counts import Counts, counts
from .generate import call_arguments, everyone, load, phases, quiet, run
from .request import Request

PHASES = ("encode", "denoise", "decode")


def compile_ahead(request: Request, folder: Path) -> dict[str, Any]:
    """Fill the caches for every size of the request; every rank calls this, and the report is the same on all.

    It holds ``regions`` (what is compiled), ``seconds`` of loading, ``sizes`` (of each: height, width, seconds, and the
    graphs of every rank by phase) and ``cache``: where they lie.
    """
    device = request.device
    assert device is not None
    first = not dist.is_initialized() or dist.get_rank() == 0
    quiet()
    started = time.perf_counter()
    pipeline = load(request, folder)
    arguments, request = call_arguments(pipeline, request)
    loaded = time.perf_counter() - started
    pipeline.set_progress_bar_config(disable=True)
    regions = compile_pipeline(pipeline, whole=request.whole)
    picture = request.pictures()[0]
    sizes = []
    bar = tqdm(request.sizes, desc="compiling", unit="size", file=sys.stderr, disable=not first)
    for height, width in bar:
        bar.set_postfix_str(f"{width}x{height}")
        # Another number of steps compiles nothing more: the step is the same graph.
        wanted = {**arguments, "height": height, "width": width, "num_inference_steps": request.steps or 1}
        edges: list[Counts] = []
        seconds = dict.fromkeys(PHASES, 0.0)
        before, started = counts(device), time.perf_counter()
        with phases(pipeline, seconds, lambda: edges.append(counts(device))):  # noqa: B023 - called in the block
            run(pipeline, picture, wanted)
        spent = time.perf_counter() - started
        after = counts(device)
        marks = [before, edges[0], edges[-1], after] if edges else [before, before, after, after]
        mine = {phase: asdict(stop - start) for phase, start, stop in zip(PHASES, marks, marks[1:], strict=False)}
        ranks = everyone({"rank": dist.get_rank() if dist.is_initialized() else 0, "graphs": mine})
        sizes.append({"height": height, "width": width, "seconds": round(spent, 3), "ranks": ranks})
    return {
        "model": request.model or "bundled",
        "tp": request.tp,
        "device": device,
        "dtype": request.dtype,
        "regions": [vars(region) for region in regions],
        "seconds": {"load": round(loaded, 3)},
        "sizes": sizes,
        "cache": asdict(cache_of(device)),
    }
