"""``vitrail compile``: fill the compiler's caches before they are wanted."""

from __future__ import annotations

import json
import os
import re
from typing import Annotated, Any

from cyclopts import Parameter

from ..errors import UsageError
from .generate import folder_of, run, write_out

_SIZE = re.compile(r"(\d{1,6})[xX×](\d{1,6})")


def compile_(
    model: str | None = None,
    /,
    *,
    size: Annotated[list[str] | None, Parameter(negative="")] = None,
    tp: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    guidance: float | None = None,
    prompt: Annotated[str | None, Parameter(name=["--prompt", "-p"], allow_leading_hyphen=True)] = None,
    steps: int | None = None,
    whole: Annotated[bool, Parameter(negative="")] = False,
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Compile a model ahead of time for the sizes given, on every rank, and say what generate --compile will find.

    Runs the pipeline for one step at each size, so that the caches hold every graph; a second run finds them all. On
    neuron they lie in TORCH_NEURONX_NEFF_CACHE_DIR, on cpu and cuda in TORCHINDUCTOR_CACHE_DIR.

    Parameters
    ----------
    model
        A pipeline in diffusers' format: a folder, or a hub id. Default: the bundled model.
    size
        WIDTHxHEIGHT in pixels, such as 1024x1024; may be given several times. Default: the model's.
    tp
        The degree: over how many ranks to shard. Default: 1, or all ranks of the run joined.
    device
        cpu, cuda, xpu or neuron. Default: the best real one.
    dtype
        float32, bfloat16 or float16. Default: float32 on cpu, else bfloat16.
    guidance
        Guidance scale: with guidance many models run a batch of two, which is another graph. Default: the model's.
    prompt
        Where a model's graphs depend on the prompt's length, a prompt of that length.
    steps
        Denoising steps to run. Default: 1, which is enough unless a scheduler needs more.
    whole
        Compile whole models, not their repeated blocks.
    json_
        Print the report as JSON: graphs compiled and found by size, rank and phase, seconds, and the cache.
    """
    from ..run.preflight import prepare_sizes
    from ..run.request import Request

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    request = Request(
        model=model,
        prompts=(prompt,) if prompt else (),
        output="vitrail.png",
        tp=tp,
        device=device,
        dtype=dtype,
        steps=steps or 1,
        guidance=guidance,
        as_json=json_,
        compile=True,
        whole=whole,
        sizes=tuple(_size(text) for text in size or ()),
    )
    run(prepare_sizes(request, folder_of(model)), _tell)


def _size(text: str) -> tuple[int, int]:
    """Height and width."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise UsageError(f"--size {text}: not a size", hint="WIDTHxHEIGHT in pixels, such as --size 1024x1024")
    return int(found[2]), int(found[1])


def _tell(request: Any, report: dict[str, Any]) -> None:
    write_out(json.dumps(report, indent=2) if request.as_json else "\n".join(_lines(report)))


def _lines(report: dict[str, Any]) -> list[str]:
    regions = ", ".join(
        f"{one['component']} ({one['count']} x {one['kind']})"
        if one["count"] > 1
        else f"{one['component']} ({one['kind']})"
        for one in report["regions"]
    )
    lines = [
        f"compiled for {report['device']}, {report['dtype']}, {report['tp']} rank{'s' * (report['tp'] > 1)}: {regions}"
    ]
    unkept = 0
    for size in report["sizes"]:
        totals = dict.fromkeys(next(iter(size["ranks"][0]["graphs"].values())), 0)
        for rank in size["ranks"]:
            for phase in rank["graphs"].values():
                for key, value in phase.items():
                    totals[key] += value
        unkept += totals["compiled"] - totals["kept"]
        lines.append(
            f"{size['width']}x{size['height']}: {totals['compiled']} graphs compiled, {totals['found']} found, "
            f"{size['seconds']:.1f} s" + (f", {totals['breaks']} graph breaks" if totals["breaks"] else "")
        )
    cache = report["cache"]
    if cache["off"]:
        lines.append(f"generate --compile will find nothing: {cache['off']}")
    elif unkept > 0:
        lines.append(
            f"generate --compile will find all but {unkept} graphs, which cannot be kept, in {cache['folder']}"
        )
    else:
        lines.append(
            f"generate --compile will find every graph of these sizes in {cache['folder']}, and compile nothing"
        )
    return lines
