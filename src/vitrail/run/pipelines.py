"""Loading a whole diffusers pipeline with its transformers sharded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline, TensorParallelConfig
from safetensors import SafetensorError

from ..apply.classes import model_class
from ..apply.entry import from_pretrained
from ..apply.guard import GuardedPipeline
from ..apply.mesh import current_device, device_of_group
from ..apply.modules import sharded_class
from ..errors import CheckpointError, UnsupportedError, UsageError
from ..layout import BACKENDS
from . import ranks
from .complete import complete
from .devices import available
from .folder import check_files, read_index
from .launcher import check_launcher, in_run
from .sharding import check_parts, to_shard


def load_pipeline(
    path: str | Path | None = None,
    *,
    tp: int = 1,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    shard: Sequence[str] | None = None,
    **arguments: Any,
) -> DiffusionPipeline:
    """An ordinary diffusers pipeline on ``device``, its transformers and text encoders sharded over ``tp`` ranks.

    ``path`` is a folder or a hub id; without one it is the bundled model. Under ``torchrun`` the process group is
    made when there is none; ``device`` is the group's by default, or the CPU. With more ranks than ``tp``, each row
    of ``tp`` ranks holds a pipeline of its own. ``shard`` names what is sharded: "transformer", "text_encoder", or
    "none"; by default all that can be. The VAE is whole on every rank.
    ``arguments`` go to ``DiffusionPipeline.from_pretrained``. ``dtype`` is float32 by default, as in diffusers.

    Raises `UnsupportedError` for a pipeline whose denoiser has no plan, `PlanError` for a degree it cannot serve,
    `CheckpointError` for incomplete folders, `UsageError` when ``tp`` ranks are not there.
    """
    from ..bundled import model_folder

    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise UsageError(f"tp is {tp!r}; it must be an integer from 1")
    dtype = arguments.pop("torch_dtype", None) or dtype
    if device is None:
        device = device_of_group() if dist.is_initialized() else "cpu"
    try:
        device_type = torch.device(device).type
    except RuntimeError:
        raise UsageError(f"device {device!r} is unknown to PyTorch", hint=f"known: {', '.join(BACKENDS)}") from None
    if not available(device_type):
        raise UnsupportedError(f"this machine has no {device_type} device that PyTorch {torch.__version__} can use")
    folder = local_folder(str(path) if path is not None else str(model_folder()), arguments)
    index = read_index(folder)
    components: dict[str, Any] = {}
    check_parts(shard)
    if tp != 1:
        given = {name for name in arguments if name in index}
        chosen = to_shard(index, folder, tp, shard, {})
        axis = _mesh(device_type, tp)
        for name, class_name in chosen.items():
            if name in given:  # the caller's own, or None to leave it out
                continue
            config = TensorParallelConfig(mesh=axis)
            components[name] = from_pretrained(
                model_class(class_name), str(folder), subfolder=name, dtype=dtype or torch.float32,
                parallel_config=config, **{key: arguments[key] for key in ("variant",) if key in arguments},
            )  # fmt: skip
    target = torch.device(device) if torch.device(device).index is not None else current_device(device_type)
    try:
        with complete(folder):
            pipeline = DiffusionPipeline.from_pretrained(
                str(folder), dtype=dtype or torch.float32, **components, **arguments
            )
    except (OSError, SafetensorError) as error:
        check_files(folder, index)
        raise CheckpointError(f"{folder} is incomplete: {_line(error)}") from None
    if components:
        pipeline.__class__ = sharded_class(type(pipeline), GuardedPipeline)
    return pipeline.to(target)


def local_folder(path: str, arguments: dict[str, Any]) -> Path:
    """The pipeline's folder, downloaded first if ``path`` is a hub id."""
    if Path(path).is_dir():
        return Path(path)
    if Path(path).exists() or path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise CheckpointError(
            f"there is no folder {path}", hint="give a folder in diffusers' format, or a hub id like owner/name"
        )
    hub = {
        key: arguments[key]
        for key in ("revision", "token", "cache_dir", "variant", "local_files_only")
        if key in arguments
    }
    try:
        return Path(DiffusionPipeline.download(path, **hub))
    except Exception as error:  # noqa: BLE001 - whatever the hub's client raises, the user sees one line of it
        raise CheckpointError(
            f"{path} is no local folder, and the hub did not give it: {_line(error)}",
            hint="check the name and the connection; HF_HUB_OFFLINE and HF_TOKEN matter here",
        ) from None


def _mesh(device_type: str, tp: int) -> Any:
    if device_type not in BACKENDS:
        raise UnsupportedError(f"there are no collectives for device {device_type!r}; known: {', '.join(BACKENDS)}")
    if not dist.is_initialized():
        if not in_run():
            raise UsageError(
                f"tp={tp} needs {tp} ranks, and this process was started alone",
                hint=f"start it with torchrun --nproc-per-node {tp}, or use the command: vitrail generate --tp {tp}",
            )
        check_launcher()
        ranks.bind(device_type)
        dist.init_process_group(BACKENDS[device_type])
    return ranks.mesh(device_type, tp)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def package_versions() -> dict[str, str]:
    import transformers

    from .. import __version__

    return {
        "vitrail": __version__,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
    }
