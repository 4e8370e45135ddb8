"""The command `neuron-sim`."""

import argparse
import sys
from collections.abc import Sequence

from neuron_sim.errors import ConfigurationError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0; 1 for what `doctor` or `cache verify` finds wrong, and for a program
    that failed without a code of its own; 2 for wrong usage or configuration; 3 for what `report` or `check`
    finds refused."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    chosen = _parser().parse_args(given)
    try:
        return _run(chosen)
    except ConfigurationError as error:
        print(f"neuron-sim: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="neuron-sim", description="A neuron device for machines without Trainium.")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="say what is installed, which profile, what it sees")
    doctor.add_argument("--json", action="store_true", help="as JSON, for programs")
    rules = commands.add_parser("rules", help="print the rulebook of a profile")
    rules.add_argument("--profile", help="which one (default: NEURON_SIM_PROFILE's)")
    rules.add_argument("--json", action="store_true", help="as JSON, for programs")
    cache = commands.add_parser("cache", help="look at the compiled programs on disk")
    cache.add_argument("action", choices=["list", "stat", "verify", "clear", "export", "import"])
    cache.add_argument("file", nargs="?", help="the archive (export, import)")
    cache.add_argument("--trust", action="store_true", help="import libraries too, which are code (NEURON_SIM_CODEGEN)")
    cache.add_argument("--dir", help="the folder (default: TORCH_NEURONX_NEFF_CACHE_DIR's)")
    cache.add_argument("--json", action="store_true", help="as JSON, for programs")
    report = commands.add_parser(
        "report", help="run a program, tell what it did on the device, and judge it; exit code 3 when it is refused"
    )
    report.add_argument("--instance", help="the instance type to judge for (default: NEURON_SIM_INSTANCE's)")
    report.add_argument("--json", action="store_true", help="as JSON, for programs")
    report.add_argument("-o", "--output", help="write the report to a file instead of stdout")
    report.add_argument("--no-fallbacks", action="store_true", help="refuse what runs operators on the host")
    report.add_argument("program", nargs=argparse.REMAINDER, help="-- and the program with its arguments")
    check = commands.add_parser(
        "check", help="say what would happen to a model on an instance, without weights; exit code 3 when it is refused"
    )
    check.add_argument(
        "model", help="a pipeline's or a model's folder, a hub id, a class of diffusers, or file.py:Class"
    )
    check.add_argument("--config", help="JSON file with the arguments of the class's constructor")
    check.add_argument("--instance", help="the instance type (default: NEURON_SIM_INSTANCE's)")
    check.add_argument("--tp", type=int, default=1, help="over how many cores the denoiser is sharded (default: 1)")
    check.add_argument("--size", default="1024x1024", help="the picture, width x height (default: 1024x1024)")
    check.add_argument("--dtype", default="bfloat16", help="bfloat16, float16, float32 or float64 (default: bfloat16)")
    check.add_argument("--profile", help="whose rules (default: NEURON_SIM_PROFILE's)")
    check.add_argument(
        "--mode", choices=["eager", "compiled", "both"], default="both", help="what to judge (default: both)"
    )
    check.add_argument("--whole", action="store_true", help="compile models as a whole, not by repeated blocks")
    check.add_argument("--no-fallbacks", action="store_true", help="refuse what runs operators on the host")
    check.add_argument(
        "--set", action="append", default=[], metavar="NAME=NUMBER", dest="sizes",
        help="what an input measures, where the picture does not tell (text=512, frames=21); repeatable",
    )  # fmt: skip
    check.add_argument("--json", action="store_true", help="as JSON, for programs")
    return parser


def _run(chosen: argparse.Namespace) -> int:
    # Each imports only what it needs: `doctor` imports torch, the others do without.
    if chosen.command == "doctor":
        from neuron_sim import doctor

        return doctor.run(as_json=chosen.json)
    if chosen.command == "rules":
        from neuron_sim import rules_command

        return rules_command.run(chosen.profile, as_json=chosen.json)
    if chosen.command == "cache":
        from neuron_sim import cache_command

        if chosen.action in ("export", "import"):
            return cache_command.move(chosen.action, chosen.file, chosen.dir, chosen.trust, as_json=chosen.json)
        return cache_command.run(chosen.action, chosen.dir, as_json=chosen.json)
    if chosen.command == "check":
        return _check(chosen)
    from neuron_sim.report import command

    program = chosen.program[1:] if chosen.program[:1] == ["--"] else chosen.program
    return command.run(program, chosen.instance, chosen.json, chosen.output, chosen.no_fallbacks)


def _check(chosen: argparse.Namespace) -> int:
    from neuron_sim.check import options

    asked = options.read(
        chosen.model, instance_name=chosen.instance, tp=chosen.tp, size=chosen.size, dtype=chosen.dtype,
        profile_name=chosen.profile, config=chosen.config, whole=chosen.whole, no_fallbacks=chosen.no_fallbacks,
        sizes=tuple(chosen.sizes),
    )  # fmt: skip
    from neuron_sim.check import command

    return command.run(asked, chosen.mode, as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
