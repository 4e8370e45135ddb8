"""`init_process_group("neuron")`: one process a core, and gloo over the host memory that the cores' tensors live in.

The backend itself is C++ (`csrc/backend.cpp`); it asks a `GroupWatch` before every collective.
"""

import os
from collections.abc import Sequence
from typing import Protocol

from torch._C._distributed_c10d import Backend, _DistributedBackendOptions

from neuron_sim import _core, claims, collectives, env, meeting, runtime
from neuron_sim.agreement import Agreement
from neuron_sim.collectives import Collective


class Watch(Protocol):
    """What the C++ backend calls before every collective. What it raises reaches the caller."""

    def __call__(
        self, name: str, reduce_op: str, dtype: str, elements: int, bytes: int, root: int, uneven: bool, /
    ) -> None: ...


class GroupWatch:
    """Lets a group's collectives pass the rules, counts them, and has the ranks agree on them."""

    def __init__(self, is_default: bool, agreement: Agreement | None) -> None:
        self._is_default = is_default
        self._agreement = agreement

    def __call__(
        self, name: str, reduce_op: str, dtype: str, elements: int, bytes: int, root: int, uneven: bool, /
    ) -> None:
        collective = Collective(name, reduce_op, dtype, elements, bytes, root, uneven)
        collectives.check(collective, self._is_default)
        if self._agreement is not None:
            self._agreement.check(collective)
        collectives.count(collective)


_has_group = False


def create(options: _DistributedBackendOptions) -> Backend:
    """Make the backend of one group, on each of its ranks. Called by `torch.distributed`.

    Raises what `meeting.meet` raises, `NeuronRuleError` when the device was used before the first group or this process
    sees more than one core, and `ConfigurationError` when the environment is malformed.
    """
    global _has_group
    from torch.distributed import ProcessGroupGloo

    ranks: Sequence[int] = options.global_ranks_in_group or range(options.group_size)
    me = ranks[options.group_rank]
    _take_own_core(is_first=not _has_group)
    meeting.meet(options.store, meeting.this_rank(me), ranks, options.timeout)
    host = ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
    agreement = None
    if env.NEURON_SIM_CHECK_COLLECTIVES.read():
        agreement = Agreement(host, options.store, ranks, me)
    _has_group = True
    is_default = not options.global_ranks_in_group
    return _core.make_backend(host, GroupWatch(is_default, agreement))


def _take_own_core(is_first: bool) -> None:
    """One core a process: under a launcher, the one of the local rank, unless the environment names others.

    Source: the native backend sets NEURON_RT_VISIBLE_CORES to LOCAL_RANK when it is absent.
    """
    if is_first and _core.is_started():
        collectives.apply("first_use", "init_process_group")
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is not None and not _core.is_started() and not env.VISIBLE_CORES.is_set():
        os.environ[env.VISIBLE_CORES.name] = local_rank
        claims.assigned = True
    _core.ensure_ready()
    if (seen := len(runtime.machine().cores)) != 1:
        collectives.apply("one_core", "init_process_group", str(seen))
