"""Process groups on the device: two ranks for what needs several, one process for the rest."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch.distributed as dist

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
def run_ranks(tmp_path):
    """Runs a program, a file of `programs` or text, as ranks; as torchrun does, but without a launcher's process."""

    def run(program, ranks=2, check=True, timeout=170, **variables):
        path = PROGRAMS / program
        if "\n" in program:
            path = tmp_path / "program.py"
            path.write_text(textwrap.dedent(program))
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("NEURON_", "LOCAL_RANK"))} | {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(tmp_path),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        started = [
            subprocess.Popen(
                [sys.executable, str(path)],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | variables,
                stdout=(tmp_path / f"{rank}.out").open("w"),
                stderr=(tmp_path / f"{rank}.err").open("w"),
            )
            for rank in range(ranks)
        ]
        deadline = time.monotonic() + timeout
        while any(rank.poll() is None for rank in started) and time.monotonic() < deadline:
            if any(rank.poll() for rank in started):
                time.sleep(1)  # what befell one rank may be about to be told by another
                break
            time.sleep(0.05)
        for rank in started:
            rank.kill()
        code = max(abs(rank.wait()) for rank in started)
        stdout, stderr = (
            "".join((tmp_path / f"{r}.{kind}").read_text() for r in range(ranks)) for kind in ("out", "err")
        )
        if check:
            assert code == 0, stderr[-4000:]
            assert stdout.count("fine") == ranks, stdout
        return subprocess.CompletedProcess(program, code, stdout, stderr)

    return run


def test_collectives(run_ranks):
    done = run_ranks("collectives.py")
    assert "all_gather_object over a neuron group is unverified on the real device" in done.stderr


def test_refusals(run_ranks):
    run_ranks("refusals.py")


def test_fsdp_and_ddp(run_ranks):
    run_ranks("fsdp.py")


# What goes wrong: a clear error on the rank that can tell, never a hang.


def says(done, *words):
    assert done.returncode != 0
    for word in words:
        assert word in done.stderr, done.stderr[-4000:]


LATE = """
import datetime, os, time
import torch, torch.distributed as dist
if os.environ["RANK"] == "1":
    time.sleep(60)
dist.init_process_group("neuron", timeout=datetime.timedelta(seconds=3))
"""


def test_a_rank_that_is_missing_at_the_start_is_named(run_ranks):
    says(run_ranks(LATE, check=False), "rank 1 of 2 has not come to make the process group within 3 s (rank 0, which")


def test_a_rank_that_is_missing_in_a_collective_is_named(run_ranks):
    program = """
import datetime, os, time
import torch, torch.distributed as dist
dist.init_process_group("neuron", timeout=datetime.timedelta(seconds=3))
if dist.get_rank() == 1:
    time.sleep(60)
dist.all_reduce(torch.ones(4, device="neuron"))
"""
    done = run_ranks(program, check=False)
    says(done, "all_reduce SUM of 4 float32 (collective 1 of its group) timed out: rank 1 did not come to it")


def test_a_rank_that_ends_is_noticed_at_once(run_ranks):
    program = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("neuron")
if dist.get_rank() == 1:
    os.abort()
try:
    dist.all_reduce(torch.ones(4, device="neuron"))
except RuntimeError as error:
    print("noticed", error, flush=True)
"""
    done = run_ranks(program, check=False)
    assert "noticed" in done.stdout, done.stderr[-3000:]


SET = """
import os
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
os.environ[{name!r}] = {values!r}[rank]
dist.init_process_group("neuron")
"""


@pytest.mark.parametrize(
    "name, values, words",
    [
        ("NEURON_RT_VISIBLE_CORES", ("0", "8"), "trn2.48xlarge (ranks 0, 1): its chips 0, 2 are neither an adjacent"),
        ("NEURON_RT_VISIBLE_CORES", ("5", "5"), "core 5 is in use by process"),
        ("LOCAL_RANK", ("3", "3"), "are both on core 3; give each its own in NEURON_RT_VISIBLE_CORES"),
        ("NEURON_SIM_INSTANCE", ("trn2.48xlarge", "trn2.3xlarge"), "disagree on NEURON_SIM_INSTANCE: trn2.48xlarge on"),
    ],
)
def test_ranks_that_cannot_be_a_group(run_ranks, name, values, words):
    says(run_ranks(SET.format(name=name, values=values), check=False), words)


ALONE = """
import torch, torch.distributed as dist
{before}
dist.init_process_group("neuron", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(2, device="neuron")
dist.all_reduce(x)
dist.barrier()
{after}
print(torch.neuron.device_count(), x.tolist(), torch.neuron.current_device())
"""


def alone(python, before="", after="", check=True, **variables):
    return python(ALONE.format(before=before, after=after), "-W", "ignore", check=check, **variables)


def test_one_rank_alone(python):
    assert alone(python, LOCAL_RANK="3").stdout == "1 [1.0, 1.0] 0\n"
    assert alone(python, NEURON_RT_NUM_CORES="1").stdout == "1 [1.0, 1.0] 0\n"
    again = (
        "dist.destroy_process_group(); dist.init_process_group('neuron', store=dist.HashStore(), rank=0, world_size=1)"
    )
    assert alone(python, after=again, LOCAL_RANK="0").stdout == "1 [1.0, 1.0] 0\n"


def test_looking_is_no_use_of_the_device(python):
    looking = "assert torch.neuron.is_available() and torch.neuron.device_count() == 64; torch.manual_seed(0)"
    assert alone(python, before=looking, LOCAL_RANK="0").stdout == "1 [1.0, 1.0] 0\n"


def test_using_the_device_before_the_process_group(python):
    done = alone(python, before="torch.ones(1, device='neuron')", LOCAL_RANK="0", check=False)
    assert 'init_process_group("neuron") must come before any other use of the device' in done.stderr
    assert "<string>:4; rule first_use of profile sdk-2.33" in done.stderr


def test_more_than_one_core(python):
    assert "one core, and this process sees 64" in alone(python, check=False).stderr
    assert "one core, and this process sees 3" in alone(python, check=False, NEURON_RT_VISIBLE_CORES="1-3").stderr
    assert alone(python, NEURON_SIM_STRICT="off").stdout == "64 [1.0, 1.0] 0\n"


def test_cores_that_are_not_there(python):
    refused = alone(python, check=False, LOCAL_RANK="64").stderr
    assert "NEURON_RT_VISIBLE_CORES asks for core 64, but trn2.48xlarge has 64 logical cores" in refused
    refused = alone(python, after="torch.ones(1, device='neuron:1')", LOCAL_RANK="0", check=False).stderr
    assert "invalid neuron device index 1: this process sees 1 core(s)" in refused
    assert "unknown instance type" in alone(python, check=False, LOCAL_RANK="0", NEURON_SIM_INSTANCE="p5").stderr
    assert "unknown profile" in alone(python, check=False, LOCAL_RANK="0", NEURON_SIM_PROFILE="p5").stderr


def test_collectives_after_a_fork(python):
    after = """
import os
if (child := os.fork()) == 0:
    said = []
    for call in (lambda: dist.all_reduce(x), dist.barrier):
        try:
            call()
        except RuntimeError as error:
            said.append("Cannot re-initialize Neuron runtime in forked subprocess" in str(error))
    os._exit(0 if said == [True, True] else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    assert alone(python, after=after, LOCAL_RANK="0").stdout == "1 [1.0, 1.0] 0\n"


HOLD = """
import os, sys, torch
torch.neuron.init()
print("has it", flush=True)
sys.stdin.read()
"""


def test_two_processes_on_one_core(python, tmp_path):
    variables = {"TMPDIR": str(tmp_path), "NEURON_RT_VISIBLE_CORES": "2-3"}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "has it\n"
        use = "import torch; torch.ones(1, device='neuron'); print('fine')"
        taken = python(use, check=False, **variables | {"NEURON_RT_VISIBLE_CORES": "3"})
        assert f"core 3 is in use by process {holder.pid}: a core serves one process at a time" in taken.stderr
        assert python(use, **variables | {"NEURON_RT_VISIBLE_CORES": "4"}).stdout == "fine\n"
        assert python(use, **variables, NEURON_SIM_MACHINE="another").stdout == "fine\n"
        assert python(use, TMPDIR=str(tmp_path)).stdout == "fine\n"  # it named no core
        holder.kill()
        holder.wait()
        assert python(use, **variables).stdout == "fine\n"
    finally:
        holder.kill()
        holder.communicate()


def test_members_on_several_machines_are_not_judged(monkeypatch):
    from neuron_sim.meeting import Member, check_cores, check_topology

    monkeypatch.delenv("NEURON_SIM_INSTANCE", raising=False)
    members = [Member(rank, 1, f"host/{rank}", 8 * rank, "trn2.48xlarge", 2, "sdk-2.33", "warn") for rank in (0, 1)]
    check_cores(members)
    check_topology(members)
