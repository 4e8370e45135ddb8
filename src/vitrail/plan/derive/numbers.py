"""Integers that know where they came from, so that what counts heads or widths is found and not searched for.

While a forward is recorded, the integer attributes of its modules are replaced by `Number`, and tensors report their
shapes as `Number`. Arithmetic keeps the expression; where one meets a dimension of a tensor, both are noted. A number
that leaves the integers (a scale ``1 / sqrt(heads)``) is noted too: it would be another on a rank.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from .axes import Axis


@dataclass(frozen=True)
class Attribute:
    """An integer that a module, or an object it holds, keeps: ``name`` may be dotted (``processor.heads``)."""

    module: str
    name: str
    index: int | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" + ("" if self.index is None else f"[{self.index}]")


@dataclass(frozen=True)
class Size:
    """The length of a tensor's dimension."""

    axis: Axis


@dataclass(frozen=True)
class Operation:
    symbol: str
    left: Origin
    right: Origin


Origin: TypeAlias = "Attribute | Size | Operation | int"

OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}
_METHODS = {"+": "add", "-": "sub", "*": "mul", "//": "floordiv", "%": "mod"}

_escaped: list[Number] = []
_compared: list[tuple[str, Origin, Origin]] = []
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


class Number(int):
    """An integer with an origin. It is equal to, and hashes as, the plain one."""

    origin: Origin

    @classmethod
    def of(cls, value: int, origin: Origin) -> Number:
        number = cls(value)
        number.origin = origin
        return number

    def __float__(self) -> float:
        _escaped.append(self)
        return int.__float__(self)

    def __truediv__(self, other: Any) -> Any:
        _escaped.append(self)
        return int(self) / other

    def __rtruediv__(self, other: Any) -> Any:
        _escaped.append(self)
        return other / int(self)

    def __pow__(self, other: Any, modulo: Any = None) -> Any:
        _escaped.append(self)
        return int(self) ** other

    def _compare(self, symbol: str, other: Any) -> Any:
        if isinstance(other, int) and not isinstance(other, bool):
            _compared.append((symbol, self.origin, other.origin if isinstance(other, Number) else int(other)))
        return COMPARISONS[symbol](int(self), int(other)) if isinstance(other, int) else NotImplemented

    def __lt__(self, other: Any) -> Any:
        return self._compare("<", other) if isinstance(other, int) else int(self) < other

    def __le__(self, other: Any) -> Any:
        return self._compare("<=", other) if isinstance(other, int) else int(self) <= other

    def __gt__(self, other: Any) -> Any:
        return self._compare(">", other) if isinstance(other, int) else int(self) > other

    def __ge__(self, other: Any) -> Any:
        return self._compare(">=", other) if isinstance(other, int) else int(self) >= other

    def __eq__(self, other: object) -> Any:
        return self._compare("==", other) if isinstance(other, int) else int(self) == other

    def __ne__(self, other: object) -> Any:
        return self._compare("!=", other) if isinstance(other, int) else int(self) != other

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __deepcopy__(self, memo: Any) -> Number:
        return self

    def __reduce__(self) -> Any:
        return int, (int(self),)


def _arithmetic(symbol: str, reverse: bool) -> Callable[[Number, Any], Any]:
    function = OPERATORS[symbol]

    def method(self: Number, other: Any) -> Any:
        if isinstance(other, bool) or not isinstance(other, int):
            if isinstance(other, float):
                _escaped.append(self)
                return function(other, int(self)) if reverse else function(int(self), other)  # type: ignore[arg-type]
            return NotImplemented
        mine, theirs = self.origin, other.origin if isinstance(other, Number) else int(other)
        left, right = (theirs, mine) if reverse else (mine, theirs)
        values = (int(other), int(self)) if reverse else (int(self), int(other))
        return Number.of(function(*values), Operation(symbol, left, right))

    return method


for _symbol, _name in _METHODS.items():
    setattr(Number, f"__{_name}__", _arithmetic(_symbol, False))
    setattr(Number, f"__r{_name}__", _arithmetic(_symbol, True))


def origin_of(value: Any) -> Origin:
    return value.origin if isinstance(value, Number) else int(value)


def take_escaped() -> list[Number]:
    """The numbers that became something else than integers since the last call."""
    taken = list(_escaped)
    _escaped.clear()
    return taken


def take_compared() -> list[tuple[str, Origin, Origin]]:
    """The comparisons of numbers since the last call: a forward may go another way on a rank."""
    taken = list(dict.fromkeys(_compared))
    _compared.clear()
    return taken


def attributes_in(origin: Origin) -> Iterator[Attribute]:
    if isinstance(origin, Attribute):
        yield origin
    elif isinstance(origin, Operation):
        yield from attributes_in(origin.left)
        yield from attributes_in(origin.right)


def sizes_in(origin: Origin) -> Iterator[Axis]:
    if isinstance(origin, Size):
        yield origin.axis
    elif isinstance(origin, Operation):
        yield from sizes_in(origin.left)
        yield from sizes_in(origin.right)


def evaluate(origin: Origin, attribute: Callable[[Attribute], int], size: Callable[[Axis], int]) -> int:
    """The number an origin comes to. Raises ``ZeroDivisionError`` where it divides by nothing."""
    if isinstance(origin, Attribute):
        return attribute(origin)
    if isinstance(origin, Size):
        return size(origin.axis)
    if isinstance(origin, Operation):
        return OPERATORS[origin.symbol](evaluate(origin.left, attribute, size), evaluate(origin.right, attribute, size))
    return origin


def holders(module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """The dictionaries that hold a module's own attributes: its own, and those of plain objects it keeps."""
    yield "", vars(module)
    for name, value in list(vars(module).items()):
        kind = type(value)
        if (
            isinstance(value, (nn.Module, torch.Tensor))
            or not hasattr(value, "__dict__")
            or kind.__module__.split(".")[0] in ("builtins", "torch", "collections", "functools")
            or isinstance(value, (type, dict))
            or (callable(value) and kind.__name__ in ("function", "method", "builtin_function_or_method", "partial"))
            or name.startswith("_")
        ):
            continue
        yield f"{name}.", vars(value)


def is_builtin(module: nn.Module) -> bool:
    """Modules of torch itself are run by rules that know them; their integers need no tracing."""
    return type(module).__module__.startswith("torch.nn") and not isinstance(
        module, (nn.MultiheadAttention, nn.Unflatten)
    )


def _plain(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@contextmanager
def traced_attributes(model: nn.Module) -> Iterator[dict[Attribute, int]]:
    """Replace the integer attributes of all modules, and put them back afterwards. Yields their values."""
    undo: list[tuple[dict[str, Any], str, Any]] = []
    values: dict[Attribute, int] = {}
    seen: set[int] = set()
    try:
        for path, module in model.named_modules():
            if is_builtin(module):
                continue
            for prefix, holder in holders(module):
                if id(holder) in seen:  # an object several modules share: the first one's name serves
                    continue
                seen.add(id(holder))
                for name, value in list(holder.items()):
                    if name.startswith("_"):
                        continue
                    made: Any = None
                    if _plain(value) and type(value) is int:
                        origin = Attribute(path, prefix + name)
                        values[origin] = value
                        made = Number.of(value, origin)
                    elif type(value) in (list, tuple) and value and all(type(item) is int for item in value):
                        origins = [Attribute(path, prefix + name, index) for index in range(len(value))]
                        values.update(zip(origins, value, strict=True))
                        made = type(value)(Number.of(item, origin) for item, origin in zip(value, origins, strict=True))
                    if made is not None:
                        undo.append((holder, name, value))
                        holder[name] = made
        take_escaped()
        take_compared()
        yield values
    finally:
        for holder, name, value in undo:
            holder[name] = value
        take_escaped()
