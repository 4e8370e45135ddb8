"""A gloo group for some of the ranks, which the others need not know of.

``torch.distributed.new_group(use_local_synchronization=True)`` names such a group by how many groups this process has
made so far: where its ranks made unlike numbers before, they wait for each other for ever. Here the name follows from
the ranks alone. Uses ``_new_process_group_helper``, ``_world`` and ``_get_default_store``, which are private to PyTorch
(tested: 2.13.0).
"""

from __future__ import annotations

import datetime

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .. import env

_made: dict[tuple[int, ...], tuple[dist.ProcessGroup | None, dist.ProcessGroup]] = {}


def side_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A gloo group of ``ranks``, made once for as long as the default group lives: each costs threads and sockets.

    All of ``ranks``, this one among them, must call this; nobody else has to.
    """
    world, group = _made.get(ranks, (None, None))
    if group is None or world is not dist.group.WORLD:
        group = _new(ranks)
        _made[ranks] = (dist.group.WORLD, group)
    return group


def _new(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        dist.Backend("gloo"),
        c10d._get_default_store(),
        c10d.GroupName("vitrail side group of " + " ".join(map(str, ranks))),
        timeout=datetime.timedelta(seconds=env.TIMEOUT_SECONDS.read()),
    )
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group
