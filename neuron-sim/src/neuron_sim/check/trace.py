"""Follows a part through both modes, without memory, and keeps what was seen."""

import contextlib
import io
import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from neuron_sim.check import faked, torch_private
from neuron_sim.check.compiled import Compiled, compiled_units, follow
from neuron_sim.check.eager import Eager, Follower
from neuron_sim.check.options import Options
from neuron_sim.check.parts import Part
from neuron_sim.policy import Event, Rulebook

Mode = Literal["eager", "compiled", "both"]


@dataclass
class Traced:
    """What was seen of a part. Bytes are the largest rank's; `problem` says why it could not be followed, if so."""

    part: Part
    weights_bytes: int = 0
    inputs: dict[str, str] = field(default_factory=dict)
    eager: Eager | None = None
    compiled: Compiled | None = None
    activations_bytes: int = 0
    problem: str = ""


def trace(part: Part, rulebook: Rulebook, options: Options, mode: Mode) -> Traced:
    """Follow a part's call. A refusal of a rule is noted and passed over; what cannot be followed is a `problem`."""
    dtype: torch.dtype = getattr(torch, options.dtype)
    traced = Traced(part)
    wide = list(faked.buffers_of_dtype(part.model, (torch.float64, torch.complex64, torch.complex128)))
    unprinted = contextlib.redirect_stdout(io.StringIO())  # what the model prints is not the check's
    with unprinted, torch_private.quiet(), warnings.catch_warnings(), torch_private.fake_mode(), torch.no_grad():
        warnings.simplefilter("ignore")
        faked.move(part.model, dtype)
        held = sum(p.numel() * p.dtype.itemsize for p in part.model.parameters())
        own = sum(p.numel() for p in part.model.parameters())
        traced.weights_bytes = held * part.weights // own if own else 0
        units = compiled_units(part.model, options.whole or not part.by_blocks)
        given = _run_eager(traced, rulebook, dtype, units)
        assert traced.eager is not None
        for name, buffer, where in wide:
            rule = "complex" if buffer.dtype.is_complex else "float64"
            if rulebook.actions[rule] != "allow" and rulebook.strictness != "off":
                event = Event(rule, f"the buffer {name}", where)
                traced.eager.rules[event] += 1
                traced.eager.outside[event] += 1
        if given is not None and mode != "eager":
            _run_compiled(traced, rulebook, options, given, units)
    return traced


def _run_eager(traced: Traced, rulebook: Rulebook, dtype: torch.dtype, units: list[nn.Module]) -> dict[str, Any] | None:
    """The inputs that the part runs with, or None. Tries the candidates in turn; the first one's error is kept."""
    part = traced.part
    for make in part.candidates:
        follower = Follower(rulebook, __file__)
        traced.eager = traced.eager or follower.seen
        try:
            given: dict[str, Any] = faked.inputs(make(), dtype)
            for tensor in (*part.model.parameters(), *part.model.buffers(), *_tensors(given)):
                follower.hold(tensor)
            start = follower.seen.held
            with follower.units(None if units == [part.model] else units), follower.mode:
                getattr(part.model, part.method if part.method != "forward" else "__call__")(**given)
        except Exception as error:  # noqa: BLE001  whatever a stranger's forward raises
            traced.problem = traced.problem or _first_line(error)
            continue
        traced.eager, traced.problem, traced.inputs = follower.seen, "", faked.described(given)
        traced.activations_bytes = follower.seen.peak - start + sum(_bytes(t) for t in _tensors(given))
        return given
    return None


def _run_compiled(
    traced: Traced, rulebook: Rulebook, options: Options, given: dict[str, Any], units: list[nn.Module]
) -> None:
    part = traced.part

    def run() -> None:
        getattr(part.model, part.method if part.method != "forward" else "__call__")(**given)

    try:
        traced.compiled = follow(part.model, part.method, run, rulebook, units, options.capacity_bytes)
    except Exception as error:  # noqa: BLE001  Dynamo raises what the model's code and its own passes raise
        traced.problem = f"compiled: {_first_line(error)}"


def _tensors(given: Any) -> list[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        return [given]
    items = given.values() if isinstance(given, dict) else given if isinstance(given, list | tuple) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    found = f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
    return f"its forward decides by values, and here are none ({found})" if _needs_values(error) else found


def _needs_values(error: BaseException) -> bool:
    # A number without a value is a SymInt, which sets and dictionaries do not take.
    return isinstance(error, torch_private.NEEDS_VALUES) or "SymInt" in str(error)
