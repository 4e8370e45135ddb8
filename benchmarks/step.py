"""What a transformer step costs: seconds and collectives, for one process, for vitrail and for diffusers' sharding.

Two gloo processes of one thread each hold the same FLUX.2 transformer in float32 as: the whole (the first process;
the second blocks in a read meanwhile), sharded by vitrail, the same without the comparison of inputs
(VITRAIL_CHECK_INPUTS=off), and sharded by diffusers, whose check of the device is widened here to admit the CPU.
They take turns in one run, round by round, so that what slows the machine slows them alike. First at a size where
computing dominates, then at the bundled model's, where overhead does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import contenders
from common import OUT, OtherCpu, Ranks, finish, parser, table
from contenders import CONTENDERS, DIFFUSERS, UNCHECKED, VITRAIL, WHOLE
from diffusers import Flux2Transformer2DModel

import vitrail

RANKS = 2
TOLERANCE = 1e-4
# fmt: off
COLUMNS = ("who", "median ms", "least ms", "quartiles", "of whole", "range", "of least", "collectives", "kB", "error")
# fmt: on
LEGEND = """
[bold]of whole[/]: seconds over the whole model's of the same round, the median over the rounds and the range;
[bold]of least[/]: the least seconds over the whole model's least. Two processes at no cost would give 0.5.
[bold]kB[/]: what one process puts into the collectives of a step. [bold]error[/]: the output's largest difference from
the whole model's, over that one's largest value."""
LARGE = {
    "in_channels": 64,
    "attention_head_dim": 128,
    "num_attention_heads": 8,
    "joint_attention_dim": 1024,
    "mlp_ratio": 3.0,
    "axes_dims_rope": (32, 32, 32, 32),
    "guidance_embeds": False,
    "num_layers": 2,
    "num_single_layers": 4,
}


@dataclass(frozen=True)
class Size:
    """A model and its tokens. ``steps`` are timed together, once a contender and round, after ``warm`` that are not."""

    name: str
    config: Mapping[str, Any]
    image: int
    text: int
    warm: int
    steps: int


def sizes(quick: bool) -> list[Size]:
    bundled = dict(
        Flux2Transformer2DModel.load_config(str(vitrail.model_folder() / "transformer"), local_files_only=True)
    )
    large = Size("large, shortened", LARGE, 128, 16, 0, 1) if quick else Size("large", LARGE, 1024, 128, 1, 2)
    return [large, Size("tiny", bundled, 16, 48, 3, 10 if quick else 30)]


def ranks_of(who: str) -> range:
    return range(1 if who == WHOLE else RANKS)


def bench(size: Size, rounds: int, timeout: float) -> dict[str, Any]:
    with Ranks(RANKS, timeout) as ranks:
        parameters = ranks(contenders.prepare, size.config, size.image, size.text)[0]
        errors = {who: ranks(contenders.error, who, only=ranks_of(who))[0] for who in CONTENDERS}
        if wrong := {who: value for who, value in errors.items() if not value <= TOLERANCE}:
            raise SystemExit(f"{size.name}: outputs differ from the whole model's by more than {TOLERANCE}: {wrong}")
        counts = {who: ranks(contenders.collectives, who, only=ranks_of(who))[0] for who in CONTENDERS}
        seconds: dict[str, list[float]] = {who: [] for who in CONTENDERS}
        noise, begun, watched = OtherCpu(), time.monotonic(), ranks(contenders.watchdog_cpu)
        for number in range(rounds):
            for who in CONTENDERS:
                seconds[who].append(max(ranks(contenders.timed, who, size.warm, size.steps, only=ranks_of(who))))
            OUT.print(f"[dim]{size.name}, round {number + 1} of {rounds}[/]")
        used = [after - before for before, after in zip(watched, ranks(contenders.watchdog_cpu), strict=True)]
        lasted, others = time.monotonic() - begun, noise.percent()
        alone = ranks(contenders.alone)
    return {
        "size": asdict(size),
        "parameters": parameters,
        "errors": errors,
        "collectives": counts,
        "seconds": seconds,
        "of_whole": {who: ratio(seconds, who, WHOLE) for who in CONTENDERS},
        "vitrail_of_diffusers": ratio(seconds, VITRAIL, DIFFUSERS),
        "vitrail_of_unchecked": ratio(seconds, VITRAIL, UNCHECKED),
        "seconds_alone": {name: max(one[name] for one in alone) for name in alone[0]},
        "watchdog_cpu_share": max(used) / lasted,
        "other_cpu_percent": others,
    }


def ratio(seconds: Mapping[str, Sequence[float]], who: str, to: str) -> dict[str, float]:
    each = [mine / other for mine, other in zip(seconds[who], seconds[to], strict=True)]
    least = min(seconds[who]) / min(seconds[to])
    return {"median": statistics.median(each), "low": min(each), "high": max(each), "of_least": least}


def show(result: Mapping[str, Any]) -> None:
    size, counts = result["size"], result["collectives"]
    tokens = f"{size['image']} + {size['text']} tokens, {result['parameters'] / 1e6:,.1f} M parameters in float32"
    table(f"A step, {size['name']}: {tokens}", COLUMNS, [row(result, who) for who in CONTENDERS])
    middle, cost = statistics.median(result["seconds"][VITRAIL]), result["seconds_alone"]
    compared, booked = cost["comparison"], cost["bookkeeping"] * counts[VITRAIL]["total"]
    OUT.print(f"vitrail over diffusers: {told(result['vitrail_of_diffusers'])}")
    OUT.print(f"Comparison of inputs: {1e6 * compared:.0f} us alone, {100 * compared / middle:.2f} % of a step")
    OUT.print(f"vitrail with it over vitrail without: {told(result['vitrail_of_unchecked'])}")
    OUT.print(
        f"Watchdog: {1e6 * cost['bookkeeping']:.1f} us a collective, {100 * booked / middle:.3f} % of a step; "
        f"its thread used {100 * result['watchdog_cpu_share']:.3f} % of a core"
    )


def row(result: Mapping[str, Any], who: str) -> list[str]:
    seconds, whole, counts = result["seconds"][who], result["of_whole"][who], result["collectives"][who]
    low, middle, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    times = [milliseconds(middle), milliseconds(min(seconds)), f"{milliseconds(low)} to {milliseconds(high)}"]
    ratios = [f"{whole['median']:.3f}", f"{whole['low']:.2f} to {whole['high']:.2f}", f"{whole['of_least']:.3f}"]
    return [who, *times, *ratios, str(counts["total"]), f"{counts['bytes'] / 1e3:,.0f}", f"{result['errors'][who]:.0e}"]


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.2f}"


def told(ratio: Mapping[str, float]) -> str:
    extent = f"{ratio['low']:.3f} to {ratio['high']:.3f}"
    return f"{ratio['median']:.3f}, the median of the rounds ({extent}); {ratio['of_least']:.3f} of the least"


def main() -> None:
    command = parser(__doc__, "step")
    command.add_argument("--rounds", type=int, help="times each contender is measured (default 10, quick 3)")
    command.add_argument("--quick", action="store_true", help="fewer rounds and steps, and fewer tokens")
    options = command.parse_args()
    rounds = options.rounds or (3 if options.quick else 10)
    noise = OtherCpu()
    results = [bench(size, rounds, options.timeout) for size in sizes(options.quick)]
    for result in results:
        show(result)
    OUT.print(LEGEND.strip())
    settings = {"ranks": RANKS, "threads": 1, "rounds": rounds, "tolerance": TOLERANCE}
    finish(options.output, "step", settings, {"results": results}, noise)


if __name__ == "__main__":
    main()
