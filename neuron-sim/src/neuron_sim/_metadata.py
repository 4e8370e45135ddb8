"""The distribution metadata of the stand-in `torch_neuronx`."""

import os
from importlib.metadata import Distribution
from pathlib import Path

VERSION = "0.0.0+sim"

METADATA = f"""\
Metadata-Version: 2.4
Name: torch-neuronx
Version: {VERSION}
Summary: A stand-in by neuron-sim; the real package is not installed.
"""


class StandInDistribution(Distribution):
    """What `importlib.metadata.distribution("torch-neuronx")` returns while no real one is installed."""

    def read_text(self, filename: str) -> str | None:
        return METADATA if filename in ("METADATA", "PKG-INFO") else None

    def locate_file(self, path: "str | os.PathLike[str]") -> Path:
        return Path(__file__).parent / "standin" / path
