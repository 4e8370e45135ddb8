"""The report's part on compiled graphs: each with its inputs, what it took, and why it was compiled again."""

from typing import Any

SHOWN = 12
INPUTS = 4


def render(compiler: dict[str, Any] | None) -> list[str]:
    """Lines for a terminal; none where nothing was compiled."""
    if not compiler or not compiler["graphs"]:
        return []
    lines = [
        "",
        f"graphs: {compiler['compiled']:,} compiled, {compiler['disk_hits']:,} found on disk, "
        f"{compiler['memory_hits']:,} in memory; AOTAutograd ran {_times(compiler['aot_autograd'])}",
    ]
    for graph in compiler["graphs"][:SHOWN]:
        lines += _graph(graph)
    if len(compiler["graphs"]) > SHOWN:
        lines.append(f"  … and {len(compiler['graphs']) - SHOWN} more; --json has all")
    return lines


def _graph(graph: dict[str, Any]) -> list[str]:
    found = ", ".join(dict.fromkeys(program["found"] for program in graph["programs"])) or "refused"
    seconds = sum(program["seconds"] for program in graph["programs"])
    again = " again" if graph["recompile"] else ""
    lines = [
        f"  {graph['name'] or 'a graph'}{again}: {found} ({seconds:.2f} s), ran {_times(graph['runs'])}, "
        f"{graph['operations']} operations  {graph['code']}",
        f"    inputs: {_inputs(graph['inputs'])}",
    ]
    return lines + [f"    changed: {change}" for change in graph["changes"]]


def _inputs(inputs: dict[str, str]) -> str:
    # Weights have a dot in their names; what the caller gives comes first.
    given = {name: text for name, text in inputs.items() if "." not in name}
    shown = [f"{name} {text}" for name, text in list(given.items())[:INPUTS]]
    rest = len(inputs) - len(shown)
    return ", ".join(shown) + (f"{', and ' if shown else ''}{rest} more" if rest else "") or "none"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
