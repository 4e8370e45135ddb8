"""The cache of compiled graphs: found again by other processes, shared by ranks, and nothing in it can be executed."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
import warnings
from pathlib import Path

import pytest
import torch
from test_compile import Block, compiled
from test_distributed import run_ranks  # noqa: F401  a fixture

from neuron_sim import cli, env, neffcache, opcache
from neuron_sim.compile import artifacts, graphdata, program, record, shortcut
from neuron_sim.errors import NeuronSimWarning
from neuron_sim.neffcache import Entry, EntryError

D = "neuron"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Begins as a new process would, with this test's own cache; returns the cache on disk."""
    monkeypatch.setenv(env.NEFF_CACHE_DIR.name, str(tmp_path / "neff"))
    monkeypatch.setenv(env.NEFF_LOCAL_CACHE_DIR.name, str(tmp_path / "locks"))
    torch.neuron.init()

    def begin():
        torch._dynamo.reset()
        artifacts.forget_loaded()
        shortcut.forget()
        record.forget()
        return opcache.start_again().disk

    yield begin
    monkeypatch.undo()
    begin()


def forward():
    torch.manual_seed(0)
    model, x = Block().to(D).eval(), torch.randn(2, 4, 8).to(D)
    with torch.no_grad():
        return [t.cpu() for t in compiled(model)(x)[:2]]


def entries(disk, kind):
    return [disk.check(path) for path in disk.files() if disk.check(path).purpose["kind"] == kind]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_second_process_compiles_nothing_and_runs_no_aot_autograd(start):
    disk = start()
    first = forward()
    assert vars(artifacts.totals) == {"aot_autograd": 1, "compiled": 1, "disk_hits": 0, "memory_hits": 0}
    assert [len(entries(disk, kind)) for kind in ("graph", "trace")] == [1, 1]
    start()
    assert same(forward(), first)
    assert vars(artifacts.totals) == {"aot_autograd": 0, "compiled": 0, "disk_hits": 1, "memory_hits": 0}
    torch._dynamo.reset()
    assert same(forward(), first)
    assert vars(artifacts.totals) == {"aot_autograd": 0, "compiled": 0, "disk_hits": 1, "memory_hits": 1}


@pytest.mark.parametrize(
    "function, needs_aot",
    [
        (lambda x: (x, x[1:], x + 1), False),
        (lambda x: x.add_(1) * 2, True),  # an input is written to
        (lambda x: torch.ops.prims.sin(x), False),
        (lambda x: torch.rand_like(x) * 0, False),
    ],
)
def test_the_way_around_aot_autograd_gives_the_same(start, function, needs_aot):
    results = []
    for _ in range(2):
        start()
        x = torch.ones(3, device=D)
        found = compiled(function)(x)
        for tensor in found if isinstance(found, tuple) else (found,):
            if tensor is not found[0] and tensor.shape == (2,):
                tensor[0] = 5
        results.append([x.cpu(), *(t.cpu() for t in (found if isinstance(found, tuple) else (found,)))])
        assert not isinstance(found, tuple) or found[0] is x
    assert same(*results)
    assert artifacts.totals.aot_autograd == needs_aot


def test_what_is_told_is_told_by_a_process_that_finds_it_too(start):
    messages = []
    for _ in range(2):
        start()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            compiled(lambda x: torch.arange(3, device=x.device, dtype=torch.float64) + x)(torch.ones(3, device=D))
        messages.append([str(w.message) for w in told if "float64" in str(w.message)])
    assert artifacts.totals.aot_autograd == 0
    assert messages[0] or record.graphs()[0].findings  # told once a line and process; the record has it every time
    assert any("float64" in finding for finding in record.graphs()[0].findings)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: compiled(lambda x: x * 3.0)(x),
        lambda x: compiled(lambda x: x * 2.0)(x.to(torch.bfloat16)),
        lambda x: compiled(lambda x: x * 2.0)(x[:2]),
        lambda x: compiled(lambda x: x * 2.0)(x[::2]),
    ],
)
def test_what_makes_another_graph(start, change):
    start()
    x = torch.ones(4, device=D)
    compiled(lambda x: x * 2.0)(x)
    torch._dynamo.reset()
    compiled(lambda x: x * 2.0)(x)
    assert (artifacts.totals.compiled, artifacts.totals.memory_hits) == (1, 1)
    change(x)
    assert artifacts.totals.compiled == 2


def test_flags_of_the_compiler_are_part_of_the_key(start, monkeypatch):
    for flags in ("-O1", "-O2", "-O1"):
        monkeypatch.setenv(env.CC_FLAGS.name, flags)
        start()
        forward()
    assert (artifacts.totals.compiled, artifacts.totals.disk_hits) == (0, 1)


def spoil(disk, kind, how):
    for path in disk.files():
        entry = disk.check(path)
        if entry.purpose["kind"] == kind:
            how(disk, path, entry)


def truncate(_, path, __):
    path.write_bytes(path.read_bytes()[:-20])


def replace_payload(disk, path, entry):
    path.unlink()
    disk.write(Entry(entry.purpose, b'{"format": "neuron-sim graph 1"}'))


@pytest.mark.parametrize("kind", ["graph", "trace"])
@pytest.mark.parametrize("how", [truncate, replace_payload])
def test_a_file_that_is_not_what_its_name_says_is_told_and_written_again(start, kind, how):
    first = (start(), forward())[1]
    spoil(opcache.current().disk, kind, how)
    start()
    with pytest.warns(NeuronSimWarning, match=r"is not what its name says and is written again"):
        assert same(forward(), first)
    assert opcache.current().rewritten == 1


def forge(**changes):
    """A payload with one sound operation, changed."""
    operation = {"op": "aten::neg", "overload": "", "operands": [["slot", 0]], "device": False}
    operation |= {"first": 1, "results": 1, "dead": []} | changes.pop("operation", {})
    described = {"dtype": "float32", "shape": [2], "stride": [1], "device": "cpu"}
    data = {"format": graphdata.FORMAT, "slots": 2, "inputs": [described], "constants": [], "groups": 0}
    data |= {"operations": [operation], "outputs": [{"slot": 1, "device": False}]} | changes
    return json.dumps(data).encode() + b"\n"


def test_a_sound_payload_runs():
    (found,) = program.build(forge(), [], 0)([torch.ones(2)])
    assert found.tolist() == [-1, -1]


@pytest.mark.parametrize(
    "payload, why",
    [
        (forge(operation={"op": "os::system"}), "the operator os::system"),
        (forge(operation={"op": "aten::from_file", "operands": [["fixed", "/etc/passwd"]]}), "from_file"),
        (forge(operation={"op": "aten::_reshape_alias"}), "_reshape_alias"),
        (forge(constants=[{"dtype": "float32", "shape": [1 << 60]}]), "cut short"),
        (forge(operation={"op": "aten::no_such"}), "has no operator"),
        (forge(operation={"op": "aten::neg_"}), "writes to its arguments"),
        (forge(operation={"op": ["aten::neg"]}), "no text"),
        (forge(operation={"operands": []}), "takes 1 arguments"),
        (forge(operation={"operands": [["slot", 7]]}), "no slot 7"),
        (forge(operation={"operands": [["slot", "0"]]}), "no slot"),
        (forge(operation={"operands": [["tensors", [0]]]}), "does not take tensors"),
        (forge(operation={"operands": [["fixed", {"pickle": "gASV"}]]}), "unknown kind 'pickle'"),
        (forge(operation={"operands": [["fixed", {"dtype": "__class__"}]]}), "cannot be run"),
        (forge(operation={"operands": [["fixed", "text"]]}), "cannot be run"),
        (forge(operation={"first": 2}), "other results"),
        (forge(operation={"dead": [-1]}), "no slot"),
        (forge(slots=1 << 40), "cannot have"),
        (forge(outputs=[{"slot": 9, "device": False}]), "no slot 9"),
        (forge(groups=1), "for 1 process groups"),
        (forge(constants=[{"dtype": "float32", "shape": [2]}]), "cut short"),
        (forge(constants=[{"dtype": "float32", "shape": [-2]}]), "no count"),
        (forge(format="neuron-sim graph 0"), "of the format"),
        (forge() + b"more", "more than its graph says"),
        (b"\x80\x04K\x01.", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
    ],
)  # fmt: skip
def test_forged_payloads_are_refused(payload, why):
    with pytest.raises(EntryError, match=why):
        program.build(payload, [], 0)


def test_a_value_that_nothing_wrote_is_an_error_and_no_crash():
    payload = forge(slots=3, operation={"operands": [["slot", 2]]})
    with pytest.raises(RuntimeError):
        program.build(payload, [], 0)([torch.ones(2)])


def test_views_cannot_leave_their_memory():
    operands = [["slot", 0], ["fixed", [1000]], ["fixed", [1]], ["fixed", 0]]
    with pytest.raises(RuntimeError, match="out of bounds"):
        program.build(forge(operation={"op": "aten::as_strided", "operands": operands}), [], 0)([torch.ones(2)])


def test_a_folder_that_cannot_be_written(start, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(env.NEFF_CACHE_DIR.name, str(tmp_path / "file" / "neff"))
    start()
    with pytest.warns(NeuronSimWarning, match="the cache cannot be used and nothing more is kept") as told:
        forward()
    assert len([w for w in told if "cannot be used" in str(w.message)]) == 1


def test_export_and_import(start, tmp_path):
    disk = start()
    first = forward()
    assert cli.main(["cache", "export", str(tmp_path / "a.tgz"), "--dir", str(disk.folder)]) == 0
    assert cli.main(["cache", "clear", "--dir", str(disk.folder)]) == 0
    assert cli.main(["cache", "import", str(tmp_path / "a.tgz"), "--dir", str(disk.folder)]) == 0
    start()
    assert same(forward(), first)
    assert (artifacts.totals.compiled, artifacts.totals.aot_autograd) == (0, 0)


def archive_of(path, *members):
    with tarfile.open(path, "w") as archive:
        for name, content, kind in members:
            member = tarfile.TarInfo(name)
            member.type, member.size, member.linkname = kind, len(content), "/etc/passwd"
            archive.addfile(member, io.BytesIO(content))
    return str(path)


def content_of(tmp_path, entry):
    cache = neffcache.NeffCache(tmp_path / "made", tmp_path / "locks", 0)
    cache.write(entry)
    return cache.path(entry.key).read_bytes(), cache.path(entry.key).relative_to(cache.folder).as_posix()


def test_import_refuses_what_is_foreign_or_code(start, tmp_path, capsys):
    disk = start()
    library, name = content_of(tmp_path, Entry({"kind": "graph", "codegen": "aoti"}, b"code", "seal"))
    file = archive_of(
        tmp_path / "bad.tar",
        ("../../evil.neff", b"x", tarfile.REGTYPE),
        ("/tmp/evil.neff", b"x", tarfile.REGTYPE),
        (name.replace(name[:2], "zz", 1), library, tarfile.REGTYPE),
        (name, b"", tarfile.SYMTYPE),
        ("ab/cd/" + "ab" * 32 + ".neff", library, tarfile.REGTYPE),
        (name, library[:-1], tarfile.REGTYPE),
        (name, library, tarfile.REGTYPE),
    )
    assert cli.main(["cache", "import", file, "--dir", str(disk.folder)]) == 1
    assert "it is code; --trust" in capsys.readouterr().out
    assert not disk.files()
    assert not list(tmp_path.rglob("evil*"))
    assert cli.main(["cache", "import", file, "--dir", str(disk.folder), "--trust"]) == 1
    (entry,) = map(disk.check, disk.files())
    assert entry.seal not in (None, "seal")
    (tmp_path / "none.tar").write_bytes(b"no archive")
    assert cli.main(["cache", "import", str(tmp_path / "none.tar"), "--dir", str(disk.folder)]) == 2


def test_a_bounded_cache_forgets_what_was_not_used_for_longest(start, monkeypatch):
    monkeypatch.setenv(env.NEURON_SIM_CACHE_LIMIT.name, "6KiB")
    disk = start()
    x = torch.ones(4, device=D)
    for number in range(12):
        compiled(lambda x, n=number: x * (n + 0.5))(x)
        torch._dynamo.reset()
    assert sum(path.lstat().st_size for path in disk.files()) <= 6 << 10
    assert 2 <= len(disk.files()) < 24


def test_why_it_was_compiled_again(start):
    start()

    def scaled(x, factor):
        return x * factor

    function = compiled(scaled)
    for size, factor in ((2, 1.5), (3, 1.5), (3, 2.5)):
        function(torch.ones(size, device=D), factor)
    first, second, third = record.graphs()
    assert (first.is_recompile, first.changes) == (False, [])
    assert second.changes == ["input x: (2,) float32 → (3,) float32"]
    assert len(third.changes) == 1
    assert "mul(%0, 1.5) → mul(%0, 2.5) at " in third.changes[0]
    assert third.name.endswith("scaled")


COMPILE = """
import sys, torch
from neuron_sim.compile import artifacts
torch.set_num_threads(1)
for number in map(float, sys.argv[1].split(",")):
    torch._dynamo.reset()
    x = torch.arange(4.0).to("neuron")
    found = torch.compile(lambda x: (x * number).relu() + 1, backend="neuron", fullgraph=True)(x)
    assert found.cpu().tolist() == [max(0.0, i * number) + 1 for i in range(4)], found
print(artifacts.totals.compiled, artifacts.totals.aot_autograd)
"""


def hammer(folder, processes, graphs, kills):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NEURON_")} | {
        env.NEFF_CACHE_DIR.name: str(folder / "neff"),
        env.NEFF_LOCAL_CACHE_DIR.name: str(folder / "locks"),
        "OMP_NUM_THREADS": "1",
    }
    chance = random.Random(0)
    started = []
    for _ in range(processes):
        numbers = [str(n + 0.5) for n in range(graphs)]
        chance.shuffle(numbers)
        command = [sys.executable, "-W", "error::UserWarning", "-c", COMPILE, ",".join(numbers)]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    victims = chance.sample(started, kills)
    while victims and not list((folder / "neff").glob("??/??/*.neff")):
        time.sleep(0.005)
    for victim in victims:
        time.sleep(chance.random() * 0.05)
        victim.send_signal(signal.SIGKILL)
    done = [process.communicate(timeout=170) for process in started]
    compiles = 0
    for process, (out, err) in zip(started, done, strict=True):
        if process not in victims:
            assert process.returncode == 0, err.decode()[-2000:]
            compiles += int(out.split()[0])
    return compiles


@pytest.mark.parametrize("processes, graphs, kills", [(3, 3, 1)])
def test_processes_hammer_one_empty_folder(tmp_path, processes, graphs, kills):
    compiles = hammer(tmp_path, processes, graphs, kills)
    assert graphs - kills * graphs <= compiles <= graphs
    assert cli.main(["cache", "verify", "--dir", str(tmp_path / "neff")]) == 0


TENSOR_PARALLEL = """
import torch, torch.distributed as dist, torch.distributed._functional_collectives as fc
from neuron_sim.compile import artifacts
dist.init_process_group("neuron")
rank = dist.get_rank()

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        up, down = torch.randn(8, 4), torch.randn(4, 8)
        self.whole = lambda x: torch.relu(x @ up.T) @ down.T
        self.up = torch.nn.Parameter(up[rank * 4 : rank * 4 + 4])
        self.down = torch.nn.Parameter(down[:, rank * 4 : rank * 4 + 4].contiguous())
    def forward(self, x):
        return fc.all_reduce(torch.relu(x @ self.up.T) @ self.down.T, "sum", dist.group.WORLD)

block = Block()
x = torch.randn(3, 4)
expected = block.whole(x)
block = block.to("neuron")
with torch.no_grad():
    eager = block(x.to("neuron")).cpu()
    found = torch.compile(block, backend="neuron", fullgraph=True, dynamic=False)(x.to("neuron")).cpu()
assert torch.allclose(found, expected, atol=1e-5), (found, expected)
assert torch.allclose(found, eager, atol=1e-5)
print("fine", artifacts.totals.compiled, artifacts.totals.aot_autograd, *artifacts._loaded)
dist.destroy_process_group()
"""


def test_tensor_parallel_ranks_share_an_entry_and_a_second_launch_compiles_nothing(run_ranks, tmp_path):  # noqa: F811
    variables = {
        env.NEFF_CACHE_DIR.name: str(tmp_path / "neff"),
        env.NEFF_LOCAL_CACHE_DIR.name: str(tmp_path / "locks"),
    }
    first, second = (run_ranks(TENSOR_PARALLEL, **variables).stdout.split("fine")[1:] for _ in range(2))
    assert sorted(line.split()[0] for line in first) == ["0", "1"]
    assert [line.split()[:2] for line in second] == [["0", "0"]] * 2
    assert len({tuple(line.split()[2:]) for line in first + second}) == 1
    assert len([p for p in Path(tmp_path, "neff").rglob("*.neff") if b'"kind": "graph"' in p.read_bytes()]) == 1
