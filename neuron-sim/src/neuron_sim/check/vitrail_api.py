"""What the check uses of vitrail, in one place. neuron-sim works without vitrail; the check does not, and says so.

vitrail finds a model by name, makes it without weights, has plans and probes (inputs written as data).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_sim import location
from neuron_sim.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import nn


def load() -> Any:
    """The package. Raises `ConfigurationError` when it is not installed. Its lines are told as nobody's."""
    try:
        import diffusers  # noqa: F401
        import vitrail
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"neuron-sim check makes models with vitrail and diffusers, and {error.name} is not installed: "
            "pip install vitrail"
        ) from None
    location.pass_over(os.path.dirname(vitrail.__file__))
    return vitrail


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """vitrail's refusals become `ConfigurationError`: what was found and what to do, in one line."""
    from vitrail.errors import VitrailError

    try:
        yield
    except VitrailError as error:
        hint = f" ({error.hint})" if error.hint else ""
        raise ConfigurationError(" ".join(f"{error.message}{hint}".split())) from error


def find(target: str, config: Path | None) -> list[Any]:
    """The models that are sharded, without weights. Raises `ConfigurationError` for a target that names none."""
    from vitrail.run.subject import find as found

    with told_in_one_line():
        subjects: list[Any] = found(target, config)[0]
    return subjects


def skeleton(build: Any) -> "nn.Module":
    """A model with its parameters on meta."""
    from vitrail.plan.skeleton import skeleton as made

    model: nn.Module = made(build)
    return model


def shard(model: "nn.Module", inputs: Any, degree: int) -> tuple[int, str]:
    """Make a model without weights what rank 0 of `degree` holds. Returns the parameters of the largest rank, and
    where the plan came from."""
    from vitrail.apply.install import install, slice_tensors
    from vitrail.plan import resolve
    from vitrail.run.planning import plan_of

    with told_in_one_line():
        resolved = resolve(plan_of(model, inputs), model, degree)
        largest = max(resolved.parameter_numel(model, rank) for rank in range(degree))
        slice_tensors(model, resolved.shards, 0)
        install(model, resolved, 0, "tp")
    return largest, resolved.plan.source


def probes(model: "nn.Module") -> tuple[Any, ...]:
    """Inputs written as data, for a class of diffusers."""
    from vitrail.plan.catalog import is_known
    from vitrail.plan.catalog import probes as found

    return tuple(found(type(model).__name__)) if is_known(type(model)) else ()


def make_inputs(specification: Any, names: dict[str, Any]) -> dict[str, Any]:
    """Tensors on meta from a probe's specification."""
    from vitrail.plan.probe import inputs_for

    return inputs_for(specification, names, device="meta")


def guessed_inputs(model: "nn.Module") -> dict[str, Any]:
    """Small inputs that a model's forward takes, found by trying."""
    from vitrail.plan.guess import guess_inputs

    with told_in_one_line():
        return guess_inputs(model)


def size_multiple(folder: Path) -> int | None:
    """What a pipeline's height and width must be multiples of, where its configurations tell."""
    from vitrail.run.folder import read_index
    from vitrail.run.folder import size_multiple as multiple

    with told_in_one_line():
        return multiple(read_index(folder), folder)
