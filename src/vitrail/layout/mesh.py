"""One axis of a device mesh, as seen from this rank."""

from __future__ import annotations

from dataclasses import dataclass

AXIS = "tp"
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl", "neuron": "neuron"}  # process group by device


@dataclass(frozen=True)
class MeshAxis:
    """``index`` is this rank's place along the axis, among ``degree``: never the global rank.

    ``ranks`` are the global ranks along the axis, in axis order; ``group`` is the name of their process group.
    """

    name: str
    degree: int
    index: int
    ranks: tuple[int, ...]
    group: str
    device_type: str

    def __post_init__(self) -> None:
        if len(self.ranks) != self.degree or not 0 <= self.index < self.degree:
            raise ValueError(f"mesh axis {self.name!r}: index {self.index} among ranks {self.ranks}")
