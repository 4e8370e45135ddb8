"""Saving a model or a pipeline as an ordinary folder; an old folder stays until the new one is whole."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from ..apply.save import LARGEST_FILE, save_sharded_model
from ..apply.sharded import is_sharded, sharding_of
from ..errors import CheckpointError, UsageError
from .ranks import host_group
from .request import Request


def save_pretrained(
    model_or_pipeline: Any, folder: str | Path, *, sharded: bool = False, max_shard_size: str = LARGEST_FILE
) -> None:
    """Write a model or a pipeline to ``folder``, as its own ``save_pretrained`` writes the unsharded one.

    Every rank calls this; tensors come together one at a time on the first rank, which writes them. With ``sharded``
    each rank writes its slices to a file of its own instead, which vitrail loads at any degree, and nothing else does.
    A folder that is there is replaced when the new one is complete: an interrupted save leaves the old or the new one.

    Raises `CheckpointError` on every rank when one could not write, `UsageError` for what is no model or pipeline.
    """
    target = Path(folder).absolute()
    components = getattr(model_or_pipeline, "components", None)
    if not isinstance(model_or_pipeline, nn.Module) and not isinstance(components, dict):
        raise UsageError(f"expected a model or a pipeline, not {type(model_or_pipeline).__name__}")
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file", hint="name a folder")
    with _replacing(target) as unfinished:
        if isinstance(model_or_pipeline, nn.Module):
            _save_model(model_or_pipeline, unfinished, sharded, max_shard_size)
            return
        for name, part in model_or_pipeline.components.items():
            if hasattr(part, "save_pretrained"):
                inner = unfinished / name
                if _writes():
                    inner.mkdir(exist_ok=True)
                _barrier()
                _save_model(part, inner, sharded, max_shard_size)
        if _writes():
            model_or_pipeline.save_config(str(unfinished))


def save_job(request: Request, folder: Path) -> dict[str, Any]:
    """Load the request's pipeline and save it; every rank calls this, and the report is the same on all."""
    from .generate import everyone, load, quiet

    assert request.save_to is not None
    quiet()
    started = time.perf_counter()
    pipeline = load(request, folder)
    loaded = time.perf_counter()
    save_pretrained(pipeline, request.save_to, sharded=request.slices)
    modules = [part for part in pipeline.components.values() if isinstance(part, nn.Module)]
    held = sum(parameter.nbytes for module in modules for parameter in module.parameters())
    return {
        "folder": request.save_to,
        "bytes": sum(file.stat().st_size for file in Path(request.save_to).rglob("*") if file.is_file()),
        "seconds": {"load": round(loaded - started, 3), "save": round(time.perf_counter() - loaded, 3)},
        "ranks": everyone({"rank": dist.get_rank() if dist.is_initialized() else 0, "bytes": held}),
    }


def _save_model(part: Any, folder: Path, sharded: bool, largest: str) -> None:
    if isinstance(part, nn.Module) and is_sharded(part):
        sharding = sharding_of(part)
        assert sharding is not None
        if 0 in sharding.axis.ranks:  # of several rows that hold the same model, the first writes
            save_sharded_model(part, folder, sharded=sharded, largest=largest)
        return
    problem: list[str | None] = [None]
    if _writes():
        limit = {"max_shard_size": largest} if isinstance(part, nn.Module) else {}
        try:
            part.save_pretrained(str(folder), **limit)
        except OSError as error:
            problem = [str(error)]
    if dist.is_initialized():  # the others must not wait for a rank that gave up
        dist.broadcast_object_list(problem, src=0, group=host_group())
    if problem[0] is not None:
        raise CheckpointError(f"{type(part).__name__} could not be saved to {folder}: {problem[0]}")


def _writes() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    """Wait for the others, by way of the host: not every device's group has a barrier for this."""
    if dist.is_initialized():
        dist.all_gather_object([None] * dist.get_world_size(), None, group=host_group())


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A new folder beside ``target``, which takes its place at the end of the block; the same path on every rank."""
    path = [""]
    problem = [""]
    if _writes():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            path = [tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".unfinished", dir=target.parent)]
        except OSError as error:
            problem = [str(error)]
    if dist.is_initialized():
        both = [path[0], problem[0]]
        dist.broadcast_object_list(both, src=0, group=host_group())
        path, problem = [both[0]], [both[1]]
    if problem[0]:
        raise CheckpointError(f"nothing can be written beside {target}: {problem[0]}")
    unfinished = Path(path[0])
    try:
        yield unfinished
        _barrier()
        if _writes():
            os.chmod(unfinished, 0o755)
            _put_in_place(unfinished, target)
    except OSError as error:
        raise CheckpointError(f"{target} could not be saved: {error}") from error
    finally:
        if _writes():
            shutil.rmtree(unfinished, ignore_errors=True)
    _barrier()


def _put_in_place(unfinished: Path, target: Path) -> None:
    """Exchange the folders in one step where the system can (Linux); else there is a moment with neither."""
    if not target.exists():
        os.rename(unfinished, target)
        return
    if sys.platform == "linux":
        at_cwd, exchange = -100, 2
        renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if renameat2 and renameat2(at_cwd, os.fsencode(unfinished), at_cwd, os.fsencode(target), exchange) == 0:
            return
    aside = unfinished.with_suffix(".replaced")
    os.rename(target, aside)
    os.rename(unfinished, target)
    shutil.rmtree(aside, ignore_errors=True)
