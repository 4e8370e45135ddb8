"""What the environment says of the run that this process belongs to. Imports no torch."""

from __future__ import annotations

import os

from .. import env
from ..errors import UsageError


def in_run() -> bool:
    """Whether a launcher started this process as a rank."""
    return env.RANK.read() is not None


def check_launcher() -> None:
    """Raise `UsageError` when the environment speaks of a run that cannot be."""
    rank, world = env.RANK.read(), env.WORLD_SIZE.read()
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise UsageError(
            f"RANK is set, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not",
            hint="start ranks with torchrun, or unset RANK to let vitrail start its own",
        )
    if rank is not None and world is not None and rank >= world:
        raise UsageError(f"RANK is {rank}, but WORLD_SIZE is {world}")
