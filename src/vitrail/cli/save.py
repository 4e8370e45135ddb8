"""``vitrail save``: a model's folder written anew, whole or in slices, without any process holding it whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ..errors import UsageError
from .generate import folder_of, parts, run, write_out


def save(
    model: str | None = None,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    tp: int | None = None,
    dtype: str | None = None,
    shard: str | None = None,
    slices: Annotated[bool, Parameter(negative="")] = False,
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Load a pipeline over --tp ranks and write it to a folder: in another dtype, or in slices that ranks reload alone.

    What is written is an ordinary diffusers folder, tensor for tensor what one process would save, but no rank holds
    the whole of it. A folder that is there is replaced when the new one is complete. Prints the folder.

    Parameters
    ----------
    model
        A pipeline in diffusers' format: a folder, or a hub id. Default: the bundled model.
    output
        The folder to write.
    tp
        The degree: over how many ranks to shard. Default: 1, or all ranks of the run joined.
    dtype
        float32, bfloat16 or float16. Default: float32.
    shard
        What to shard: transformer, text_encoder, both with a comma between, or none. Default: all that can be.
    slices
        Write each rank's slices to a file of its own; vitrail loads them at any degree, and nothing else does.
    json_
        Print a report as JSON: the folder, its bytes, seconds, and bytes of each rank.
    """
    from ..run.request import Request

    if slices and (tp or 1) < 2 and os.environ.get("RANK") is None:
        raise UsageError("--slices needs ranks to have slices", hint="--tp 2 or more")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    request = Request(
        model=model,
        prompts=("nothing is drawn",),
        tp=tp,
        device="cpu",
        dtype=dtype,
        shard=parts(shard),
        save_to=str(output),
        slices=slices,
        as_json=json_,
    )
    folder = folder_of(model)
    if output.absolute() == Path(folder).absolute():
        raise UsageError(f"--output {output} is the folder that is read", hint="name another one")
    run(request, _tell)


def _tell(request: Any, report: dict[str, Any]) -> None:
    write_out(json.dumps(report, indent=2) if request.as_json else str(report["folder"]))
