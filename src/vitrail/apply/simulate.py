"""All ranks in one process, as threads, with real reductions: a plan is tried so before it is used."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..plan import ResolvedPlan
from .install import install, slice_tensors
from .wide import Wide

TIMEOUT = 300.0


@dataclass
class Ranks:
    """The ranks of one simulated group, which meet at every collective.

    ``dropped`` is the number of a collective of the run to leave out: each rank then goes on with its own part.
    ``effect`` says whether that was another value, on any rank.
    """

    degree: int
    dropped: int | None = None
    calls: list[tuple[str, nn.Module, int]] = field(default_factory=list)
    effect: bool = False

    def __post_init__(self) -> None:
        self._barrier = threading.Barrier(self.degree)
        self._slots: list[tuple[str, torch.Tensor] | None] = [None] * self.degree
        self._modules: list[nn.Module | None] = [None] * self.degree

    def exchange(self, rank: int, what: str, tensor: torch.Tensor, module: nn.Module) -> tuple[list[torch.Tensor], int]:
        """Every rank's tensor, and the collective's number. Raises ``ValueError`` where the ranks disagree."""
        self._slots[rank] = (what, tensor)
        self._barrier.wait(TIMEOUT)
        slots = [slot for slot in self._slots if slot is not None]
        number = len(self.calls)
        kinds = {(kind, tuple(item.shape), item.dtype) for kind, item in slots}
        self._barrier.wait(TIMEOUT)
        if len(kinds) > 1:
            raise ValueError(f"the ranks meet in different collectives: {sorted(map(str, kinds))}")
        if rank == 0:
            self.calls.append((what, module, tensor.numel()))
        self._barrier.wait(TIMEOUT)
        return [item for _, item in slots], number

    @property
    def broken(self) -> bool:
        """Whether a rank gave up: the group is of no more use."""
        return self._barrier.broken

    def abort(self) -> None:
        self._barrier.abort()


@dataclass(frozen=True)
class SimulatedRank:
    """One rank's view of the group: what its modules hold."""

    ranks: Ranks
    rank: int

    def all_reduce(self, partial: torch.Tensor, module: nn.Module) -> torch.Tensor:
        parts, number = self.ranks.exchange(self.rank, "all_reduce", partial, module)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return self._given(number, total, partial.clone())

    def all_gather(self, local: torch.Tensor, module: nn.Module) -> torch.Tensor:
        parts, number = self.ranks.exchange(self.rank, "all_gather", local, module)
        flat = torch.cat([part.reshape(-1) for part in parts])
        return self._given(number, flat, torch.cat([local.reshape(-1)] * len(parts)))

    def _given(self, number: int, right: torch.Tensor, without: torch.Tensor) -> torch.Tensor:
        if number != self.ranks.dropped:
            return right
        if not torch.equal(right, without):
            self.ranks.effect = True
        return without

    def __deepcopy__(self, memo: Any) -> SimulatedRank:
        return self


def shard_all(model: nn.Module, resolved: ResolvedPlan, ranks: Ranks) -> list[nn.Module]:
    """A sharded copy of ``model`` for every rank."""
    copies = []
    for rank in range(resolved.degree):
        local = copy.deepcopy(model)
        slice_tensors(local, resolved.shards, rank)
        install(local, resolved, rank, SimulatedRank(ranks, rank))
        copies.append(local)
    return copies


def run_all(models: Sequence[nn.Module], ranks: Ranks, arguments: Callable[[], Mapping[str, Any]]) -> list[Any]:
    """Every rank's output. Raises the first error that a rank raised of itself."""
    results: list[Any] = [None] * len(models)
    given = [arguments() for _ in models]  # here: making them may parse, which CPython 3.11 cannot do in threads
    errors: list[BaseException | None] = [None] * len(models)

    def work(rank: int) -> None:
        try:
            with torch.no_grad(), Wide():
                results[rank] = models[rank](**given[rank])
        except BaseException as error:  # noqa: BLE001  raised again in the caller
            errors[rank] = error
            ranks.abort()

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}") for rank in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own = [error for error in errors if error is not None and not isinstance(error, threading.BrokenBarrierError)]
    if own:
        raise own[0]
    if any(errors):
        raise TimeoutError("the simulated ranks did not all reach the same collective")
    return results
