"""Answers for the name `torch_neuronx`, module and distribution, when nobody else does.

`neuron_sim.pth` imports this file at every start of the interpreter, so it imports nothing that is not there already.
The finder is appended to `sys.meta_path`, never prepended: a real package of that name is found first and wins.
"""

import os
import sys

TYPE_CHECKING = False  # typing takes milliseconds to import, and this file is read at every start

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from importlib.metadata import Distribution, DistributionFinder
    from types import ModuleType

NAME = "torch_neuronx"


class StandInFinder:
    """Finds the stand-in `torch_neuronx` that lies in this package, unless NEURON_SIM=0."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if fullname != NAME or path is not None or os.environ.get("NEURON_SIM") == "0":
            return None
        if later_finder_has_it(target):
            return None
        from importlib.util import spec_from_file_location

        folder = os.path.join(os.path.dirname(__file__), "standin", NAME)
        return spec_from_file_location(NAME, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder])

    @classmethod
    def find_distributions(cls, context: "DistributionFinder.Context | None" = None) -> "Iterator[Distribution]":
        # Only when asked by name: in listings, nothing was installed under this name.
        name = getattr(context, "name", None)
        if not name or name.lower().replace("-", "_") != NAME or os.environ.get("NEURON_SIM") == "0":
            return
        from neuron_sim._metadata import StandInDistribution

        yield StandInDistribution()


def later_finder_has_it(target: "ModuleType | None") -> bool:
    """Whether a finder that was appended after ours (an editable install's, say) finds a real `torch_neuronx`."""
    mine = sys.meta_path.index(StandInFinder)
    for finder in sys.meta_path[mine + 1 :]:
        find_spec = getattr(finder, "find_spec", None)
        if find_spec is not None and find_spec(NAME, None, target) is not None:
            return True
    return False


def install() -> None:
    """Append the finder, once."""
    if StandInFinder not in sys.meta_path:
        sys.meta_path.append(StandInFinder)


install()
