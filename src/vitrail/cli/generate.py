"""``vitrail generate``: pictures from prompts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from .. import env
from ..errors import UsageError, VitrailError
from .show import fail, warn


def generate(
    model: str | None = None,
    /,
    *,
    prompt: Annotated[
        list[str] | None, Parameter(name=["--prompt", "-p"], negative="", allow_leading_hyphen=True)
    ] = None,
    output: Annotated[str, Parameter(name=["--output", "-o"])] = "vitrail.png",
    tp: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    height: int | None = None,
    width: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    guidance: float | None = None,
    count: Annotated[int, Parameter(name=["--count", "-n"])] = 1,
    compile_: Annotated[bool, Parameter(name="--compile", negative="")] = False,
    whole: Annotated[bool, Parameter(negative="")] = False,
    shard: str | None = None,
    free_text_encoder: Annotated[bool, Parameter(negative="")] = False,
    like: Path | None = None,
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Make pictures, with the model's transformer and text encoders sharded over --tp ranks.

    Starts its own ranks, or joins when RANK is set: torchrun --nproc-per-node 2 -m vitrail generate ... is the same
    job. Prints the paths of the pictures.

    Parameters
    ----------
    model
        A pipeline in diffusers' format: a folder, or a hub id. Default: the bundled model.
    prompt
        What to draw; may be given several times. "-" reads one prompt a line from standard input.
    output
        A .png file, numbered when there are several pictures, or a folder.
    tp
        The degree: over how many ranks to shard. Default: 1, or all ranks of the run joined.
    device
        cpu, cuda, xpu or neuron. Default: the best real one.
    dtype
        float32, bfloat16 or float16. Default: float32 on cpu, else bfloat16.
    height
        In pixels. Default: the model's.
    width
        In pixels. Default: the model's.
    steps
        Denoising steps. Default: the model's.
    seed
        Of the first picture; the others count up. The same seed gives the same picture at any degree. Default: 0.
    guidance
        Guidance scale. Default: the model's.
    count
        Pictures per prompt.
    compile_
        Compile what the pipeline runs with torch.compile; the first picture of each size waits for it, unless
        `vitrail compile` was there before.
    whole
        Compile whole models, not their repeated blocks.
    shard
        What to shard: transformer, text_encoder, both with a comma between, or none. Default: all that can be.
    free_text_encoder
        Encode all prompts first, and give the encoders' memory back before denoising.
    like
        A picture made by vitrail: take its prompt, seed, size, steps, model and dtype where not given here.
    json_
        Print a report as JSON: paths, seconds by phase, bytes and collectives per rank.
    """
    from ..run.request import Request

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    request = Request(
        model=model,
        prompts=_prompts(prompt or []),
        output=output,
        tp=tp,
        device=device,
        dtype=dtype,
        height=height,
        width=width,
        steps=steps,
        seed=seed or 0,
        guidance=guidance,
        count=count,
        as_json=json_,
        compile=compile_,
        whole=whole,
        shard=parts(shard),
        free_text_encoder=free_text_encoder,
    )
    if like is not None:
        request = _like(request, like, seed)
    request.check()
    run(request, _print)


def run(request: Any, tell: Callable[[Any, dict[str, Any]], None]) -> None:
    """Do what is asked, in ranks of its own or in those that were started, and have rank 0 tell the report."""
    from ..run.launcher import check_launcher
    from ..run.rank import guarded

    if env.RANK.read() is None:
        tell(request, _start(request))
        return
    check_launcher()
    guarded(lambda: _join(request, tell), quiet=False)


def parts(shard: str | None) -> tuple[str, ...] | None:
    """What ``--shard`` names."""
    return None if shard is None else tuple(part.strip() for part in shard.split(","))


def _prompts(given: list[str]) -> tuple[str, ...]:
    prompts: list[str] = []
    for text in given:
        if text != "-":
            prompts.append(text)
        elif env.RANK.read() in (None, 0):  # the others are sent rank 0's
            lines = [line.strip() for line in sys.stdin]
            if not any(lines):
                raise UsageError("-p -: standard input holds no prompt")
            prompts += [line for line in lines if line]
    return tuple(prompts)


def _like(request: Any, picture: Path, seed: int | None) -> Any:
    from ..run.png import read_facts

    facts = read_facts(picture)
    model = facts["model"] if facts["model"] != "bundled" else None
    return replace(
        request,
        model=request.model or model,
        prompts=request.prompts or (facts["prompt"],),
        seed=facts["seed"] if seed is None else seed,
        steps=request.steps or facts["steps"],
        guidance=facts["guidance"] if request.guidance is None else request.guidance,
        height=request.height or facts["height"],
        width=request.width or facts["width"],
        dtype=request.dtype or facts["dtype"],
    )


def folder_of(model: str | None) -> Path:
    if model is None:
        from ..bundled import model_folder

        return model_folder()
    if Path(model).is_dir():
        return Path(model)
    from ..run.pipelines import local_folder

    return local_folder(model, {})


def _start(request: Any) -> dict[str, Any]:
    from ..run.preflight import prepare

    folder = folder_of(request.model)
    request, warning = prepare(request, folder)
    if warning:
        warn(warning)
    if request.tp == 1:
        from ..run.rank import Failure, make

        try:
            return make(request, folder)
        except (MemoryError, RuntimeError) as error:
            failure = Failure.of(error, 0)
            if failure.trace is not None:
                raise
            fail(failure.message, hint=failure.hint, code=failure.exit_code)
    from ..run.launch import Interrupted, launch

    try:
        return launch(request, folder)
    except Interrupted as interrupted:
        sys.exit(interrupted.exit_code)


def _join(request: Any, tell: Callable[[Any, dict[str, Any]], None]) -> None:
    from ..run.preflight import prepare
    from ..run.rank import run_here

    folder = folder_of(request.model)
    if not request.prompts and env.RANK.read() != 0:
        request = replace(request, prompts=("sent by rank 0",))
    world = env.WORLD_SIZE.read() or 1
    if request.tp not in (None, world):
        raise UsageError(f"--tp {request.tp}, but {world} ranks were started", hint="leave --tp out under torchrun")
    request, warning = prepare(replace(request, tp=world), folder)
    if warning and env.RANK.read() == 0:
        warn(warning)
    report = run_here(request, folder)
    if env.RANK.read() == 0:
        tell(request, report)


def _print(request: Any, report: dict[str, Any]) -> None:
    if request.as_json:
        text = json.dumps(report, indent=2, ensure_ascii=False)
    else:
        text = "\n".join(image["path"] for image in report["images"])
    write_out(text)


def write_out(text: str) -> None:
    """Print a result. Raises `VitrailError` when standard output takes it no more."""
    if sys.stdout is None:  # closed by whoever started this
        return
    try:
        print(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough; Python must not try again on its way out
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise VitrailError(f"standard output cannot be written: {error.strerror}") from None
