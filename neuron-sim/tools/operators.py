"""Compares PyTorch's operator database on the device with the host, as a gate.

    python tools/operators.py            both profiles strict, and no rules; writes operators.json and operators.md
    python tools/operators.py --only 'norm' --configuration sdk-2.33:raise

Needs `expecttest`. A configuration passes when nothing fails, crashes or hangs, when exactly the operators on the list
of expected rejections (`expected_rejections.json`) are rejected, by the rules named there, and when as many operators
as asked are equal throughout. Operators run in a process of their own, so that a crash is one more outcome. Exit code 1
when a configuration does not pass. --accept writes the list anew; each new entry's "why" is to be written by hand.
"""

import argparse
import json
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EXPECTED = HERE / "expected_rejections.json"
RESULT = HERE / "operators.json"
AT_LEAST_EQUAL = 615
CONFIGURATIONS = ("sdk-2.33:raise", "beta-2.10:raise", "sdk-2.33:off")


def worker(configuration: str, names: list[str], samples: int) -> None:
    """In a process of its own: examine operators and print one line of JSON for each, named before it starts."""
    import torch
    from comparison import examine, operators

    from neuron_sim import policy
    from neuron_sim.profiles import profile

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.neuron.init()
    name, _, strictness = configuration.partition(":")
    policy.use(policy.Rulebook(profile(name), strictness))
    wanted = set(names)
    for info in operators():
        if info.full_name in wanted:
            print(f"> {info.full_name}", flush=True)
            print(json.dumps(examine(info, samples=samples).as_data()), flush=True)


def run(configuration: str, names: list[str], samples: int) -> dict[str, dict[str, Any]]:
    """The outcome of every operator; a worker that crashed is started again with the rest."""
    outcomes: dict[str, dict[str, Any]] = {}
    while left := [name for name in names if name not in outcomes]:
        command = [sys.executable, __file__, "--worker", configuration, "--samples", str(samples)]
        done = subprocess.run(command, input="\n".join(left), stdout=subprocess.PIPE, text=True, check=False)
        at = None
        for line in done.stdout.splitlines():
            if line.startswith("> "):
                at = line[2:]
            elif line.startswith("{"):
                outcome = json.loads(line)
                outcomes[outcome["name"]] = outcome
        if done.returncode == 0 and not set(left) - set(outcomes):
            break
        if at is None or at in outcomes:
            sys.exit(f"the worker ended with {done.returncode} between operators; see stderr")
        crash = {"name": at, "verdict": "failing", "rules": [], "reasons": [f"crash: exit code {done.returncode}"]}
        outcomes[at] = crash | {"on_host": [], "comparisons": 0, "norms_compared": 0}
    return outcomes


def summary(outcomes: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Counts: equal operators apart by whether anything of theirs ran on the host."""
    verdicts = Counter(
        o["verdict"] if o["verdict"] != "equal" else ("fallen_back" if o["on_host"] else "native")
        for o in outcomes.values()
    )
    return {
        "operators": len(outcomes),
        "equal": verdicts["native"] + verdicts["fallen_back"],
        **{word: verdicts[word] for word in ("native", "fallen_back", "rejected", "failing")},
        "comparisons": sum(o["comparisons"] for o in outcomes.values()),
        "bfloat16_norms_no_worse": sum(o["norms_compared"] for o in outcomes.values()),
    }


def problems(
    configuration: str, outcomes: dict[str, dict[str, Any]], expected: dict[str, Any], whole: bool
) -> list[str]:
    """What keeps a configuration from passing."""
    found = []
    listed = expected.get(configuration, {})
    for name, outcome in outcomes.items():
        rules = listed.get(name, {}).get("rules", [])
        if outcome["verdict"] == "failing":
            found.append(f"{name}: {outcome['reasons'][-1]}")
        elif outcome["rules"] and not listed.get(name, {}).get("why"):
            found.append(f"{name}: rejected by {outcome['rules']}, and nobody has written why that is right")
        elif outcome["rules"] != rules:
            found.append(f"{name}: rejected by {outcome['rules']}, expected {rules}: {outcome['reasons'][:1]}")
    if whole:
        found += [f"{name}: on the list of expected rejections, and not compared" for name in listed.keys() - outcomes]
        if (equal := summary(outcomes)["equal"]) < AT_LEAST_EQUAL:
            found.append(f"only {equal} operators are equal throughout, not {AT_LEAST_EQUAL}")
    return found


def table(results: dict[str, Any]) -> str:
    """The counts in Markdown."""
    keys = list(next(iter(results.values()))["summary"])
    lines = [
        "| Configuration | " + " | ".join(key.replace("_", " ") for key in keys) + " |",
        "|---" * (len(keys) + 1) + "|",
    ]
    for configuration, found in results.items():
        lines.append(f"| {configuration} | " + " | ".join(f"{found['summary'][key]:,}" for key in keys) + " |")
    return "\n".join(lines)


def main() -> int:
    """Run the comparison. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--only", default="", help="a regular expression for operators' names")
    parser.add_argument("--configuration", action="append", help=f"profile:strictness; default: {CONFIGURATIONS}")
    parser.add_argument("--accept", action="store_true", help="write the list of expected rejections anew, to review")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        worker(chosen.worker, sys.stdin.read().split("\n"), chosen.samples)
        return 0
    sys.path.insert(0, str(HERE))
    import torch
    from comparison import operators

    names = [info.full_name for info in operators(chosen.only)]
    whole = not chosen.only and not chosen.configuration
    expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    results, is_bad = {}, False
    for configuration in chosen.configuration or CONFIGURATIONS:
        outcomes = run(configuration, names, chosen.samples)
        if chosen.accept:
            before = expected.get(configuration, {})
            expected[configuration] = {
                name: {"rules": o["rules"], "first": o["reasons"][0], "why": before.get(name, {}).get("why", "")}
                for name, o in outcomes.items()
                if o["verdict"] == "rejected"
            }
        found = problems(configuration, outcomes, expected, whole=not chosen.only)
        is_bad = is_bad or bool(found)
        print("\n".join([f"{configuration}: {summary(outcomes)}", *(f"  {line}" for line in found)]), flush=True)
        results[configuration] = {"summary": summary(outcomes), "problems": found, "operators": outcomes}
    if chosen.accept:
        EXPECTED.write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
    if whole:
        compact = {
            configuration: {
                "summary": found["summary"],
                "problems": found["problems"],
                "on_host": {name: o["on_host"] for name, o in found["operators"].items() if o["on_host"]},
                "rejected": {name: o["rules"] for name, o in found["operators"].items() if o["rules"]},
            }
            for configuration, found in results.items()
        }
        what = {"torch": torch.__version__, "samples": chosen.samples, "configurations": compact}
        RESULT.write_text(json.dumps(what, indent=1) + "\n")
        RESULT.with_suffix(".md").write_text(
            f"PyTorch's operator database, torch {torch.__version__}, {chosen.samples} samples an operator; "
            "float32, bfloat16, int64, bool; forward, backward, in-place, `out=`, forward-mode AD.\n"
            "Written by `tools/operators.py`; `operators.json` has the names.\n\n" + table(results) + "\n"
        )
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
