"""Reads the core's description of a call: "aten::add.Tensor(Float[8, 64], Float[8, 64], #1)".

A tensor is its dtype and sizes; `#` marks a number, as against sizes, axes and flags; `-` is what is not given.
"""

import re

from neuron_sim.profiles import Case

_NUMBER = re.compile(r"#(-?\d+)(?![\d.e])")


def arguments(signature: str) -> list[str]:
    """The arguments of a description, as written."""
    parts: list[str] = []
    depth, start, quoted = 0, signature.index("(") + 1, False
    for place in range(start, len(signature) - 1):
        letter = signature[place]
        if letter == '"' and signature[place - 1] != "\\":
            quoted = not quoted
        if quoted:
            continue
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append(signature[start:place].strip())
            start = place + 1
    last = signature[start:-1].strip()
    return [*parts, last] if last else parts


def dimensions(argument: str) -> int | None:
    """How many dimensions a tensor has; None for what is no tensor."""
    match = re.fullmatch(r"[A-Za-z]\w*\[(.*)\]", argument)
    if match is None:
        return None
    return len(match[1].split(",")) if match[1] else 0


def matches(signature: str, case: Case) -> bool:
    """Whether a call is what a case of a rule is about. The operator was compared already."""
    given = arguments(signature)
    if case.argument >= len(given):
        return False
    found = given[case.argument]
    return found == case.equals if case.dimensions is None else dimensions(found) == case.dimensions


def number_beyond_int32(signature: str) -> str | None:
    """The first number that does not fit into 32 bits, where an int64 tensor meets it."""
    if "Long[" not in signature:
        return None
    return next((n for n in _NUMBER.findall(signature) if not -(2**31) <= int(n) < 2**31), None)
