"""The result of a check, as data: what `--json` prints and the text is made from."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from neuron_sim.check.options import Options
from neuron_sim.check.published import basis, compile_seconds
from neuron_sim.check.trace import Mode, Traced
from neuron_sim.location import Location
from neuron_sim.policy import Rulebook

FORMAT = 1


def of(options: Options, traced: list[Traced], rulebook: Rulebook, mode: Mode, seconds: float) -> dict[str, Any]:
    """The whole document but for the verdict, with the rules of the modes asked for. Instructions, programs, seconds
    and activations are estimates."""
    from neuron_sim import __version__

    parts = [_part(item) for item in traced]
    rules = [entry for item in traced for entry in _rules(item, rulebook) if mode in (entry["mode"], "both")]
    graphs = [graph for part in parts for graph in part["graphs"]]
    return {
        "format": FORMAT,
        "versions": {"neuron-sim": __version__, "torch": torch.__version__},
        "model": options.model,
        "instance": options.instance.name,
        "profile": options.profile,
        "tp": options.tp,
        "size": [options.width, options.height],
        "dtype": options.dtype,
        "seconds": round(seconds, 2),
        "parts": parts,
        "rules": _merged(rules),
        "graphs": {
            "count": len(graphs),
            "compile_seconds_estimate": round(sum(graph["compile_seconds_estimate"] for graph in graphs), 1),
            "basis": basis(),
        },
        "memory": _memory(options, parts),
        "topology": {
            "cores": options.tp,
            "of": options.instance.logical_cores(options.logical_nc_config),
            "groups": options.instance.logical_cores(options.logical_nc_config) // options.tp,
            "routes": True,
        },
    }


def _part(item: Traced) -> dict[str, Any]:
    seen, made = item.eager, item.compiled
    assert seen is not None
    return {
        "name": item.part.name,
        "parameters": item.part.parameters,
        "is_sharded": item.part.is_sharded,
        "plan": item.part.plan,
        "weights_bytes": item.weights_bytes,
        "activations_bytes_estimate": item.activations_bytes,
        "inputs": item.inputs,
        "notes": item.part.notes,
        "problem": item.problem,
        "operators": sum(seen.operators.values()),
        "programs_estimate": len(seen.programs),
        "host_syncs": dict(seen.syncs),
        "collectives": {name: {"calls": calls, "bytes": size} for name, (calls, size) in seen.collectives.items()},
        "graphs": [
            {
                "unit": graph.unit,
                "operators": graph.operators,
                "instructions_estimate": graph.instructions.total,
                "peak_bytes_estimate": graph.peak.total,
                "activations_bytes_estimate": graph.peak.total - graph.peak.inputs,
                "compile_seconds_estimate": round(compile_seconds(graph.instructions.total), 1),
            }
            for graph in (made.graphs if made is not None else ())
        ],
        "graph_breaks": dict(made.breaks) if made is not None else {},
    }


def _rules(item: Traced, rulebook: Rulebook) -> Iterable[dict[str, Any]]:
    assert item.eager is not None
    for event, count in item.eager.rules.items():
        message = rulebook.explain(event, item.eager.details.get(event, ""))
        action = rulebook.actions[event.rule]
        yield _entry("eager", item.part.name, event.rule, action, event.op, event.where, message, count)
    if item.compiled is None:
        return
    # What stays eager beside the graphs.
    for event, count in item.eager.outside.items():
        message = rulebook.explain(event, item.eager.details.get(event, ""))
        action = rulebook.actions[event.rule]
        yield _entry("compiled", item.part.name, event.rule, action, event.op, event.where, message, count)
    for graph in item.compiled.graphs:
        for found in graph.findings:
            yield _entry("compiled", item.part.name, found.rule, found.action, found.op, found.where, found.message, 1)


def _entry(
    mode: str, part: str, rule: str, action: str, op: str, where: Location, message: str, count: int
) -> dict[str, Any]:
    place = dataclasses.asdict(where)
    return {
        "mode": mode, "part": part, "rule": rule, "action": action, "op": op, "count": count, "file": place["file"],
        "line": place["line"], "via": place["via"], "message": message,
    }  # fmt: skip


def _merged(rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each mode, rule, operator and line; refusals first, then by count."""
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for entry in rules:
        key = tuple(entry[name] for name in ("mode", "part", "rule", "op", "file", "line"))
        known = merged.setdefault(key, {**entry, "count": 0})
        known["count"] += entry["count"]
    return sorted(merged.values(), key=lambda entry: (entry["action"] != "refuse", entry["rule"], -entry["count"]))


def _memory(options: Options, parts: list[dict[str, Any]]) -> dict[str, Any]:
    weights = sum(part["weights_bytes"] for part in parts)
    activations = max((part["activations_bytes_estimate"] for part in parts), default=0)
    in_graphs = [graph["activations_bytes_estimate"] for part in parts for graph in part["graphs"]]
    return {
        "capacity_bytes": options.capacity_bytes,
        "weights_bytes": weights,
        "activations_bytes_estimate": activations,
        "total_bytes_estimate": weights + activations,
        "compiled_activations_bytes_estimate": max(in_graphs, default=0),
    }
