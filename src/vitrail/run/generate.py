"""Making the pictures of a request: on every rank of the run, or in this process alone."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import torch.distributed as dist
import transformers

from .. import env
from ..apply.flight import FLIGHT
from ..errors import CheckpointError, UnsupportedError, UsageError, VitrailError
from . import png
from .compiling import compile_pipeline
from .counts import counts
from .pipelines import load_pipeline, package_versions
from .prompts import FEW, encode_only, free, remember
from .rank import lost_touch, out_of_memory
from .ranks import host_group
from .request import Picture, Request

Seconds = dict[str, float]


def generate(request: Request, folder: Path) -> dict[str, Any]:
    """Make and write the pictures; every rank calls this, rank 0 writes. The report is the same on all ranks.

    It holds ``images`` (path, prompt, seed), ``seconds`` by phase (load, encode, denoise, decode, save) and ``ranks``:
    bytes of parameters and buffers, collectives with their bytes, and with ``compile`` the graphs, for each.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    quiet()
    clock: Seconds = dict.fromkeys(("load", "encode", "denoise", "decode", "save"), 0.0)
    started = time.perf_counter()
    device = request.device
    assert device is not None
    pipeline = load(request, folder)
    clock["load"] = time.perf_counter() - started
    arguments, request = call_arguments(pipeline, request)
    before = counts(device)
    if request.compile:
        compile_pipeline(pipeline, whole=request.whole)
    pictures = request.pictures()
    encoders = remember(pipeline, None if request.free_text_encoder else FEW)
    if request.free_text_encoder:
        clock["encode"] += _encode_all(pipeline, pictures, arguments, encoders)
    collectives, payload = FLIGHT.collectives, FLIGHT.bytes
    for place, picture in enumerate(pictures, 1):
        label = picture.prompt if len(picture.prompt) <= 40 else picture.prompt[:39] + "…"
        counted = f"{place}/{len(pictures)} " if len(pictures) > 1 else ""
        pipeline.set_progress_bar_config(disable=not first, desc=counted + label, file=sys.stderr, leave=True)
        with phases(pipeline, clock):
            image = run(pipeline, picture, arguments)
        if first:
            assert image is not None
            started = time.perf_counter()
            png.write(image, Path(picture.path), facts(request, picture, image))
            clock["save"] += time.perf_counter() - started
    mine = {
        "rank": dist.get_rank() if dist.is_initialized() else 0,
        "bytes": {
            name: _bytes(part) for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)
        },
        "collectives": FLIGHT.collectives - collectives,
        "collective_bytes": FLIGHT.bytes - payload,
        **({"graphs": asdict(counts(device) - before)} if request.compile else {}),
    }
    return {
        "images": [vars(picture) for picture in pictures],
        "model": request.model or "bundled",
        "tp": request.tp,
        "device": request.device,
        "dtype": request.dtype,
        "seed": request.seed,
        "seconds": {name: round(value, 3) for name, value in clock.items()},
        "ranks": everyone(mine),
    }


def load(request: Request, folder: Path) -> Any:
    assert request.device is not None
    assert request.dtype is not None
    try:
        return load_pipeline(
            folder,
            tp=request.tp or 1,
            device=request.device,
            dtype=getattr(torch, request.dtype),
            shard=request.shard,
        )
    except (VitrailError, MemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if out_of_memory(text) or lost_touch(text):
            raise
        raise CheckpointError(
            f"{folder} cannot be loaded: {type(error).__name__}: {text[:300]}",
            hint=f"{env.DEBUG.name}=1 shows where",
        ) from error


def _encode_all(pipeline: Any, pictures: list[Picture], arguments: dict[str, Any], encoders: list[Any]) -> float:
    """Encode every prompt, then give the encoders' memory back. Seconds."""
    started = time.perf_counter()
    seen: set[str] = set()
    for picture in pictures:
        if picture.prompt not in seen:
            seen.add(picture.prompt)
            encode_only(pipeline, lambda picture=picture: run(pipeline, picture, arguments))  # type: ignore[misc]
    free(encoders)
    return time.perf_counter() - started


def facts(request: Request, picture: Picture, image: Any) -> dict[str, Any]:
    """How a picture was made: enough to make it again."""
    return {
        "prompt": picture.prompt,
        "seed": picture.seed,
        "steps": request.steps,
        "guidance": request.guidance,
        "height": image.height,
        "width": image.width,
        "model": request.model or "bundled",
        "dtype": request.dtype,
        "device": request.device,
        "tp": request.tp,
        "versions": package_versions(),
    }


def call_arguments(pipeline: Any, request: Request) -> tuple[dict[str, Any], Request]:
    """The pipeline's own names for what was asked, and the request with its defaults filled in.

    Raises `UsageError` for what it does not take.
    """
    accepted = inspect.signature(pipeline.__call__).parameters
    if "num_frames" in accepted:
        raise UnsupportedError(f"{type(pipeline).__name__} makes videos, which generate cannot write yet")
    wanted = {
        "height": ("--height", request.height),
        "width": ("--width", request.width),
        "num_inference_steps": ("--steps", request.steps),
        "guidance_scale": ("--guidance", request.guidance),
    }
    for name, (option, value) in wanted.items():
        if value is not None and name not in accepted:
            raise UsageError(f"{option}: {type(pipeline).__name__} does not take it")

    def default(name: str) -> Any:
        return accepted[name].default if name in accepted else None

    steps = request.steps if request.steps is not None else default("num_inference_steps")
    guidance = request.guidance if request.guidance is not None else default("guidance_scale")
    arguments = {name: value for name, (_, value) in wanted.items() if value is not None}
    return arguments, replace(request, steps=steps, guidance=guidance)


def run(pipeline: Any, picture: Picture, arguments: dict[str, Any]) -> Any:
    """The picture; None on ranks that leave the decoding to the first."""
    # The generator is the CPU's whatever the device, so that latents are the same on every rank, degree and machine.
    generator = torch.Generator("cpu").manual_seed(picture.seed)
    if (
        checked := hasattr(pipeline, "image_processor")
        and "output_type" in inspect.signature(pipeline.__call__).parameters
    ):
        decodes = not dist.is_initialized() or dist.get_rank() == 0 or "vae" not in pipeline.components
        arguments = {**arguments, "output_type": "np" if decodes else "latent"}
    try:
        result = pipeline(prompt=picture.prompt, generator=generator, **arguments)
    except VitrailError:
        raise
    except (ValueError, TypeError) as error:
        raise UsageError(f"{type(pipeline).__name__} refused: {' '.join(str(error).split())}") from error
    images = getattr(result, "images", None)
    if images is None or len(images) == 0:
        raise UnsupportedError(f"{type(pipeline).__name__} gave no images")
    if not checked:
        return images[0]
    if arguments["output_type"] == "latent":
        return None
    if not np.isfinite(images).all():
        raise VitrailError(
            f"{picture.prompt!r} came out as values that are not numbers (NaN or infinity), so there is no picture",
            hint="float16 is too narrow for some models: --dtype bfloat16 or float32",
        )
    return pipeline.image_processor.numpy_to_pil(images)[0]


@contextmanager
def phases(pipeline: Any, clock: Seconds, at_edge: Callable[[], None] | None = None) -> Iterator[None]:
    """Time what comes before, during and after the calls of the denoiser; ``at_edge`` runs around each of them."""
    edges: list[float] = []

    def edge(*_: Any) -> None:
        edges.append(time.perf_counter())
        if at_edge is not None:
            at_edge()

    models = [part for name, part in pipeline.components.items() if name.startswith(("transformer", "unet")) and part]
    handles = [model.register_forward_pre_hook(edge) for model in models]
    handles += [model.register_forward_hook(edge) for model in models]
    started = time.perf_counter()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    ended = time.perf_counter()
    first, last = (edges[0], edges[-1]) if edges else (started, started)
    clock["encode"] += first - started
    clock["denoise"] += last - first
    clock["decode"] += ended - last


def _bytes(module: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def everyone(mine: dict[str, Any]) -> list[dict[str, Any]]:
    if not dist.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=host_group())
    return everyone


def quiet() -> None:
    """Leave standard error to our own progress bar."""
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
