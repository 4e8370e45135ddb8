"""Before a collective runs, its ranks compare what they are about to do.

On the device, ranks that disagree hang; the host's backend aborts the process when sizes differ. Here they learn it
from one small exchange first, which also makes a collective start only when all its ranks have come to it.
"""

import time
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroupGloo

from neuron_sim.collectives import Collective
from neuron_sim.errors import NeuronSimError
from neuron_sim.location import user_location
from neuron_sim.meeting import named

SIZE = 256  # bytes each rank tells; a longer file name loses its beginning
PATIENCE = 2.0  # seconds in which the ranks that wait make themselves known to each other after a time-out


# What gloo says when the process at the other end is gone.
_GONE = ("closed by peer", "reset by peer", "broken pipe")


class Agreement:
    """Compares the collectives of one group: `ranks` are the global ranks of its members, in the group's order."""

    def __init__(self, host: ProcessGroupGloo, store: Store, ranks: Sequence[int], me: int) -> None:
        self._host = host
        self._store = store
        self._ranks = tuple(ranks)
        self._me = me
        self._number = 0

    def check(self, collective: Collective) -> None:
        """Raise `NeuronSimError`, on every rank, unless all ranks are about to run this collective.

        Raises it too, naming the ranks that have not come, when the group's time-out ends first.
        """
        if len(self._ranks) == 1:
            return
        self._number += 1
        what, where = str(collective).encode(), str(user_location()).encode()
        mine = bytearray(SIZE)
        text = what + b"\0" + where[-(SIZE - len(what) - 1) :]
        mine[: len(text)] = text
        # Under inference mode or a torch-function mode of the caller's these must stay plain tensors.
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            every = torch.empty(len(self._ranks) * SIZE, dtype=torch.uint8)
            try:
                mine_there = torch.frombuffer(mine, dtype=torch.uint8)
                self._host._allgather_base(every, mine_there).wait()  # type: ignore[attr-defined]  # missing in the stubs
            except RuntimeError as error:
                text_of_gloo = str(error).lower()
                if any(words in text_of_gloo for words in _GONE):
                    raise NeuronSimError(
                        f"{collective} (collective {self._number} of its group) failed on rank {self._me}: a rank of "
                        f"{', '.join(map(str, self._ranks))} ended before it came to it, and may have told an error"
                    ) from error
                if "timed out" not in text_of_gloo:
                    raise
                raise NeuronSimError(self._who_is_missing(collective)) from error
            said = bytes(every.tolist())
        texts = [said[start : start + SIZE].rstrip(b"\0").split(b"\0", 1) for start in range(0, len(said), SIZE)]
        if len({text[0] for text in texts}) > 1:
            raise NeuronSimError(self._disagreement(texts))

    def _disagreement(self, texts: Sequence[Sequence[bytes]]) -> str:
        by_call: dict[str, list[int]] = defaultdict(list)
        for rank, (what, where) in zip(self._ranks, texts, strict=True):
            by_call[f"{what.decode(errors='replace')} at {where.decode(errors='replace')}"].append(rank)
        said = "; ".join(f"{named(ranks)}: {call}" for call, ranks in by_call.items())
        return (
            f"the ranks disagree on collective {self._number} of their group: {said}. All ranks must call the same "
            "collectives in the same order, with the same sizes, dtype, reduction and root; on the device this hangs"
        )

    def _who_is_missing(self, collective: Collective) -> str:
        prefix = f"neuron_sim/waits/{self._number}"
        self._store.set(f"{prefix}/{self._me}", "1")
        deadline = time.monotonic() + PATIENCE
        missing = self._ranks
        while missing and time.monotonic() < deadline:
            missing = tuple(rank for rank in missing if not self._store.check([f"{prefix}/{rank}"]))
            time.sleep(0.05)
        who = named(missing) if missing else "none of the ranks any more"
        return (
            f"{collective} (collective {self._number} of its group) timed out: {who} did not come to it; rank "
            f"{self._me} waited. It has ended, is held up elsewhere, or left out a collective that the others run"
        )
