"""Recomputes the instructions that check/published.json gives for the published compile times' graphs.

    python tools/published_points.py          # prints the points; --write puts them into the file

Needed whenever the formula in compile/instructions.py, or diffusers' Flux2, changes.
"""

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path

from neuron_sim import cli

DATA = Path(__file__).parent.parent / "src" / "neuron_sim" / "check" / "published.json"
KLEIN_4B = {
    "num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680,
    "guidance_embeds": False,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    data = json.loads(DATA.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        config.write_text(json.dumps(KLEIN_4B))
        for point in data["points"]:
            point["instructions"] = whole_graph(str(config), point["pixels"])
            print(point)
    if options.write:
        points = ",\n".join("    " + json.dumps(point) for point in data["points"])
        DATA.write_text(f'{{\n  "basis": {json.dumps(data["basis"])},\n  "points": [\n{points}\n  ]\n}}\n', "utf-8")


def whole_graph(config: str, pixels: int) -> int:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        cli.main(
            [
                "check",
                "Flux2Transformer2DModel",
                "--config",
                config,
                "--size",
                f"{pixels}x{pixels}",
                "--whole",
                "--json",
            ]
        )
    (graph,) = json.loads(printed.getvalue())["parts"][0]["graphs"]
    return int(graph["instructions_estimate"])


if __name__ == "__main__":
    main()
