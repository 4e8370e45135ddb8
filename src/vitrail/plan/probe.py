"""Probes: a small configuration of a model class and inputs for it, written as data, from which tensors are made.

A probe's file is JSON; docs/reference/probes.md describes it. Shapes are expressions over the configuration and the
probe's own sizes, so that the same text also makes inputs for a published configuration.
"""

from __future__ import annotations

import ast
import importlib
import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import PlanError

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"sum": sum, "len": len, "max": max}
_TENSOR = re.compile(r"(float|uniform|int|bool|true|ones|zeros|padded|left)\[(.*)\](?:<(.+))?", re.DOTALL)
_KEYS = {"model", "note", "probes"}
_PROBE_KEYS = {"name", "config", "sizes", "inputs", "why", "borrows"}


@dataclass(frozen=True)
class Borrowed:
    """Another model, whose modules the probe's model takes over by its class's method ``by`` before it can run."""

    model: str
    config: Mapping[str, Any]
    by: str


@dataclass(frozen=True)
class Probe:
    """One structural configuration of ``model`` and the ways it can be called.

    ``sizes`` are at least two assignments of names to integers (batch, lengths); ``inputs`` are keyword arguments by
    the name of the variant, as specifications that `inputs_for` turns into tensors.
    """

    model: str
    name: str
    config: Mapping[str, Any]
    sizes: tuple[Mapping[str, int], ...]
    inputs: Mapping[str, Mapping[str, Any]]
    borrows: Borrowed | None = None

    def make(
        self,
        variant: str,
        size: int = 0,
        *,
        config: Mapping[str, Any] | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> dict[str, Any]:
        """The keyword arguments of one call, with random values drawn from ``seed``."""
        names = {**(self.config if config is None else config), **self.sizes[size]}
        return inputs_for(self.inputs[variant], names, device=device, dtype=dtype, seed=seed)


def read_probes(text: str, source: str) -> tuple[Probe, ...]:
    """The probes of one file. Raises `PlanError` that names the key at fault."""
    where = f"the probe file ({source})"
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"{where} is not JSON: {error}") from None
    if not isinstance(document, dict) or set(document) - _KEYS or not isinstance(document.get("probes"), list):
        raise PlanError(f"{where} must be an object with the keys {sorted(_KEYS)}; 'probes' is a list")
    probes = []
    for index, entry in enumerate(document["probes"]):
        if not isinstance(entry, dict) or set(entry) - _PROBE_KEYS or not {"config", "inputs"} <= set(entry):
            raise PlanError(f"{where}: probe {index} must have 'config' and 'inputs', and may have 'name' and 'sizes'")
        sizes = tuple(entry.get("sizes", ({"batch": 2}, {"batch": 1})))
        borrows = entry.get("borrows")
        if borrows is not None and set(borrows) != {"model", "config", "by"}:
            raise PlanError(f"{where}: probe {index} 'borrows' needs 'model', 'config' and 'by'")
        probes.append(
            Probe(
                document.get("model", ""),
                entry.get("name", "default"),
                entry["config"],
                sizes,
                entry["inputs"],
                Borrowed(**borrows) if borrows is not None else None,
            )
        )
    return tuple(probes)


def inputs_for(
    specification: Mapping[str, Any],
    names: Mapping[str, Any],
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, Any]:
    """Turn specifications into values: the same for the same seed, whatever the device (meta tensors have none)."""
    maker = _Maker(names, device, dtype, torch.Generator().manual_seed(seed))
    return {key: maker.value(item) for key, item in specification.items()}


@dataclass(frozen=True)
class _Maker:
    names: Mapping[str, Any]
    device: str
    dtype: torch.dtype
    generator: torch.Generator

    def value(self, item: Any) -> Any:
        if isinstance(item, str):
            if item.startswith("="):
                return evaluate(item[1:], self.names)
            match = _TENSOR.fullmatch(item)
            return self._tensor(*match.groups()) if match else item
        if isinstance(item, list):
            return [self.value(element) for element in item]
        if isinstance(item, dict):
            if set(item) == {"tuple"}:
                return tuple(self.value(element) for element in item["tuple"])
            if set(item) == {"repeat", "times"}:
                return [self.value(item["repeat"]) for _ in range(evaluate(str(item["times"]), self.names))]
            if set(item) == {"pairs"}:
                return {self.value(key): self.value(element) for key, element in item["pairs"]}
            if set(item) == {"object", "args"}:
                module, _, name = item["object"].partition(":")
                made = getattr(importlib.import_module(module), name)
                return made(*[self.value(argument) for argument in item["args"]])
            if set(item) == {"values", "dtype"}:
                kind = getattr(torch, item["dtype"])
                values = self.value(item["values"])
                return torch.tensor(values, dtype=self.dtype if kind.is_floating_point else kind, device=self.device)
            return {key: self.value(element) for key, element in item.items()}
        return item

    def _tensor(self, kind: str, shape_text: str, limit: str | None) -> torch.Tensor:
        shape = [evaluate(part, self.names) for part in _split(shape_text)]
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise PlanError(f"the shape [{shape_text}] comes to {shape}: this configuration has no such input")
        on_meta = self.device == "meta"
        place: dict[str, Any] = {"device": "meta"} if on_meta else {"generator": self.generator}
        if kind == "float":
            tensor = torch.randn(shape, dtype=torch.float64, **place).to(self.dtype)
        elif kind == "uniform":
            tensor = torch.rand(shape, dtype=torch.float64, **place).to(self.dtype)
        elif kind == "int":
            high = evaluate(limit or "1000", self.names)
            tensor = torch.randint(0, high, shape, **place)
        elif kind == "bool":
            tensor = torch.rand(shape, dtype=torch.float64, **place) < 0.7
            if not on_meta and tensor.dim():
                tensor[..., 0] = True
        elif kind in ("padded", "left"):
            # What tokenizers give: rows of unlike lengths, the last of them full, padded at the end or the beginning.
            length = torch.arange(shape[-1])
            ends = shape[-1] - torch.arange(shape[0] - 1, -1, -1) % max(shape[-1] // 2, 1)
            tensor = (length < ends[:, None]).long()
            tensor = (tensor.flip(-1) if kind == "left" else tensor).to(self.device)
        else:
            made = {"true": torch.bool, "ones": self.dtype, "zeros": self.dtype}[kind]
            fill = torch.zeros if kind == "zeros" else torch.ones
            tensor = fill(shape, dtype=made, device=self.device)
        return tensor if on_meta else tensor.to(self.device)


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "[(") - (character in ")]")
        if character == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += character
    return [part for part in [*parts, current] if part.strip()]


def evaluate(text: str, names: Mapping[str, Any]) -> Any:
    """An arithmetic expression over ``names``: ``+ - * // % **``, indices (``patch_size[1]``), sum, len and max.

    A configuration within the configuration is asked with a dot: ``vision_config.patch_size``.
    """

    def walk(node: ast.AST) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            if node.id not in names:
                raise PlanError(f"the expression {text!r} names {node.id!r}; known: {', '.join(sorted(names))}")
            return names[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](walk(node.left), walk(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -walk(node.operand)
        if isinstance(node, ast.Subscript):
            return walk(node.value)[walk(node.slice)]
        if isinstance(node, ast.Attribute):
            return walk(node.value)[node.attr]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            return _FUNCTIONS[node.func.id](*[walk(argument) for argument in node.args])
        raise PlanError(f"{text!r} is not an arithmetic expression over names")

    try:
        return walk(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, IndexError, KeyError) as error:
        raise PlanError(f"the expression {text!r} cannot be evaluated: {error}") from None
