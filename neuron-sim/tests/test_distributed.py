"""Process groups on the device: two ranks for what needs several, one process for the rest."""

import os
import re
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


# What goes wrong: a clear error on the rank that can tell, never a hang. Each case runs in a child of one process,
# forked before the device is used, because most of a case's time would be importing torch.

CASES = """
import datetime, os, signal, time, traceback
import torch, torch.distributed as dist
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
soon = datetime.timedelta(seconds=5)

def init(number, **options):
    store = dist.HashStore()
    if size > 1:
        store = dist.TCPStore("localhost", int(os.environ["MASTER_PORT"]), is_master=False)
        store = dist.PrefixStore(str(number), store)
    dist.init_process_group("neuron", store=store, rank=rank, world_size=size, **options)

for number, (variables, code) in enumerate({cases!r}):
    child = os.fork()
    if child == 0:
        os.environ.update(variables)
        try:
            exec(compile(code, f"<case {{number}}>", "exec"))
        except Exception as error:
            print(f"[{{number}}] {{type(error).__name__}}: {{error}}", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
print("fine")
"""


def test_ranks_that_do_not_come_together(run_ranks):
    on_core = "os.environ['NEURON_RT_VISIBLE_CORES'] = {}[rank]; init(number, timeout=soon)"
    cases = {
        on_core.format(("0", "8")): "NeuronRuleError: no such group on trn2.48xlarge (ranks 0, 1): its chips 0, 2 ",
        on_core.format(("5", "5")): "NeuronSimError: core 5 is in use by process",
        "os.environ['LOCAL_RANK'] = '3'; init(number)": "are both on core 3; give each its own in NEURON_RT_VISIBLE",
        "os.environ['NEURON_SIM_INSTANCE'] = ('trn2.48xlarge', 'trn2.3xlarge')[rank]; init(number)": (
            "NeuronSimError: the ranks disagree on NEURON_SIM_INSTANCE: trn2.48xlarge on rank 0; trn2.3xlarge on rank 1"
        ),
        "init(number, timeout=soon) if rank == 0 else time.sleep(6)": (
            "NeuronSimError: rank 1 of 2 did not come to make the process group within 5 s (rank 0, which waited, is"
        ),
        """
init(number, timeout=soon)
if rank == 1:
    time.sleep(9)
    os._exit(0)
dist.all_reduce(torch.ones(4, device="neuron"))
""": "all_reduce SUM of 4 float32 (collective 1 of its group) timed out: rank 1 did not come to it; rank 0 waited",
        """
init(number)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(4, device="neuron"))
""": "ended before it came to it, and may have told an error",
    }
    done = run_ranks(CASES.format(cases=[({}, code) for code in cases]))
    for number, words in enumerate(cases.values()):
        assert f"[{number}] " in done.stdout, done.stdout + done.stderr
        assert words in done.stdout, done.stdout


def alone(python, *cases):
    """What each case, extra variables and code, printed or raised as the only rank there is."""
    done = python(CASES.format(cases=list(cases)), "-W", "ignore", OMP_NUM_THREADS="1")
    lines = done.stdout.splitlines()
    assert lines.pop() == "fine", done.stderr
    assert len(lines) == len(cases), done.stdout + done.stderr
    return lines


USE = """
init(number)
x = torch.ones(2, device="neuron")
dist.all_reduce(x)
dist.barrier()
print(torch.neuron.device_count(), x.tolist(), torch.neuron.current_device(), flush=True)
"""
USED = "1 [1.0, 1.0] 0"


def test_one_rank_alone(python):
    looks = "assert torch.neuron.is_available() and torch.neuron.device_count() == 64; torch.manual_seed(0)"
    again = "init(number); dist.destroy_process_group()"
    assert alone(
        python,
        ({"LOCAL_RANK": "3"}, USE),
        ({"NEURON_RT_NUM_CORES": "1"}, USE),
        ({"LOCAL_RANK": "0"}, looks + USE),
        ({"LOCAL_RANK": "0"}, again + USE),
        ({"NEURON_SIM_STRICT": "off"}, USE),
        ({"NEURON_SIM_CHECK_COLLECTIVES": "0", "LOCAL_RANK": "0"}, USE),
    ) == [USED, USED, USED, USED, "64 [1.0, 1.0] 0", USED]


def test_one_rank_that_cannot_start(python):
    first = {"LOCAL_RANK": "0"}
    cases = [
        (
            first,
            "torch.ones(1, device='neuron')" + USE,
            'init_process_group("neuron") must come before any other',
        ),
        ({}, USE, "a rank has exactly one core, and this process sees 64"),
        ({"NEURON_RT_VISIBLE_CORES": "1-3"}, USE, "a rank has exactly one core, and this process sees 3"),
        ({"LOCAL_RANK": "64"}, USE, "NEURON_RT_VISIBLE_CORES asks for core 64, but trn2.48xlarge has 64 logical cores"),
        (first, "init(number); torch.ones(1, device='neuron:1')", "invalid neuron device index 1: this process sees 1"),
        (first | {"NEURON_SIM_INSTANCE": "p5"}, USE, "unknown instance type 'p5'"),
        (first | {"NEURON_SIM_PROFILE": "sdk-1"}, USE, "unknown profile 'sdk-1'"),
        (first | {"NEURON_SIM_MACHINE": "../up"}, USE, "NEURON_SIM_MACHINE='../up' cannot be read"),
    ]
    said = alone(python, *[(variables, code) for variables, code, _ in cases])
    for line, (_, _, words) in zip(said, cases, strict=True):
        assert words in line
    assert re.search(r"\[init_process_group at <string>:\d+; rule first_use of profile sdk-2.33; call init", said[0])


def test_collectives_after_a_fork(python):
    after = """
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
    assert alone(python, ({"LOCAL_RANK": "0"}, USE + after)) == [USED]


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
