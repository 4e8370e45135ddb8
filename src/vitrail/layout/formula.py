"""What a dimension consists of: concatenations (``+``) and products (``*``, major first) of named sizes.

``heads*64 + ff`` is a dimension of ``heads`` units of 64 elements, then ``ff`` more. Some names are split over the
ranks; from those follow the index ranges a rank owns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from .ranges import Range, Ranges, normalise

_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_]\w*)|([+*()]))")


@dataclass(frozen=True)
class Formula:
    """A name, a number, or a ``cat`` or ``prod`` of ``parts``."""

    kind: Literal["name", "number", "cat", "prod"]
    name: str = ""
    number: int = 0
    parts: tuple[Formula, ...] = ()

    @classmethod
    def parse(cls, text: str | int) -> Formula:
        """Read a formula. Raises ``ValueError`` that quotes what is wrong."""
        if isinstance(text, int):
            return cls("number", number=text)
        tokens, position = [], 0
        while position < len(text.rstrip()):
            match = _TOKEN.match(text, position)
            if match is None:
                raise ValueError(f"{text!r} is not a formula: unexpected {text[position:].strip()[0]!r}")
            tokens.append(match.group().strip())
            position = match.end()
        parser = _Parser(text, tokens)
        result = parser.sum()
        if parser.tokens:
            raise ValueError(f"{text!r} is not a formula: unexpected {parser.tokens[0]!r}")
        return result

    def __str__(self) -> str:
        if self.kind == "name":
            return self.name
        if self.kind == "number":
            return str(self.number)
        if self.kind == "cat":
            return " + ".join(map(str, self.parts))
        return "*".join(f"({part})" if part.kind == "cat" else str(part) for part in self.parts)

    def names(self) -> Iterator[str]:
        if self.kind == "name":
            yield self.name
        for part in self.parts:
            yield from part.names()

    def terms(self) -> tuple[Formula, ...]:
        return self.parts if self.kind == "cat" else (self,)

    def size(self, sizes: Mapping[str, int]) -> int:
        if self.kind == "name":
            return sizes[self.name]
        if self.kind == "number":
            return self.number
        parts = [part.size(sizes) for part in self.parts]
        return sum(parts) if self.kind == "cat" else math.prod(parts)

    def ranges(self, sizes: Mapping[str, int], owned: Mapping[str, Range]) -> Ranges:
        """The indices a rank has, when it owns the range ``owned[name]`` of the names that are split."""
        return normalise(self._ranges(sizes, owned))

    def padded(
        self, sizes: Mapping[str, int], owned: Mapping[str, Range], most: Mapping[str, int]
    ) -> tuple[Ranges, Ranges]:
        """The same when every rank is given ``most[name]`` units: the indices, and where between them zeros lie.

        The second ranges count the rank's own dimension, zeros included.
        """
        indices = self._indices(sizes, owned, most)
        real = indices[indices >= 0]
        positions = torch.nonzero(indices < 0).flatten()
        return _runs(real), _runs(positions)

    def _indices(self, sizes: Mapping[str, int], owned: Mapping[str, Range], most: Mapping[str, int]) -> torch.Tensor:
        """The whole's index at every local one, -1 for a zero."""
        if self.kind in ("name", "number"):
            if self.name not in owned:
                return torch.arange(self.size(sizes))
            start, stop = owned[self.name]
            filler = torch.full((most[self.name] - (stop - start),), -1)
            return torch.cat([torch.arange(start, stop), filler])
        if self.kind == "cat":
            parts, offset = list[torch.Tensor](), 0
            for part in self.parts:
                own = part._indices(sizes, owned, most)
                parts.append(torch.where(own < 0, own, own + offset))
                offset += part.size(sizes)
            return torch.cat(parts)
        result = torch.zeros(1, dtype=torch.long)
        for part in self.parts:
            inner = part._indices(sizes, owned, most)
            outer = result[:, None]
            combined = outer * part.size(sizes) + inner
            result = torch.where((outer < 0) | (inner < 0), -1, combined).flatten()
        return result

    def _ranges(self, sizes: Mapping[str, int], owned: Mapping[str, Range]) -> list[Range]:
        if self.kind in ("name", "number"):
            return [owned[self.name] if self.name in owned else (0, self.size(sizes))]
        if self.kind == "cat":
            result, offset = list[Range](), 0
            for part in self.parts:
                result += [(start + offset, stop + offset) for start, stop in part._ranges(sizes, owned)]
                offset += part.size(sizes)
            return result
        first, *rest = self.parts
        result = first._ranges(sizes, owned)
        for part in rest:
            inner, width = part._ranges(sizes, owned), part.size(sizes)
            if inner == [(0, width)]:
                result = [(start * width, stop * width) for start, stop in result]
            else:
                result = [
                    (unit * width + start, unit * width + stop)
                    for outer in result
                    for unit in range(*outer)
                    for start, stop in inner
                ]
        return result


class _Parser:
    def __init__(self, text: str, tokens: list[str]) -> None:
        self.text, self.tokens = text, tokens

    def sum(self) -> Formula:
        parts = [self.product()]
        while self.tokens and self.tokens[0] == "+":
            self.tokens.pop(0)
            parts.append(self.product())
        return join("cat", parts)

    def product(self) -> Formula:
        parts = [self.atom()]
        while self.tokens and self.tokens[0] == "*":
            self.tokens.pop(0)
            parts.append(self.atom())
        return join("prod", parts)

    def atom(self) -> Formula:
        token = self.tokens.pop(0) if self.tokens else ""
        if token == "(":
            inner = self.sum()
            if not self.tokens or self.tokens.pop(0) != ")":
                raise ValueError(f"{self.text!r} is not a formula: a bracket is not closed")
            return inner
        if token.isdecimal():
            return Formula("number", number=int(token))
        if not token or token in "+*)":
            raise ValueError(f"{self.text!r} is not a formula: a name or number is missing")
        return Formula("name", token)


def _runs(indices: torch.Tensor) -> Ranges:
    """Ascending indices as ranges."""
    if not len(indices):
        return ()
    ends = torch.nonzero(indices[1:] != indices[:-1] + 1).flatten()
    starts = torch.cat([indices[:1], indices[ends + 1]]).tolist()
    stops = (torch.cat([indices[ends], indices[-1:]]) + 1).tolist()
    return normalise(zip(starts, stops, strict=True))


def join(kind: Literal["cat", "prod"], parts: Sequence[Formula]) -> Formula:
    """``parts`` one after the other, or multiplied; nested ones of the same kind are flattened."""
    flat = [inner for part in parts for inner in (part.parts if part.kind == kind else (part,))]
    return flat[0] if len(flat) == 1 else Formula(kind, parts=tuple(flat))
