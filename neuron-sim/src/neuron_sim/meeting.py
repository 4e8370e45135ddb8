"""The ranks of a new group meet: who is missing, who disagrees, and whether their cores can form a group at all."""

import json
import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from neuron_sim import collectives, policy, runtime
from neuron_sim.errors import NeuronSimError


@dataclass(frozen=True)
class Member:
    """What a rank tells the others of itself. `node` is the machine it runs on, as the launcher counts machines."""

    rank: int
    process: int
    node: str
    core: int
    instance: str
    logical_nc_config: int
    profile: str
    strictness: str


def this_rank(rank: int) -> Member:
    """What this process, of global rank `rank`, tells the others. The runtime must have started."""
    machine, book = runtime.machine(), policy.current()
    launched = os.environ.get("GROUP_RANK") or os.environ.get("NODE_RANK") or "0"
    return Member(
        rank=rank,
        process=os.getpid(),
        node=f"{socket.gethostname()}/{launched}",
        core=machine.cores[0],
        instance=machine.instance.name,
        logical_nc_config=machine.logical_nc_config,
        profile=book.profile.name,
        strictness=book.strictness,
    )


def meet(store: Store, me: Member, ranks: Sequence[int], timeout: timedelta) -> list[Member]:
    """Exchange what each of `ranks` tells, and check it. `store` is the new group's own; every rank calls this.

    Raises `NeuronSimError` naming the ranks that have not come within `timeout`, that were configured differently, or
    that share a core; `NeuronRuleError` where the cores cannot form a group.
    """
    _come(store, "member", me, ranks, timeout, json.dumps(asdict(me)), "did not come to make the process group")
    members = [Member(**json.loads(store.get(_key("member", rank)))) for rank in ranks]
    check_agreement(members)
    check_cores(members)
    check_topology(members)
    # A rank that gave up while it waited for this one has told what it is, and will not connect.
    _come(store, "ready", me, ranks, timeout, "1", "came to make the process group, but did not stay")
    return members


def _key(stage: str, rank: int) -> str:
    return f"neuron_sim/{stage}/{rank}"


def _come(
    store: Store, stage: str, me: Member, ranks: Sequence[int], timeout: timedelta, value: str, otherwise: str
) -> None:
    """Say that this rank has come to a stage of the meeting, and wait for the others."""
    store.set(_key(stage, me.rank), value)
    try:
        store.wait([_key(stage, rank) for rank in ranks], timeout)
    except DistStoreError as error:
        missing = [rank for rank in ranks if not store.check([_key(stage, rank)])]
        if not missing:
            raise
        # Without torchrun rank 0 keeps the store, and PyTorch lets it go no further before every rank has connected.
        waits = len(missing) > 1 and missing[0] == 0 and not os.environ.get("TORCHELASTIC_RUN_ID")
        raise NeuronSimError(
            f"{named(missing)} of {len(ranks)} {otherwise} within {timeout.total_seconds():g} s (rank {me.rank}, which "
            f"waited, is process {me.process}); each must be running and call init_process_group, or new_group, as "
            "this one did, and may have told an error of its own"
            + ("; rank 0, which keeps the store, may only be waiting for the others" if waits else "")
        ) from error


def check_agreement(members: Sequence[Member]) -> None:
    """Raise `NeuronSimError` unless all members simulate the same machine under the same rules."""
    for what, variable in (
        ("instance", "NEURON_SIM_INSTANCE"),
        ("logical_nc_config", "NEURON_LOGICAL_NC_CONFIG"),
        ("profile", "NEURON_SIM_PROFILE"),
        ("strictness", "NEURON_SIM_STRICT"),
    ):
        by_value: dict[str, list[int]] = defaultdict(list)
        for member in members:
            by_value[str(getattr(member, what))].append(member.rank)
        if len(by_value) > 1:
            said = "; ".join(f"{value} on {named(ranks)}" for value, ranks in by_value.items())
            raise NeuronSimError(f"the ranks disagree on {variable}: {said}; give all ranks the same")


def check_cores(members: Sequence[Member]) -> None:
    """Raise `NeuronSimError` when two members have one core."""
    holders: dict[tuple[str, int], Member] = {}
    for member in members:
        other = holders.setdefault((member.node, member.core), member)
        if other is not member:
            raise NeuronSimError(
                f"rank {other.rank} (process {other.process}) and rank {member.rank} (process {member.process}) are "
                f"both on core {member.core}; give each its own in NEURON_RT_VISIBLE_CORES, or leave it unset under "
                "torchrun, which numbers the ranks of a machine in LOCAL_RANK"
            )


def check_topology(members: Sequence[Member]) -> None:
    """Raise `NeuronRuleError` when the cores cannot form a group. Groups over several machines are not judged."""
    if len({member.node for member in members}) > 1:
        return
    machine = runtime.machine()
    cores = sorted(member.core for member in members)
    if problem := machine.instance.group_problem(cores, machine.logical_nc_config):
        ranks = ", ".join(str(member.rank) for member in members)
        collectives.apply("topology", "init_process_group", f"{machine.instance.name} (ranks {ranks}): {problem}")


def named(ranks: Sequence[int]) -> str:
    """The ranks in words: "rank 1", "ranks 1, 2"."""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
