"""The command `neuron-sim`."""

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0, 1 for what `doctor` finds wrong, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="neuron-sim", description="A neuron device for machines without Trainium.")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="say what is installed, which profile, what it sees")
    doctor.add_argument("--json", action="store_true", help="as JSON, for programs")
    chosen = parser.parse_args(arguments)
    from neuron_sim.doctor import run

    return run(as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
