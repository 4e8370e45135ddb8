"""Forks, seeds before the first use, the command line, and ranks."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


def test_use_after_fork_is_an_error_not_a_crash(python):
    program = """
import os, torch
x = torch.ones(2, device="neuron")
if (child := os.fork()) == 0:
    said = []
    for call in (lambda: torch.ones(1, device="neuron"), lambda: x + 1, lambda: torch.neuron.set_device(0), x.cpu):
        try:
            call()
        except RuntimeError as error:
            said.append(str(error).startswith("Cannot re-initialize Neuron runtime in forked subprocess"))
    torch.manual_seed(0)
    fine = torch.ones(3).sum().item() == 3
    del x
    os._exit(0 if said == [True] * 4 and fine and torch.neuron._is_in_bad_fork() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert python(program).stdout == "0\n"


def test_fork_before_use_is_fine(python):
    program = """
import os, torch
torch.manual_seed(0)
if (child := os.fork()) == 0:
    os._exit(int(torch.ones(2, device="neuron").sum().item() != 2))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), torch.neuron.is_initialized())
"""
    assert python(program).stdout == "0 False\n"


def test_seeding_starts_nothing_and_is_remembered(python):
    program = """
import os, torch
torch.manual_seed(7)
print(torch.neuron.is_initialized(), torch.neuron.device_count())
os.environ["NEURON_RT_VISIBLE_CORES"] = "2-3"
print(torch.neuron.device_count(), torch.neuron.initial_seed(), torch.neuron.device_count())
"""
    assert python(program).stdout == "False 64\n2 7 2\n"


def test_no_message_at_exit_with_tensors_alive(python):
    done = python(
        "import torch; x = torch.ones(2, device='neuron', requires_grad=True); (x * 2).sum().backward(); g = x.grad"
    )
    assert done.stderr == ""


def neuron_sim(*arguments, **variables):
    import os

    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NEURON_", "TORCH_NEURONX"))} | variables
    command = [sys.executable, "-m", "neuron_sim.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_doctor():
    done = neuron_sim("doctor", "--json", NEURON_SIM_INSTANCE="trn2.3xlarge")
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout)
    assert found["device"] == "registered"
    assert found["instance"] == "trn2.3xlarge"
    assert found["logical_cores_visible"] == [0, 1, 2, 3]
    assert found["environment"] == {"NEURON_SIM_INSTANCE": "trn2.3xlarge"}
    text = neuron_sim("doctor")
    assert text.returncode == 0
    assert "trn2.48xlarge" in text.stdout


def test_doctor_tells_what_is_wrong():
    done = neuron_sim("doctor", NEURON_SIM_PROFILE="sdk-1")
    assert done.returncode == 1
    assert "unknown profile 'sdk-1'" in done.stdout
    assert neuron_sim("doctor", NEURON_SIM="0").returncode == 1
    assert neuron_sim("nothing").returncode == 2


RANK = """
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("neuron")
rank, size = dist.get_rank(), dist.get_world_size()
assert torch.neuron.device_count() == 1 and torch.neuron.current_device() == 0
x = torch.full((4,), float(rank + 1), device="neuron")
dist.all_reduce(x)
assert x.cpu().tolist() == [3.0] * 4
gathered = [torch.empty(4, device="neuron") for _ in range(size)]
dist.all_gather(gathered, torch.full((4,), float(rank), device="neuron"))
assert [g[0].item() for g in gathered] == [0, 1]
out = torch.empty(2, device="neuron")
dist.reduce_scatter_tensor(out, torch.arange(4.0, device="neuron"))
assert out.cpu().tolist() == [4.0 * rank, 4.0 * rank + 2]
y = torch.full((2,), float(rank), device="neuron")
dist.broadcast(y, 1)
assert y.cpu().tolist() == [1, 1]
work = dist.all_reduce(y, async_op=True)
work.wait()
assert y.cpu().tolist() == [2, 2]
dist.barrier()
mesh = DeviceMesh("neuron", [0, 1])
total = fc.all_reduce(torch.ones(3, device="neuron"), "sum", mesh)
assert (total * 1).cpu().tolist() == [2, 2, 2] and total.device.type == "neuron"
together = fc.all_gather_tensor(torch.full((1,), float(rank), device="neuron"), 0, mesh)
assert (together * 1).cpu().tolist() == [0, 1]
weight = distribute_tensor(torch.arange(8.0, device="neuron").view(4, 2), mesh, [Shard(0)])
assert (weight @ torch.ones(2, 1, device="neuron") if False else weight).full_tensor().cpu().sum() == 28
dist.destroy_process_group()
print("fine")
"""


@pytest.mark.timeout(180)
def test_two_ranks(tmp_path):
    import os

    program = tmp_path / "rank.py"
    program.write_text(textwrap.dedent(RANK))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NEURON_", "LOCAL_RANK"))}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*torchrun, str(program)],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("fine") == 2


def test_the_bundled_pipeline_paints_the_hosts_picture(python):
    pytest.importorskip("diffusers")
    model = Path(__file__).parents[2] / "src/vitrail/bundled/model"
    if not model.exists():
        pytest.skip("no bundled model beside this package")
    program = f"""
import torch
from diffusers import Flux2KleinPipeline
pictures = []
for device in ("cpu", "neuron"):
    pipe = Flux2KleinPipeline.from_pretrained({str(model)!r}, dtype=torch.float32).to(device)
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    call = dict(prompt="a red heart", height=64, width=64, num_inference_steps=4, guidance_scale=1.0)
    pictures.append(pipe(**call, generator=generator, output_type="pt").images.float().cpu())
print((pictures[0] - pictures[1]).abs().max().item() * 255 < 1, pictures[0].std().item() > 0.01)
"""
    assert python(program, "-W", "ignore").stdout == "True True\n"
