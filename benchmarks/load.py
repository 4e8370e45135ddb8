"""What loading a model over 1, 2 and 4 ranks costs: bytes asked of the files, memory, seconds.

Makes a synthetic FLUX.2 transformer in diffusers' format, as one file and as several, and loads it on gloo ranks of
one thread: with vitrail, with diffusers' ordinary loader (every rank the whole), and with diffusers' own sharding on
load, whose check of the device is widened here to admit the CPU. Every measurement is made in fresh processes.
"""

from __future__ import annotations

import gc
import os
import re
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import OUT, OtherCpu, Ranks, finish, parser, table
from contenders import admit_cpu, cpu_mesh
from diffusers import Flux2Transformer2DModel, TensorParallelConfig
from diffusers.utils.logging import disable_progress_bar
from synthetic import ITEM, configuration, elements, prepare_cache, shapes, write_model
from torch.distributed.tensor import DTensor

import vitrail
from vitrail.apply.checkpoint import Checkpoint

CONTENDERS = ("vitrail", "diffusers, whole", "diffusers, sharded")
# fmt: off
COLUMNS = ("files", "ranks", "who", "share", "peak", "/share", "mapped", "PSS", "asked", "cut", "read", "s", "ready s")
# fmt: on
LARGEST = ("share", "peak", "mapped", "pss", "seconds", "ready_seconds")
PEAK_AIM, ASKED_AIM = 1.2, 1.05
SAMPLE_SECONDS = 0.002
PAGE = os.sysconf("SC_PAGE_SIZE")
LEGEND = """
Memory is the growth above the same process just before it loads, when it has imported everything and joined its group;
the largest rank's, in 10^6 bytes. [bold]share[/]: parameters. [bold]peak[/]: anonymous and shared memory, sampled.
[bold]mapped[/]: resident pages of mapped files, at most: what a loader maps instead of reading lies in the page cache,
once a machine, and a device would get a copy. [bold]PSS[/]: proportional set size, with the model loaded on all ranks.
Bytes are sums over the ranks, over the files' bytes. [bold]asked[/]: of the files, by vitrail's own count;
[bold]cut[/]: the same for the sharded tensors alone, without what is replicated. [bold]read[/]: got from read calls,
which a loader that maps does not make. [bold]s[/]: seconds of the slowest rank until the loader returns;
[bold]ready s[/]: until every page of the weights was touched, as the first step will."""


class Meter(threading.Thread):
    """Samples this process's memory from its making to `stop`, and counts what is read meanwhile."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._stopped = threading.Event()
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        self._own = 0  # bytes that it read itself
        self._highest: dict[str, int] = {}
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the kernel's own peak, VmHWM, starts anew
        self._first = self._look()
        self._io, self._own = proc("io", unit=1), 0
        self._begun = time.perf_counter()
        self.start()

    def run(self) -> None:
        while not self._stopped.wait(SAMPLE_SECONDS):
            self._look()

    def _look(self) -> dict[str, int]:
        content = os.pread(self._status, 8192, 0)
        self._own += len(content)
        now = numbers(content, unit=1024)
        now["peak"] = now["RssAnon"] + now["RssShmem"]
        self._highest = {name: max(value, self._highest.get(name, value)) for name, value in now.items()}
        return now

    def seconds(self) -> float:
        return time.perf_counter() - self._begun

    def stop(self) -> dict[str, float]:
        seconds = self.seconds()
        self._stopped.set()
        self.join()
        self._look()
        io = proc("io", unit=1)
        os.close(self._status)
        return {
            "ready_seconds": seconds,
            "peak": self._highest["peak"] - self._first["peak"],
            "mapped": self._highest["RssFile"] - self._first["RssFile"],
            "kernel_peak_with_mapped": self._highest["VmHWM"] - self._first["VmRSS"],
            "read": io["rchar"] - self._io["rchar"] - self._own,
            "read_from_disk": io["read_bytes"] - self._io["read_bytes"],
        }


def proc(name: str, unit: int) -> dict[str, int]:
    return numbers(Path("/proc/self", name).read_bytes(), unit)


def numbers(content: bytes, unit: int) -> dict[str, int]:
    return {name.decode(): int(value) * unit for name, value in re.findall(rb"^(\w+):\s+(\d+)", content, re.MULTILINE)}


def measure(who: str, folder: str) -> dict[str, float]:
    """Load on this rank, with the others, and say what it cost."""
    arguments: dict[str, Any] = {"torch_dtype": torch.bfloat16}
    if who != "diffusers, whole":
        arguments["parallel_config"] = TensorParallelConfig(mesh=cpu_mesh())
    disable_progress_bar()
    asked = count_asked() if who == "vitrail" else None
    if who == "diffusers, sharded":
        admit_cpu()
    gc.collect()
    dist.barrier()
    pss = proc("smaps_rollup", unit=1024)["Pss"]
    meter = Meter()
    if who == "vitrail":
        model = vitrail.from_pretrained(Flux2Transformer2DModel, folder, **arguments)
    else:
        model = Flux2Transformer2DModel.from_pretrained(folder, **arguments)
    seconds = meter.seconds()
    own = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in model.parameters()]
    for parameter in own:
        parameter.detach().view(torch.uint8).view(-1)[::PAGE].sum()  # what is mapped is not read before it is touched
    cost = {**meter.stop(), "seconds": seconds, "share": sum(parameter.nbytes for parameter in own)}
    dist.barrier()
    cost["pss"] = proc("smaps_rollup", unit=1024)["Pss"] - pss
    dist.barrier()
    if asked is not None and (sharding := vitrail.sharding_of(model)) is not None:
        shards = sharding.resolved.shards
        cost["asked"] = sum(asked.values())
        cost["asked_cut"] = sum(asked[name] for name in shards)
        cost["cut"] = sum(ITEM * torch.Size(shard.shape).numel() for shard in shards.values())
    return cost


def count_asked() -> dict[str, int]:
    """Keep vitrail's count of the bytes it asks of the files, by tensor."""
    asked: dict[str, int] = {}
    read = Checkpoint.read

    def counted(self: Checkpoint, name: str, *arguments: Any, **more: Any) -> torch.Tensor:
        before = self.reading.requested
        value = read(self, name, *arguments, **more)
        asked[name] = asked.get(name, 0) + self.reading.requested - before
        return value

    Checkpoint.read = counted  # type: ignore[method-assign]
    return asked


def summary(costs: Sequence[Mapping[str, float]], files: int) -> dict[str, float]:
    """Of all ranks: the largest of what each holds, the sum of what all read."""
    largest = {name: max(cost[name] for cost in costs) for name in LARGEST}
    result = {**largest, "peak_of_share": max(cost["peak"] / cost["share"] for cost in costs)}
    result["read_of_files"] = sum(cost["read"] for cost in costs) / files
    if "asked" in costs[0]:
        result["asked_of_files"] = sum(cost["asked"] for cost in costs) / files
        result["asked_of_cut"] = sum(cost["asked_cut"] for cost in costs) / costs[0]["cut"]
    return result


def row(result: Mapping[str, Any]) -> list[str]:
    memory = [f"{result[name] / 1e6:,.0f}" for name in ("share", "peak", "mapped", "pss")]
    memory.insert(2, f"{result['peak_of_share']:.3f}")
    reading = [f"{result[n]:.4f}" if n in result else "-" for n in ("asked_of_files", "asked_of_cut", "read_of_files")]
    seconds = [f"{result[name]:.2f}" for name in ("seconds", "ready_seconds")]
    return [result["files"], str(result["ranks"]), result["who"], *memory, *reading, *seconds]


def say_aims(results: Sequence[Mapping[str, Any]]) -> None:
    ours = [result for result in results if result["who"] == "vitrail"]
    peak = max(ours, key=lambda result: float(result["peak_of_share"]))
    aim_told("peak over the rank's share", peak, "peak_of_share", PEAK_AIM)
    if sharded := [result for result in ours if "asked_of_cut" in result]:
        cut = max(sharded, key=lambda result: float(result["asked_of_cut"]))
        aim_told("bytes asked for sharded tensors over their size", cut, "asked_of_cut", ASKED_AIM)
        everything = max(float(result["asked_of_files"]) for result in sharded)
        OUT.print(f"With the replicated tensors, which every rank reads: at most {everything:.4f} of the files' bytes.")


def aim_told(what: str, worst: Mapping[str, Any], ratio: str, aim: float) -> None:
    verdict = "[green]met[/]" if worst[ratio] <= aim else "[bold red]missed[/]"
    place = f"{worst['ranks']} ranks, {worst['files']}"
    OUT.print(f"Aim: {what}, at most {aim}: {verdict}, at worst {worst[ratio]:.4f} ({place})")


def main() -> None:
    command = parser(__doc__, "load")
    command.add_argument("--gigabytes", type=float, default=2.0, help="size of the checkpoint, in 10^9 bytes")
    command.add_argument("--heads", type=int, default=16, help="attention heads of 128; a multiple of 4")
    command.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    command.add_argument("--work", type=Path, help="where to keep the checkpoint; a temporary folder by default")
    command.add_argument("--cold", action="store_true", help="drop the files from the page cache before each load")
    options = command.parse_args()
    noise = OtherCpu()
    config = configuration(options.gigabytes, options.heads)
    size = ITEM * elements(shapes(config))
    OUT.print(f"{size / 1e9:.2f} GB: {config['num_layers']} double, {config['num_single_layers']} single blocks")
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="load-") as scratch:
        work = Path(options.work or scratch)
        for files, count in (("single", 1), ("indexed", 5)):
            folder = work / f"{files}-{options.heads}x128-{size}"
            write_model(folder, config, count)
            for ranks in options.ranks:
                for who in CONTENDERS:
                    prepare_cache(folder, options.cold)
                    with Ranks(ranks, options.timeout) as pool:
                        costs = pool(measure, who, str(folder))
                    bytes_ = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
                    result = {"files": files, "ranks": ranks, "who": who, **summary(costs, bytes_), "each": costs}
                    results.append(result)
                    OUT.print(f"[dim]{files}, {ranks} ranks, {who}: {result['seconds']:.2f} s[/]")
    cache = "out of" if options.cold else "in"
    table(
        f"Loading {size / 1e9:.2f} GB, files {cache} the page cache: MB, ratios, seconds",
        COLUMNS,
        [row(result) for result in results],
    )
    OUT.print(LEGEND.strip())
    say_aims(results)
    settings = {"bytes": size, "config": config, "cold": options.cold, "sample_seconds": SAMPLE_SECONDS}
    finish(options.output, "load", settings, {"results": results}, noise)


if __name__ == "__main__":
    main()
