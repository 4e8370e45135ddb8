"""Compiled against eager: seconds to the first picture, cold and warm, and seconds a step, interleaved.

    python benchmarks/compile.py [--rounds 3] [--steps 10] [--only bundled]

Each start is a process of its own with one thread; the caches are new ones for a cold start and the same again for a
warm one. For the steps all contenders stay, and take turns. `--tp` ranks compile by blocks and whole, on simulated
cores. Needs vitrail and neuron-sim.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import OtherCpu, finish, parser, table

SUBJECTS = ("bundled", "flux2")
TOKENS, TEXT = 256, 64


@dataclass(frozen=True)
class Contender:
    """A device, and how it compiles: None is eager."""

    name: str
    device: str
    how: str | None = None
    codegen: str | None = None

    def environment(self, caches: Path) -> dict[str, str]:
        added = {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TORCH_NEURONX_NEFF_CACHE_DIR": str(caches / "neff"),
            "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": str(caches / "locks"),
            "PYTHONWARNINGS": "ignore",
        }
        if self.codegen:
            added["NEURON_SIM_CODEGEN"] = self.codegen
        return {**os.environ, **added}


CONTENDERS = (
    Contender("cpu eager", "cpu"),
    Contender("cpu inductor", "cpu", "blocks"),
    Contender("neuron eager", "neuron"),
    Contender("neuron compiled", "neuron", "blocks"),
    Contender("neuron aoti", "neuron", "blocks", "aoti"),
)
TP = (Contender("blocks", "neuron", "blocks"), Contender("whole", "neuron", "whole"))


class Worker:
    """One process that has made its first picture, or its ranks."""

    def __init__(self, subject: str, contender: Contender, caches: Path, timeout: float, ranks: int = 1) -> None:
        start = [sys.executable]
        if ranks > 1:
            start += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        job = json.dumps({"subject": subject, "device": contender.device, "how": contender.how, "ranks": ranks})
        began = time.perf_counter()
        self.process = subprocess.Popen(
            [*start, __file__, "--worker", job],
            env=contender.environment(caches),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.first = self._read()
        self.seconds = time.perf_counter() - began
        self.timeout = timeout

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"a worker ended with exit code {self.process.wait()} before it answered")

    def steps(self, count: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        return float(self._read()["seconds"])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def work(job: dict[str, Any]) -> None:
    """A worker's side: make the first picture or step, tell of it, then run as many steps as asked."""
    ticks = [time.perf_counter()]
    import torch

    from vitrail.run.counts import counts

    torch.set_num_threads(1)
    step = bundled(job) if job["subject"] == "bundled" else flux2(job)
    ticks.append(time.perf_counter())
    step(1)
    ticks.append(time.perf_counter())
    rank = int(os.environ.get("RANK", "0"))
    said = {
        "ready": ticks[1] - ticks[0],
        "first": ticks[2] - ticks[1],
        "counts": vars(counts(job["device"])),
        "rank": rank,
    }
    if rank == 0:
        print(json.dumps(said), flush=True)
    if job["ranks"] > 1:
        os._exit(0)
    for line in sys.stdin:
        began = time.perf_counter()
        step(int(line))
        print(json.dumps({"seconds": (time.perf_counter() - began) / int(line)}), flush=True)


def bundled(job: dict[str, Any]) -> Any:
    """The bundled pipeline: a step is a step of the denoiser within a picture, with its prompt and decoding."""
    import torch

    import vitrail

    pipeline = vitrail.load_pipeline(device=job["device"], tp=job["ranks"])
    pipeline.set_progress_bar_config(disable=True)
    if job["how"]:
        vitrail.compile_pipeline(pipeline, whole=job["how"] == "whole")

    def step(count: int) -> None:
        for _ in range(count):
            generator = torch.Generator().manual_seed(0)
            pipeline(
                prompt="a red apple",
                height=64,
                width=64,
                num_inference_steps=4,
                guidance_scale=1.0,
                generator=generator,
            )

    return step


def flux2(job: dict[str, Any]) -> Any:
    """A FLUX.2 transformer of width 512 with 4 + 8 blocks and random weights."""
    import torch
    from diffusers import Flux2Transformer2DModel

    device = job["device"]
    if job["ranks"] > 1:
        torch.distributed.init_process_group("neuron" if device == "neuron" else "gloo")
    torch.manual_seed(0)
    model = Flux2Transformer2DModel(
        patch_size=1, in_channels=64, num_layers=4, num_single_layers=8, attention_head_dim=64, num_attention_heads=8,
        joint_attention_dim=256, mlp_ratio=3.0, axes_dims_rope=(16, 16, 16, 16), guidance_embeds=False,
    ).eval()  # fmt: skip
    if job["ranks"] > 1:
        from torch.distributed.device_mesh import DeviceMesh

        import vitrail

        mesh = DeviceMesh(device, list(range(job["ranks"])))
        vitrail.apply_tensor_parallel(model, mesh)
    model.to(device)
    if job["how"] == "blocks":
        model.compile_repeated_blocks(
            backend="neuron" if device == "neuron" else "inductor", fullgraph=True, dynamic=False
        )
    elif job["how"] == "whole":
        model.compile(backend="neuron" if device == "neuron" else "inductor", fullgraph=True, dynamic=False)
    ids = torch.zeros(TOKENS, 4)
    ids[:, 1], ids[:, 2] = torch.arange(TOKENS) // 16, torch.arange(TOKENS) % 16
    inputs = {
        "hidden_states": torch.randn(1, TOKENS, 64),
        "encoder_hidden_states": torch.randn(1, TEXT, 256),
        "timestep": torch.full((1,), 0.5),
        "img_ids": ids,
        "txt_ids": torch.zeros(TEXT, 4),
    }
    inputs = {name: value.to(device) for name, value in inputs.items()}

    @torch.no_grad()
    def step(count: int) -> None:
        for _ in range(count):
            model(**inputs, return_dict=False)[0].cpu()

    return step


def starts(subject: str, rounds: int, timeout: float) -> dict[str, Any]:
    """Cold and warm seconds to the first picture, in turn."""
    found: dict[str, Any] = {one.name: {"cold": [], "warm": []} for one in CONTENDERS}
    for number in range(rounds):
        for one in CONTENDERS[number % len(CONTENDERS) :] + CONTENDERS[: number % len(CONTENDERS)]:
            with tempfile.TemporaryDirectory() as folder:
                for kind in ("cold", "warm"):
                    worker = Worker(subject, one, Path(folder), timeout)
                    worker.close()
                    found[one.name][kind].append({"seconds": worker.seconds, **worker.first})
    return found


def turns(subject: str, rounds: int, steps: int, timeout: float) -> dict[str, list[float]]:
    """Seconds a step, all contenders alive and taking turns."""
    with tempfile.TemporaryDirectory() as folder:
        workers = {one.name: Worker(subject, one, Path(folder), timeout) for one in CONTENDERS}
        found: dict[str, list[float]] = {name: [] for name in workers}
        names = list(workers)
        for number in range(rounds + 1):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                seconds = workers[name].steps(steps)
                if number:  # the first round warms up
                    found[name].append(seconds)
        for worker in workers.values():
            worker.close()
    return found


def sharded(ranks: int, rounds: int, timeout: float) -> dict[str, Any]:
    """By blocks and whole over simulated cores: graphs, and seconds of the first step, cold."""
    found: dict[str, Any] = {one.name: [] for one in TP}
    for _ in range(rounds):
        for one in TP:
            with tempfile.TemporaryDirectory() as folder:
                worker = Worker("flux2", one, Path(folder), timeout, ranks)
                worker.close()
                found[one.name].append({"seconds": worker.seconds, **worker.first})
    return found


def main() -> None:
    arguments = parser(__doc__, "compile")
    arguments.add_argument("--rounds", type=int, default=3, help="starts of each contender (default 3)")
    arguments.add_argument("--turns", type=int, default=9, help="turns of steps (default 9)")
    arguments.add_argument("--steps", type=int, default=5, help="steps, or pictures, a turn (default 5)")
    arguments.add_argument("--tp", type=int, default=2, help="ranks of the sharded part (default 2)")
    arguments.add_argument("--only", choices=[*SUBJECTS, "tp"], help="one part")
    arguments.add_argument("--worker", help="for the processes this starts")
    chosen = arguments.parse_args()
    if chosen.worker:
        work(json.loads(chosen.worker))
        return
    noise = OtherCpu()
    results: dict[str, Any] = {}
    for subject in SUBJECTS:
        if chosen.only not in (None, subject):
            continue
        results[subject] = {
            "starts": starts(subject, chosen.rounds, chosen.timeout),
            "steps": turns(subject, chosen.turns, chosen.steps, chosen.timeout),
        }
        show(subject, results[subject])
    if chosen.only in (None, "tp"):
        results["tp"] = sharded(chosen.tp, chosen.rounds, chosen.timeout)
        show_sharded(chosen.tp, results["tp"])
    settings = {"rounds": chosen.rounds, "turns": chosen.turns, "steps": chosen.steps, "tp": chosen.tp}
    finish(chosen.output, "compile", settings, results, noise)


def show(subject: str, found: dict[str, Any]) -> None:
    def middle(name: str, kind: str) -> float:
        return statistics.median(one["seconds"] for one in found["starts"][name][kind])

    def ratio(name: str, other: str) -> float:
        pairs = zip(found["steps"][name], found["steps"][other], strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)

    rows = []
    for one in CONTENDERS:
        cold, warm = (found["starts"][one.name][kind][0]["counts"] for kind in ("cold", "warm"))
        eager = f"{one.device} eager"
        rows.append(
            [
                one.name,
                f"{middle(one.name, 'cold'):.2f}",
                f"{middle(one.name, 'warm'):.2f}",
                f"{middle(one.name, 'warm') / middle(eager, 'warm'):.2f}",
                f"{cold['compiled']} / {cold['found']}",
                f"{warm['compiled']} / {warm['found']}",
                f"{1000 * statistics.median(found['steps'][one.name]):.1f}",
                f"{ratio(one.name, eager):.2f}",
                f"{ratio(one.name, 'cpu inductor'):.2f}",
            ]
        )
    unit = "picture" if subject == "bundled" else "step"
    columns = (
        "",
        "cold s",
        "warm s",
        "warm / eager's",
        "compiled / found, cold",
        "warm",
        f"ms a {unit}",
        "/ eager",
        "/ inductor",
    )
    table(f"{subject}: seconds from the start of the process to the first {unit}, and a {unit} later", columns, rows)


def show_sharded(ranks: int, found: dict[str, Any]) -> None:
    rows = [
        [
            name,
            f"{statistics.median(one['seconds'] for one in runs):.2f}",
            f"{statistics.median(one['first'] for one in runs):.2f}",
            str(runs[0]["counts"]["graphs"]),
        ]
        for name, runs in found.items()
    ]
    table(f"{ranks} simulated cores, 4 + 8 blocks, cold", ("", "seconds", "first step", "graphs on rank 0"), rows)


if __name__ == "__main__":
    main()
