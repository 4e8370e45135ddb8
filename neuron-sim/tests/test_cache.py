"""Per-op compilation: what is compiled, what is a hit, and a cache folder that cannot be trusted or written."""

import errno
import fcntl
import json
import os
import re
import warnings
from pathlib import Path

import pytest
import torch

from neuron_sim import NeuronRuleError, NeuronRuleWarning, cli, counts, env, neffcache, opcache, reset_counts
from neuron_sim.errors import NeuronSimWarning

D = "neuron"


@pytest.fixture
def cache(tmp_path, monkeypatch, rules):
    """A cache of this test's own, empty; call it to begin as a new process would."""
    monkeypatch.setenv(env.NEFF_CACHE_DIR.name, str(tmp_path / "neff"))
    monkeypatch.setenv(env.NEFF_LOCAL_CACHE_DIR.name, str(tmp_path / "locks"))
    rules()

    def begin():
        reset_counts()
        return opcache.start_again()

    yield begin
    monkeypatch.undo()
    opcache.start_again()


def work(size=3):
    x = torch.zeros(size, device=D)
    return (x * 2).sum()


def test_compiled_once_then_found_in_memory_then_on_disk(cache):
    first = cache()
    work()
    compiled = dict(first.compiled_by_op)
    assert compiled == {"aten::zero_": 1, "aten::mul.Tensor": 1, "aten::sum.dim_IntList": 1}
    assert counts().cache_hits == 0
    work()
    assert (first.compiled_by_op, first.disk_hits, counts().cache_hits) == (compiled, 0, 3)
    work(4)
    assert first.compiles == 6
    second = cache()
    work()
    work(4)
    assert (second.compiles, second.disk_hits) == (0, 6)


@pytest.mark.parametrize(
    "one, other, is_the_same",
    [
        (lambda x: x * 2.0, lambda x: x * 3.0, True),  # a number that meets a tensor is an input
        (lambda x: x.sum(0), lambda x: x.sum(1), False),
        (lambda x: x.softmax(-1), lambda x: x.to(torch.bfloat16).softmax(-1), False),
        (lambda x: x.clamp(0, 1), lambda x: x.clamp(0, 2), False),
        (lambda x: x + x, lambda x: x + x.to("neuron:1").to(D), True),
        (lambda x: x @ x, lambda x: x.t() @ x, True),
    ],
)
def test_what_makes_another_program(cache, one, other, is_the_same):
    used = cache()
    x = torch.ones(2, 2).to(D)
    one(x)
    before = used.compiles
    other(x)
    casts = "aten::_copy_from" in used.compiled_by_op
    assert (used.compiles - casts == before) == is_the_same


def test_views_fallbacks_and_refusals_compile_nothing(cache):
    used = cache()
    x = torch.ones(4).to(D)
    x[1:].view(3, 1).t()
    with pytest.warns(NeuronRuleWarning, match="aten::roll"):
        x.roll(1)
    x.sum().item()
    assert set(used.compiled_by_op) == {"aten::sum.dim_IntList"}
    with pytest.raises(RuntimeError, match="size"):
        x @ torch.ones(5).to(D)
    with pytest.raises(NeuronRuleError):
        x + torch.ones(4)
    assert set(used.compiled_by_op) == {"aten::sum.dim_IntList"}


def test_the_layout_and_who_may_write(cache, tmp_path):
    used = cache()
    work()
    files = used.disk.files()
    assert len(files) == 3
    for file in files:
        assert re.fullmatch(
            r"([0-9a-f]{2})/([0-9a-f]{2})/\1\2[0-9a-f]{60}\.neff", str(file.relative_to(used.disk.folder))
        )
        for path in (file, file.parent, file.parent.parent, used.disk.folder):
            assert path.stat().st_mode & 0o022 == 0
        purpose = used.disk.check(file).purpose
        assert purpose["kind"] == "operator"
        assert str(tmp_path) not in json.dumps(purpose)
        assert str(os.getpid()) not in json.dumps(purpose)
    assert not used.disk.unfinished()


def test_every_process_and_rank_has_the_same_keys(cache, python):
    used = cache()
    work()
    program = f"""
import torch
from neuron_sim import opcache
x = torch.zeros(3, device={D!r})
(x * 2).sum()
print(opcache.current().compiles, opcache.current().disk_hits)
"""
    where = {name: os.environ[name] for name in (env.NEFF_CACHE_DIR.name, env.NEFF_LOCAL_CACHE_DIR.name)}
    done = python(program, NEURON_RT_VISIBLE_CORES="5", RANK="5", PYTHONHASHSEED="7", **where)
    assert done.stdout == "0 3\n"
    assert len(used.disk.files()) == 3


def spoil_truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:40])


def spoil_empty(file: Path) -> None:
    file.write_bytes(b"")


def spoil_longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"more")


def spoil_pickle(file: Path) -> None:
    import pickle

    file.write_bytes(pickle.dumps({"format": neffcache.FORMAT}))


def spoil_exchanged(file: Path) -> None:
    header = json.loads(file.read_text())
    header["purpose"]["call"] = "aten::other()"
    file.write_text(json.dumps(header) + "\n")


def spoil_deep(file: Path) -> None:
    file.write_text("[" * 100_000)


def spoil_link(file: Path) -> None:
    other = file.with_name("elsewhere")
    file.rename(other)
    file.symlink_to(other)


def spoil_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


SPOILERS = [
    spoil_truncated, spoil_empty, spoil_longer, spoil_pickle, spoil_exchanged, spoil_deep, spoil_link, spoil_pipe,
]  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILERS)
def test_a_file_that_is_not_what_its_name_says_is_told_once_and_written_again(cache, spoil):
    used = cache()
    work()
    for file in used.disk.files():
        spoil(file)
    used = cache()
    with pytest.warns(NeuronSimWarning, match="not what its name says and is written again") as told:
        work()
    assert len(told) == 1
    assert (used.compiles, used.rewritten) == (3, 3)
    assert all(used.disk.check(file) for file in used.disk.files())
    used = cache()
    work()
    assert (used.compiles, used.disk_hits) == (0, 3)


def no_folder(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(env.NEFF_CACHE_DIR.name, str(tmp_path / "file"))


def no_lock_folder(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(env.NEFF_LOCAL_CACHE_DIR.name, str(tmp_path / "file"))


def full_disk(_, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(neffcache.os, "replace", full)


def read_only(_, monkeypatch):
    original = os.open

    def refuse(path, flags, *mode, **more):
        if flags & os.O_CREAT and str(path).endswith(".new"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return original(path, flags, *mode, **more)

    monkeypatch.setattr(neffcache.os, "open", refuse)


@pytest.mark.parametrize("trouble", [no_folder, no_lock_folder, full_disk, read_only])
def test_without_a_usable_folder_it_goes_on_without_and_tells_once(cache, tmp_path, monkeypatch, trouble):
    trouble(tmp_path, monkeypatch)
    used = cache()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert work().item() == 0
        work(4)
    assert [w.category for w in told] == [NeuronSimWarning]
    assert "the cache cannot be used and nothing more is kept" in str(told[0].message)
    assert used.compiles == 6
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".neff", ".new")]


@pytest.mark.parametrize("variable", [env.DISABLE_NEFF_CACHE, env.NEFF_DISABLE_CACHE])
def test_both_variables_disable_it(cache, tmp_path, monkeypatch, variable):
    monkeypatch.setenv(variable.name, "1")
    used = cache()
    work()
    work()
    assert (used.disk, used.compiles, counts().cache_hits) == (None, 3, 3)
    assert not (tmp_path / "neff").exists()


def test_a_lock_that_does_not_come(cache, tmp_path, monkeypatch):
    monkeypatch.setenv(env.NEFF_LOCK_TIMEOUT.name, "0.02")
    used = cache()
    (tmp_path / "locks").mkdir()
    held = [os.open(tmp_path / "locks" / f"{number:02x}.lock", os.O_CREAT | os.O_RDWR) for number in range(256)]
    for lock in held:
        fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.warns(NeuronSimWarning, match="held a lock in .* for longer than 0.02 s") as told:
        work()
    for lock in held:
        os.close(lock)
    assert len(told) == 1
    assert (used.compiles, len(used.disk.files())) == (3, 3)


def test_the_compilers_flags_are_part_of_the_key(cache, monkeypatch):
    cache()
    work()
    monkeypatch.setenv(env.CC_FLAGS.name, "--auto-cast=none")
    used = cache()
    work()
    assert used.compiles == 3


def test_the_command(cache, tmp_path, capsys):
    used = cache()
    work()
    (used.disk.folder / "notes.txt").write_text("not of the cache")
    assert cli.main(["cache", "list"]) == 0
    assert "aten::mul.Tensor(Float[3], Long[])" in capsys.readouterr().out
    assert cli.main(["cache", "stat", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["files"], found["bad"], found["kinds"]) == (3, 0, {"operator": 3})
    assert cli.main(["cache", "stat"]) == 0
    assert cli.main(["cache", "verify"]) == 0
    spoil_truncated(used.disk.files()[0])
    capsys.readouterr()
    assert cli.main(["cache", "verify"]) == 1
    assert "3 files, 1 bad" in capsys.readouterr().out
    assert cli.main(["cache", "clear"]) == 0
    assert "3 files removed" in capsys.readouterr().out
    assert [p.name for p in used.disk.folder.rglob("*") if p.is_file()] == ["notes.txt"]
    assert cli.main(["cache", "clear", "--dir", str(tmp_path / "nowhere")]) == 0
    assert cli.main(["cache", "list", "--dir", str(used.disk.folder / "notes.txt")]) == 2
    assert "is no folder; name one that is" in capsys.readouterr().err


def test_a_warning_turned_error_leaves_a_result_that_can_be_computed_again(cache, tmp_path, monkeypatch):
    no_folder(tmp_path, monkeypatch)
    cache()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(NeuronSimWarning):
            work()
        assert work().item() == 0
