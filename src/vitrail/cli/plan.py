"""``vitrail plan``: what would be sharded, and what it would come to. Needs no weights, ranks or accelerator."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ..errors import PlanError, UsageError


def plan(
    target: str | None = None,
    /,
    *,
    tp: int = 2,
    config: Path | None = None,
    dtype: str | None = None,
    payload: Annotated[bool, Parameter(negative="")] = False,
    explain: str | None = None,
    plan: Path | None = None,
    fresh: Annotated[bool, Parameter(negative="")] = False,
    pad: Annotated[bool, Parameter(negative="")] = False,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Show how a model is sharded over --tp ranks: bytes, collectives, degrees, and what is left whole and why.

    Parameters
    ----------
    target
        A folder with a pipeline or a model, a class of diffusers (its default configuration, or --config), or your
        own path/to/file.py:Class. Default: the bundled model.
    tp
        The degree: over how many ranks.
    config
        A JSON file with the arguments of the class' constructor.
    dtype
        float32, bfloat16 or float16, to count bytes. Default: bfloat16.
    payload
        Also count what a step's collectives carry, for one ordinary picture; takes some seconds.
    explain
        A module's (or a parameter's) name: say in words how that module is sharded, and why.
    plan
        Use this plan instead of the catalog's or a derived one.
    fresh
        Derive the plan afresh, and prove it, whatever the catalog has.
    pad
        Give every rank equal shapes, with zeros where units do not divide: for compilers that make one program for all.
    output
        Write the plan to this file, for --plan.
    json_
        Print JSON.
    """
    from ..run.planning import Planned, planned

    found, others = planned(
        target, tp, config=config, plan_file=plan, dtype=dtype, fresh=fresh, count_payload=payload, pad=pad
    )
    if output is not None:
        if len(found) != 1:
            raise UsageError(f"--output takes one model's plan, and {target} has {len(found)} to shard")
        try:
            output.write_text(found[0].resolved.plan.to_json(), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{output} cannot be written: {error.strerror}") from None
    if explain is not None:
        _explain(found, explain, json_)
        return
    if json_:
        report = {
            "models": [{**item.summary.document(), **_carried(item, dtype)} for item in found],
            "others": [vars(other) for other in others],
        }
        print(json.dumps(report, indent=2))
        return
    assert all(isinstance(item, Planned) for item in found)
    _show(found, others, dtype, payload)


def _carried(item: Any, dtype: str | None) -> dict[str, Any]:
    from ..run.subject import dtype_of

    if item.payload is None:
        return {}
    return {
        "payload_bytes": item.payload.elements * dtype_of(dtype).itemsize,
        "payload_sizes": dict(item.payload.sizes),
    }


def _explain(found: list[Any], name: str, as_json: bool) -> None:
    import difflib

    from ..plan.report import explain

    for item in found:
        names = [path for path, _ in item.subject.model.named_modules()]
        owner = name.rpartition(".")[0]
        if name in names or (owner in names and name in dict(item.subject.model.named_parameters())):
            lines = explain(item.resolved, item.subject.model, name if name in names else owner)
            print(json.dumps({"module": name, "explanation": lines}, indent=2) if as_json else "\n".join(lines))
            return
    names = [path for item in found for path, _ in item.subject.model.named_modules()]
    close = difflib.get_close_matches(name, names, 3)
    raise PlanError(
        f"{found[0].subject.name} has no module {name!r}", hint=f"did you mean {', '.join(close)}?" if close else None
    )


def _show(found: list[Any], others: list[Any], dtype: str | None, payload: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, soft_wrap=False, width=None if sys.stdout.isatty() else 130)
    degree = found[0].summary.degree
    table = Table(title=f"Sharded over {degree} ranks", title_justify="left")
    for column in ("component", "parameters", "whole", "a rank", "ideal", "over ideal", "collectives", "plan"):
        table.add_column(column, justify="left" if column in ("component", "plan") else "right")
    for item in found:
        summary = item.summary
        table.add_row(
            summary.model,
            f"{summary.parameters:,}",
            _bytes(summary.total_bytes),
            _bytes(summary.rank_bytes),
            _bytes(summary.ideal_bytes),
            f"{summary.ratio:.3f}",
            str(summary.collectives),
            summary.source + (", full" if summary.full else ""),
        )
    for other in others:
        table.add_row(
            f"{other.name} ({other.kind})", "", _bytes(other.nbytes), _bytes(other.nbytes), "", "", "", "whole"
        )
    console.print(table)
    for item in found:
        summary = item.summary
        degrees = list(summary.degrees)
        listed = f"1 to {degrees[-1]}" if degrees == list(range(1, len(degrees) + 1)) else ", ".join(map(str, degrees))
        lines = [f"{summary.model}: degrees that work: {listed}"]
        if min(summary.rank_parameters) != max(summary.rank_parameters):
            held = ", ".join(f"{number:,}" for number in summary.rank_parameters)
            lines.append(f"the ranks hold {held} parameters: units that do not divide are shared out raggedly")
        if payload and item.payload is None:
            lines.append(
                "what a step's collectives carry is not known: the class has no probes that run at an ordinary size"
            )
        for carried in [_carried(item, dtype)] if item.payload is not None else []:
            sizes = ", ".join(f"{name} {size}" for name, size in carried["payload_sizes"].items())
            lines.append(f"a rank puts {_bytes(carried['payload_bytes'])} into the collectives of a step, at {sizes}")
        if summary.verified:
            said = "proven" if summary.source in ("catalog", "derived") else "the file says it was proven"
            lines.append(
                f"{said}: the whole model's values to {summary.verified['error']:.0e}, at degrees "
                f"{', '.join(map(str, summary.verified['degrees']))}, in float64"
            )
        lines += [
            f"whole: {left.name} ({100 * left.share:.3g} %): {left.why}"
            for left in sorted(summary.leftovers, key=lambda left: -left.share)[:8]
        ]
        if len(summary.leftovers) > 8:
            lines.append(f"and {len(summary.leftovers) - 8} smaller ones (--json has all)")
        console.print("\n  ".join(lines), highlight=False, soft_wrap=True)


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"
