"""What can be refused before ranks are started: seconds instead of minutes, and one message instead of one a rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..errors import UsageError
from .folder import Defaults, check_files, check_size, denoisers, read_index, read_json, size_multiple
from .request import Request


def prepare(request: Request, folder: Path) -> tuple[Request, str | None]:
    """Fill in what was left open and check the whole; a warning to show comes along.

    The request that comes back names its device, dtype, degree and prompts.
    """
    request.check()
    index = read_index(folder)
    defaults = Defaults.of(folder)
    multiple = size_multiple(index, folder)
    check_size(request.height, "height", multiple)
    check_size(request.width, "width", multiple)
    prompts = request.prompts or ((defaults.prompt,) if defaults.prompt else ())
    if request.sizes:
        prompts = prompts or ("a red apple",)
    if not prompts:
        raise UsageError("there is no prompt", hint="-p 'a red apple', or -p - to read prompts from standard input")
    if not request.sizes and request.save_to is None:
        replace(request, prompts=prompts).check_output()
    from . import devices  # imports torch: what went before is told at once
    from .sharding import check_parts

    device = devices.choose(request.device)
    degree = request.tp or 1
    warning = devices.check_degree(device, degree)
    check_parts(request.shard)
    if degree > 1 and (request.shard is None or "transformer" in request.shard):
        for name, class_name in denoisers(index, folder).items():
            _check_plan(folder, name, class_name, degree)
    check_files(folder, index)
    filled = replace(
        request,
        prompts=prompts,
        device=device,
        tp=degree,
        dtype=request.dtype or devices.default_dtype(device),
        height=request.height or defaults.height,
        width=request.width or defaults.width,
        steps=request.steps or defaults.steps,
        guidance=request.guidance if request.guidance is not None else defaults.guidance,
    )
    return filled, warning


def prepare_sizes(request: Request, folder: Path) -> Request:
    """Check the sizes to compile for, or fill in the model's own."""
    index = read_index(folder)
    multiple = size_multiple(index, folder)
    for height, width in request.sizes:
        check_size(height, "size", multiple)
        check_size(width, "size", multiple)
    if request.sizes:
        return request
    defaults = Defaults.of(folder)
    if defaults.height is None or defaults.width is None:
        raise UsageError(f"{folder} does not say what size is usual for it", hint="name one: --size 1024x1024")
    return replace(request, sizes=((defaults.height, defaults.width),))


def _check_plan(folder: Path, name: str, class_name: str, degree: int) -> None:
    from ..plan import catalog

    config = read_json(folder / name / "config.json")
    heads = [value for key, value in config.items() if key.endswith("num_attention_heads") and isinstance(value, int)]
    if class_name not in catalog.names() or not heads or degree > min(heads):
        _resolve(folder, name, class_name, degree)


def _resolve(folder: Path, name: str, class_name: str, degree: int) -> None:
    """Resolve the plan on meta tensors, for the sake of the error it raises. Imports diffusers, which takes seconds."""
    import diffusers

    from ..apply.load import Request as LoadRequest
    from ..apply.planning import plan_for
    from ..plan import resolve

    model_class = getattr(diffusers, class_name, None)
    if model_class is None:
        raise UsageError(
            f"{folder / 'model_index.json'} names {class_name}, which diffusers {diffusers.__version__} lacks"
        )
    model = LoadRequest.of(model_class, str(folder), {"subfolder": name}).skeleton()
    resolve(plan_for(model), model, degree)
