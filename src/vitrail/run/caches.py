"""Where ``torch.compile`` keeps its graphs for a device, and whether it keeps them at all."""

from __future__ import annotations

from dataclasses import dataclass

from .. import env


@dataclass(frozen=True)
class Cache:
    """``folder`` holds the graphs; ``off`` says why nothing is kept, or is None."""

    folder: str
    off: str | None = None


def cache_of(device: str) -> Cache:
    """The cache of ``device``'s backend, from its own settings."""
    if device == "neuron":
        disabled = [one.name for one in (env.DISABLE_NEFF_CACHE, env.NEFF_DISABLE_CACHE) if one.read()]
        return Cache(env.NEFF_CACHE_DIR.read(), f"{disabled[0]} is set" if disabled else None)
    # The settings of Inductor and of AOTAutograd are public; where the folder is, its module alone knows.
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    off = None
    if not inductor.fx_graph_cache or inductor.force_disable_caches:
        off = "Inductor's cache of graphs is off (TORCHINDUCTOR_FX_GRAPH_CACHE, TORCHINDUCTOR_FORCE_DISABLE_CACHES)"
    elif not functorch.enable_autograd_cache:
        off = "AOTAutograd's cache is off (TORCHINDUCTOR_AUTOGRAD_CACHE)"
    return Cache(cache_dir(), off)
