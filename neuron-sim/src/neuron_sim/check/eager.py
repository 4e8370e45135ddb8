"""Eager mode, followed without memory: every operator a model's forward would run on the device, and what it breaks.

The questions are those that the device's core asks (csrc/fallback.cpp); a refusal is noted and the trace goes on, so
that one check tells all of them.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from neuron_sim.check import torch_private
from neuron_sim.check.faked import DEVICE
from neuron_sim.compile import facts
from neuron_sim.compile.graphs import Call, is_view, nbytes, operator_name, tensors
from neuron_sim.location import Location, user_location
from neuron_sim.policy import Event, Rulebook

# A call that allocates, fills or copies, and compiles no program.
_MEMORY_ONLY = ("aten::empty", "aten::_to_copy", "aten::copy_", "aten::clone", "aten::new_empty", "aten::lift_fresh")
_C10_NAMES = {
    torch.int64: "Long", torch.int32: "Int", torch.int16: "Short", torch.int8: "Char", torch.uint8: "Byte",
    torch.bool: "Bool", torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16",
    torch.float64: "Float",  # what the device has in its place
}  # fmt: skip


@dataclass
class Eager:
    """What eager mode would do: rules by line with their details, host synchronisations, distinct programs (an
    estimate: one for each operator's shapes, dtypes and static arguments), collectives as (calls, bytes of the larger
    side), and bytes on the core: at its start and at its peak. `outside` are the rules of what runs outside of the
    modules given to `Follower.units`: what stays eager when those are compiled."""

    rules: Counter[Event] = field(default_factory=Counter)
    outside: Counter[Event] = field(default_factory=Counter)
    details: dict[Event, str] = field(default_factory=dict)
    syncs: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    programs: set[Hashable] = field(default_factory=set)
    collectives: dict[str, tuple[int, int]] = field(default_factory=dict)
    held: int = 0
    peak: int = 0


class Follower:
    """Follows the operators of what runs inside `mode`. The device's tensors that were there before are `hold`'s.

    `caller` is the file that runs it: what called that is not the model's code.
    """

    def __init__(self, rulebook: Rulebook, caller: str | None = None) -> None:
        self.rulebook = rulebook
        self.caller = caller
        self.seen = Eager()
        self.mode = torch_private.Watching(self._see)
        self._live: dict[int, int] = {}
        self._inside = 0

    @contextmanager
    def units(self, modules: Iterable[nn.Module] | None) -> Iterator[None]:
        """Tell what runs inside these modules from what runs outside; with None all is inside."""
        handles = []
        self._inside = int(modules is None)
        for module in modules or ():
            handles.append(module.register_forward_pre_hook(lambda *_: self._step(1)))
            handles.append(module.register_forward_hook(lambda *_: self._step(-1), always_call=True))
        try:
            yield
        finally:
            self._inside = 0
            for handle in handles:
                handle.remove()

    def _step(self, by: int) -> None:
        self._inside += by

    def hold(self, tensor: torch.Tensor) -> None:
        """Count a tensor's memory, once, until it is freed."""
        if tensor.device.type != DEVICE:
            return
        place = torch_private.storage_id(tensor)
        if place in self._live:
            return
        size: Any = tensor.untyped_storage().nbytes()
        if not isinstance(size, int):  # it depends on a value, and here are none
            return
        self._live[place] = size
        self.seen.held += size
        self.seen.peak = max(self.seen.peak, self.seen.held)
        torch_private.on_storage_freed(tensor, lambda: self._freed(place))

    def _here(self) -> Location:
        return user_location(within=self.caller)

    def _freed(self, place: int) -> None:
        self.seen.held -= self._live.pop(place, 0)

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        if not isinstance(func, torch._ops.OpOverload) or func.namespace == "prim":
            return run(*args, **kwargs)
        op = operator_name(func)
        given = tuple(tensors((args, kwargs)))
        if op == "aten::equal" and any(t.device.type == DEVICE for t in given):
            # Without memory there are no values; what is compared by identity elsewhere is the same here.
            self.seen.syncs["item"] += 1
            return given[0].shape == given[1].shape
        if op == "_c10d_functional::wait_tensor":
            return args[0]  # as it does on the device; without memory it would make another tensor
        if not op.startswith("c10d::") and self._is_mixed(op, given):
            args, kwargs = _moved((args, kwargs))
            given = tuple(tensors((args, kwargs)))
        result = run(*args, **kwargs)
        made = tuple(tensors(result))
        if any(t.device.type == DEVICE for t in (*given, *made)):
            self._on_device(Call(func, op, args, kwargs, given, made, self._here()))
            for tensor in made:
                self.hold(tensor)
        return result

    def _is_mixed(self, op: str, given: tuple[torch.Tensor, ...]) -> bool:
        kinds = {t.device.type for t in given if t.dim() > 0 or t.device.type == DEVICE}
        if kinds != {DEVICE, "cpu"} or self.rulebook.profile.rules["mixed_devices"].exempts(op) or "copy" in op:
            return False
        place = next(i for i, t in enumerate(given) if t.device.type == "cpu" and t.dim() > 0)
        self._apply("mixed_devices", op, str(place), None)
        return True

    def _on_device(self, call: Call) -> None:
        op, rules = call.op, self.rulebook.profile.rules
        self.seen.operators[op] += 1
        if op.startswith(("_c10d_functional::", "c10d::")):
            self._collective(call)
            return
        for rule, detail in facts.of_call(call, self.rulebook.profile):
            if rule != "int64" or rules["int64"].is_about(op):
                self._apply(rule, op, detail, call)
        falls_back = rules["fallback"].is_about(op)
        if falls_back:
            self._apply("fallback", op, "", call)
        if op == "aten::_local_scalar_dense":
            self.seen.syncs["item"] += 1
        elif facts.dynamic(call, exempt=False, in_graph=False):
            self.seen.syncs["dynamic_shape"] += 1
            if not rules["dynamic_shape"].exempts(op):
                self._apply("dynamic_shape", op, "", call)
        if op.startswith(("aten::_to_copy", "aten::copy_")):
            self._copy(call)
        elif not falls_back and not is_view(call.target) and not op.startswith(_MEMORY_ONLY):
            self.seen.programs.add((op, _key(call.args), _key(tuple(sorted(call.kwargs.items())))))

    def _copy(self, call: Call) -> None:
        source = call.inputs[-1]
        target = call.outputs[0]
        if source.device.type == DEVICE != target.device.type:
            self.seen.syncs["copy_to_host"] += 1
        elif source.device.type == DEVICE and source.dtype != target.dtype:
            if torch.int64 in (source.dtype, target.dtype):
                names = (_C10_NAMES.get(t.dtype, str(t.dtype)) for t in (source, target))
                self.seen.syncs["cast64"] += 1
                self._apply("cast64", "aten::copy_", " to ".join(names), call)
            else:
                self.seen.programs.add(("aten::_copy_from", _key((source, target))))

    def _collective(self, call: Call) -> None:
        larger = max(sum(map(nbytes, call.inputs)), sum(map(nbytes, call.outputs)))
        name = call.op.partition("::")[2].partition(".")[0].rstrip("_")
        calls, size = self.seen.collectives.get(name, (0, 0))
        self.seen.collectives[name] = (calls + 1, size + larger)

    def _apply(self, rule: str, op: str, detail: str, call: Call | None) -> None:
        if self.rulebook.strictness == "off" or self.rulebook.actions[rule] == "allow":
            return
        event = Event(rule, op, call.where if call is not None else self._here())
        self.seen.rules[event] += 1
        if not self._inside:
            self.seen.outside[event] += 1
        self.seen.details.setdefault(event, detail)


def _moved(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value, device=DEVICE) if value.device.type == "cpu" and value.dim() else value
    if isinstance(value, dict):
        return {key: _moved(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_moved(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _key(value: Any) -> Hashable:
    """What a program depends on: shapes and dtypes, sizes, axes and flags; not the numbers that meet a tensor."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(map(str, value.shape)))
    if isinstance(value, list | tuple):
        return tuple(_key(item) for item in value)
    if isinstance(value, float):
        return "number"
    # A size that is a symbol has no hash.
    return value if isinstance(value, bool | int | str | torch.dtype | torch.device | None) else str(value)
