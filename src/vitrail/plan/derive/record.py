"""Recording a forward on meta tensors: every operation by its rule, every module by its name.

Uses ``TorchDispatchMode``, which is private to PyTorch (tested: 2.13.0), below; what Python code calls is seen by a
``TorchFunctionMode`` (`.calls`), which is public.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..skeleton import tied_parameters
from . import rules_index as rules_index  # registers its rules
from . import rules_math
from .axes import Axis, Conflict, block, equate, find, fresh
from .numbers import Attribute, Number, Origin, take_compared, take_escaped
from .rules import RULES, Axes, Call, anew

_CARRIES_SOURCE = {
    "t", "transpose", "permute", "view", "_unsafe_view", "detach", "alias", "_to_copy", "unsqueeze", "squeeze",
    "clone", "slice", "expand", "select", "split", "split_with_sizes", "chunk", "unbind",
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A tensor a module owns. ``kind`` says how it is held."""

    name: str
    tensor: torch.Tensor
    axes: Axes
    kind: Literal["parameter", "buffer", "attribute"]


@dataclass(frozen=True)
class Contraction:
    """A sum over ``axis`` in ``module``, of an activation with ``weight`` (or of two activations).

    ``numel`` counts the output's elements, ``out`` are its axes. ``value`` numbers the activation's value: in one
    ``call`` of the model equal numbers are equal values.
    """

    module: str
    axis: Axis
    weight: str | None
    out: Axes
    numel: int
    call: str = ""
    value: int = 0


@dataclass(frozen=True)
class Reduction:
    module: str
    kind: str
    axes: Axes


@dataclass(frozen=True)
class Crossing:
    """A tensor without history in the weights, as it enters ``module``: it can be cut there.

    ``path`` leads to it: the argument's name, then indices or keys. ``outer`` and ``inner`` are its axes outside
    and inside.
    """

    module: str
    path: tuple[str | int, ...]
    outer: Axes
    inner: Axes


@dataclass(frozen=True)
class Meeting:
    """A number that a call in ``module`` compares with the length of ``axis``."""

    module: str
    call: str
    number: Origin
    axis: Axis


@dataclass(frozen=True)
class Attention:
    """Attention in ``module`` over ``heads`` query heads of ``width``, which share the ``shared`` heads of keys."""

    module: str
    heads: Axis
    shared: Axis
    width: int


@dataclass(frozen=True)
class Known:
    axes: Axes
    tensor: torch.Tensor  # kept, so that its id is not given to another
    pure: bool


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is known after any number of forwards of ``model``, whose parameters are on meta.

    ``borrowed`` are parameters of another model, by name, with what to say of them: they stay as they are.
    """

    def __init__(self, model: nn.Module, borrowed: Mapping[str, str] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self.sources: dict[str, Source] = {}
        self.contractions: list[Contraction] = []
        self.reductions: list[Reduction] = []
        self.crossings: list[Crossing] = []
        self.meetings: list[Meeting] = []
        self.escapes: list[tuple[str, Origin]] = []
        self.comparisons: list[tuple[str, str, Origin, Origin]] = []
        self.attributes: dict[Attribute, int] = {}
        self.attention: list[Attention] = []
        self.depthwise_modules: set[str] = set()
        self.ran: Counter[str] = Counter()
        self.entered: dict[str, list[tuple[tuple[Any, ...], Mapping[str, Any]]]] = defaultdict(list)
        self.users: dict[str, set[str]] = defaultdict(set)
        self.uses: Counter[tuple[str, str]] = Counter()
        self.unknown: Counter[str] = Counter()
        self.norm_inputs: dict[str, Axes] = {}
        self.call = ""
        self._values: dict[int, int] = {}
        self._numbers: dict[object, int] = {}
        self._written: set[int] = set()
        self._known: dict[int, Known] = {}
        self._source_of: dict[int, str] = {}
        self._scope: list[tuple[str, list[tuple[torch.Tensor, Known]]]] = [("", [])]
        # Why a parameter stays as it is, whatever is done with it.
        self.kept = {
            **{name: f"it is tied to {other}" for name, other in tied_parameters(model).items()},
            **(borrowed or {}),
        }
        self._register_sources()

    # -- what is known of tensors

    def _register_sources(self) -> None:
        def add(name: str, tensor: torch.Tensor, kind: Literal["parameter", "buffer", "attribute"]) -> None:
            if id(tensor) in self._known:
                return
            axes = [fresh(size, self.kept.get(name)) for size in tensor.shape]
            self.sources[name] = Source(name, tensor, axes, kind)
            self._source_of[id(tensor)] = name
            self._known[id(tensor)] = Known(axes, tensor, kind != "parameter")

        for name, parameter in self.model.named_parameters():
            add(name, parameter, "parameter")
        for name, buffer in self.model.named_buffers():
            add(name, buffer, "buffer")
        for path, module in self.modules.items():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    add(f"{path}.{name}" if path else name, value, "attribute")

    def axes(self, tensor: torch.Tensor) -> Axes:
        if (known := self._known.get(id(tensor))) is None:
            self.learn(tensor, anew(tensor, "a tensor made outside the forward"), True)
            known = self._known[id(tensor)]
        return known.axes

    def learn(self, tensor: torch.Tensor, axes: Axes, pure: bool) -> None:
        self._known[id(tensor)] = Known(axes, tensor, pure)

    def is_pure(self, tensor: torch.Tensor) -> bool:
        known = self._known.get(id(tensor))
        return known is None or known.pure

    def source_name(self, name: str) -> str:
        """The name that a parameter has among the sources: one that several modules hold has the first one's."""
        owner, _, attribute = name.rpartition(".")
        return self._source_of.get(id(getattr(self.modules[owner], attribute)), name)

    # -- which values are equal

    def value_of(self, tensor: torch.Tensor) -> int:
        """A number for the tensor's value. What was computed alike from equal values has the same."""
        if id(tensor) not in self._values or tensor.untyped_storage()._cdata in self._written:
            self._values[id(tensor)] = self._number(object())
        return self._values[id(tensor)]

    def _number(self, key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _give_value(self, call: Call, output: torch.Tensor, index: int) -> None:
        fresh_key: object = object()
        if any(output is tensor for tensor in call.inputs):  # written in place: views of it are no longer known
            self._written.add(output.untyped_storage()._cdata)
        elif call.inputs and torch.Tag.nondeterministic_seeded not in call.tags:
            given = tuple(self.value_of(tensor) for tensor in call.inputs)
            fresh_key = (call.name, index, given, self._spelled(call.args), self._spelled(call.kwargs))
        self._values[id(output)] = self._number(fresh_key)

    def _spelled(self, value: Any) -> object:
        if isinstance(value, torch.Tensor):
            return ("value", self.value_of(value))
        if isinstance(value, dict):
            return tuple((key, self._spelled(item)) for key, item in sorted(value.items()))
        if isinstance(value, (tuple, list)):
            return tuple(self._spelled(item) for item in value)
        return repr(value)

    # -- events the rules report

    @property
    def where(self) -> str:
        return self._scope[-1][0]

    def contraction(self, call: Call, axis: Axis, operands: Sequence[torch.Tensor], out: Axes) -> None:
        weight = next((self._source_of[id(tensor)] for tensor in operands if id(tensor) in self._source_of), None)
        value = self.value_of(operands[0])
        self.contractions.append(Contraction(self.where, axis, weight, out, call.outputs[0].numel(), self.call, value))

    def reduction(self, kind: str, axes: Axes) -> None:
        self.reductions.append(Reduction(self.where, kind, axes))

    def depthwise(self) -> None:
        self.depthwise_modules.add(self.where)

    def heads(self, heads: Axis, shared: Axis, width: int) -> None:
        self.attention.append(Attention(self.where, heads, shared, width))

    def meeting(self, call: str, number: Origin, axis: Axis) -> None:
        self.meetings.append(Meeting(self.where, call, number, axis))

    # -- modules

    def enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.ran[path] += 1
        self.entered[path].append((args, kwargs))
        changed: list[tuple[torch.Tensor, Known]] = []
        for position, tensor in tensors_in_call(module, args, kwargs):
            if not path:
                for axis in self.axes(tensor):
                    block(axis, "an input of the model")
                self.learn(tensor, self.axes(tensor), True)
            elif self.is_pure(tensor) and tensor.dim() and id(tensor) not in self._source_of:
                outer = self.axes(tensor)
                known = self._known[id(tensor)]
                inner = [fresh(size) for size in tensor.shape]
                changed.append((tensor, known))
                self.learn(tensor, inner, True)
                self.crossings.append(Crossing(path, position, outer, inner))
        first = next((tensor for _, tensor in tensors_in_call(module, args, kwargs)), None)
        if first is not None and not any(module.children()):
            self.norm_inputs.setdefault(path, self.axes(first))
        self._scope.append((path, changed))

    def leave(self, path: str) -> None:
        self._note_escapes()
        while len(self._scope) > 1:
            left, changed = self._scope.pop()
            for tensor, known in changed:
                self._known[id(tensor)] = known
            if left == path:
                return

    def _note_escapes(self) -> None:
        self.escapes.extend((self.where, number.origin) for number in take_escaped())
        self.comparisons.extend((self.where, *compared) for compared in take_compared())

    def finish(self, output: Any) -> None:
        """The model's outputs are whole: what reaches them is not cut."""
        self._note_escapes()
        for tensor in tensors_in(output):
            for axis in self.axes(tensor):
                block(axis, "an output of the model")

    # -- operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = list(tensors_in((args, list(kwargs.values()))))
        result = func(*_runnable(func, args, inputs), **_placed(kwargs, inputs))
        outputs = [item for item in (result if isinstance(result, (tuple, list)) else [result]) if _is_tensor(item)]
        if outputs:
            name = func._schema.name.split("::")[1] if hasattr(func, "_schema") else str(func)
            self.apply(Call(self, name, args, kwargs, inputs, outputs, getattr(func, "tags", ())))
        return result

    def apply(self, call: Call, given: Callable[[Call], list[Axes] | None] | None = None) -> None:
        """Work out the axes of a call's outputs by its rule, or by the one ``given``."""
        chosen = given or RULES.get(call.name)
        if chosen is None and torch.Tag.pointwise in call.tags:
            chosen = rules_math.pointwise
        axes: list[Axes] | None = None
        why = f"the operation {call.name} in {self.where or 'the model'} has no rule"
        if chosen is not None:
            try:
                axes = chosen(call)
            except Conflict as conflict:
                why = f"{call.name} in {self.where or 'the model'}: {conflict}"
        if axes is None:
            self.unknown[call.name] += 1
            for tensor in call.inputs:
                for axis in self.axes(tensor):
                    block(axis, why)
            axes = [anew(output, why) for output in call.outputs]
        for tensor in call.inputs:
            if id(tensor) in self._source_of:
                self.users[self._source_of[id(tensor)]].add(self.where)
                self.uses[self._source_of[id(tensor)], self.where] += 1
        pure = all(self.is_pure(tensor) for tensor in call.inputs)
        carried = self._source_of.get(id(call.inputs[0])) if len(call.inputs) == 1 else None
        for index, (output, own) in enumerate(zip(call.outputs, axes, strict=True)):
            self._give_value(call, output, index)
            assert [find(axis).size for axis in own] == list(output.shape), (call.name, own, output.shape)
            if id(output) in self._known and any(output is tensor for tensor in call.inputs):
                for first, second in zip(self.axes(output), own, strict=True):
                    equate(first, second, call.name)
                self.learn(output, self.axes(output), pure and self.is_pure(output))
            else:
                self.learn(output, own, pure)
                if carried is not None and call.name in _CARRIES_SOURCE:
                    self._source_of[id(output)] = carried


def _runnable(func: Any, args: tuple[Any, ...], inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """The arguments on one device. Inputs are real, so that a forward may read lengths and masks; beside weights they
    lose their values, after masks became the indices they stand for.
    """
    if not any(tensor.is_meta for tensor in inputs) or all(tensor.is_meta for tensor in inputs):
        return args
    if str(func).startswith(("aten.index.", "aten.index_put")):
        indices: list[Any] = []
        for item in args[1]:
            is_mask = isinstance(item, torch.Tensor) and item.dtype == torch.bool and not item.is_meta
            indices += item.nonzero().unbind(1) if is_mask else [item]
        args = (args[0], indices, *args[2:])
    return _on_meta(args)  # type: ignore[no-any-return]


def _placed(kwargs: dict[str, Any], inputs: Sequence[torch.Tensor]) -> dict[str, Any]:
    """What does not come from weights stays real; what does, on meta."""
    on_meta = any(tensor.is_meta for tensor in inputs)
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("meta" if on_meta else "cpu")}
    return _on_meta(kwargs) if on_meta else kwargs


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (
            value
            if value.is_meta
            else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        )
    if isinstance(value, dict):
        return {key: _on_meta(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_on_meta(item) for item in value)
    return value


def _is_tensor(item: Any) -> bool:
    return isinstance(item, torch.Tensor)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists, dicts and output objects.

    A cache of keys and values (transformers) is a rank's own: it goes from one step to the next, with its heads alone.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif any(base.__module__ == "transformers.cache_utils" for base in type(value).__mro__):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and not callable(value):
        for item in vars(value).values():
            yield from tensors_in(item)


def tensors_in_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[str | int, ...], torch.Tensor]]:
    """The tensors of a module's call with the way to each: the argument's name, then indices or keys."""
    names = parameter_names(module)
    for index, value in enumerate(args):
        yield from _walk(value, (names[index] if index < len(names) else index,))
    for name, value in kwargs.items():
        yield from _walk(value, (name,))


def parameter_names(module: nn.Module) -> list[str]:
    """The positional parameters of a module's forward."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, item in inspect.signature(module.forward).parameters.items() if item.kind in kinds]


def _walk(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(item, (*path, key))
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _walk(item, (*path, index))


__all__ = [
    "Contraction", "Crossing", "Meeting", "Number", "Recorder", "Reduction", "Source", "parameter_names", "tensors_in",
]  # fmt: skip
