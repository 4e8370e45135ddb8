"""vitrail: diffusers pipelines, sharded over any number of devices, with no change to the model's code."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from diffusers import ParallelConfig, TensorParallelConfig

    from .apply.entry import apply_tensor_parallel, enable_parallelism, from_pretrained
    from .apply.planning import derive_plan
    from .apply.sharded import is_sharded, sharding_of
    from .bundled import model_folder
    from .plan import Plan
    from .run.compiling import compile_pipeline
    from .run.pipelines import load_pipeline
    from .run.saving import save_pretrained

# Loaded when first asked for: importing vitrail, as the command line does for --help, imports no torch.
_HOMES = {
    "ParallelConfig": "diffusers",
    "TensorParallelConfig": "diffusers",
    "Plan": "vitrail.plan",
    "apply_tensor_parallel": "vitrail.apply.entry",
    "compile_pipeline": "vitrail.run.compiling",
    "derive_plan": "vitrail.apply.planning",
    "enable_parallelism": "vitrail.apply.entry",
    "from_pretrained": "vitrail.apply.entry",
    "is_sharded": "vitrail.apply.sharded",
    "load_pipeline": "vitrail.run.pipelines",
    "model_folder": "vitrail.bundled",
    "save_pretrained": "vitrail.run.saving",
    "sharding_of": "vitrail.apply.sharded",
}

__all__ = [
    "ParallelConfig",
    "Plan",
    "TensorParallelConfig",
    "__version__",
    "apply_tensor_parallel",
    "compile_pipeline",
    "derive_plan",
    "enable_parallelism",
    "errors",
    "from_pretrained",
    "is_sharded",
    "load_pipeline",
    "model_folder",
    "save_pretrained",
    "sharding_of",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("vitrail.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
