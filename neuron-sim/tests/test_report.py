"""`neuron-sim report` and NEURON_SIM_REPORT: what is told, what is judged, and which exit code."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from neuron_sim.report import merged, recorder, text, verdict


@pytest.fixture
def report(tmp_path):
    """Runs a program under `neuron-sim report`; returns exit code, the report's data and stderr."""

    def run(program, *options, launcher=(), **variables):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(program))
        kept = {k: v for k, v in os.environ.items() if not k.startswith("NEURON_")}
        output = tmp_path / "report.json"
        command = [sys.executable, "-m", "neuron_sim.cli", "report", "--json", "-o", str(output), *options, "--"]
        done = subprocess.run(
            [*command, *(launcher or [sys.executable]), str(script)],
            env=kept | {"OMP_NUM_THREADS": "1"} | variables,
            capture_output=True,
            text=True,
            timeout=170,
            cwd=tmp_path,
        )
        return done.returncode, json.loads(output.read_text()), done.stderr

    return run


MODEL = """
import torch
x = torch.ones(4, 4, device="neuron")
for _ in range(3):
    x = x @ x
    x = x.roll(1)
half = torch.zeros(2, dtype=torch.float64, device="neuron")
print(x.sum().item())
"""


def test_a_program_that_falls_back(report):
    code, found, _ = report(MODEL, "--instance", "trn2.3xlarge")
    assert (code, found["verdict"]["word"], found["verdict"]["instance"]) == (0, "falls back", "trn2.3xlarge")
    assert "3 times an operator ran on the host, from 1 line: aten::roll" in found["verdict"]["why"][0]
    assert "float64 is not supported" in found["verdict"]["why"][1]
    assert found["operators"]["fallen_back"] == {"aten::roll": 3}
    assert found["operators"]["native"]["aten::mm"] == 3
    assert found["programs"]["by_operator"]["aten::mm"] == 1
    rules = {entry["rule"]: entry for entry in found["rules"]}
    assert (rules["fallback"]["line"], rules["fallback"]["count"]) == (6, 3)
    assert rules["float64"]["line"] == 7
    assert rules["float64"]["file"].endswith("script.py")
    assert found["host_syncs"]["by_kind"] == {"item": 1}
    assert [(e["kind"], e["line"], e["count"]) for e in found["host_syncs"]["by_line"]] == [("item", 8, 1)]
    (process,) = found["processes"]
    assert process["memory"][0]["peak_bytes"] >= 128
    assert process["memory"][0]["capacity_bytes"] == 24 << 30
    assert process["ended"] == {"how": "finished"}
    code, found, _ = report(MODEL, "--no-fallbacks")
    assert (code, found["verdict"]["word"]) == (3, "refused")


def test_a_program_that_is_refused(report):
    code, found, stderr = report(
        """
        import torch
        x = torch.ones(4, device="neuron")
        def wrapped():
            try:
                return x + torch.ones(4)
            except RuntimeError as error:
                raise ValueError("the model failed") from error
        wrapped()
        """
    )
    assert (code, found["verdict"]["word"]) == (3, "refused")
    assert "Non-scalar tensor arg1 is on cpu device, expected neuron" in found["verdict"]["why"][0]
    assert "script.py:6" in found["verdict"]["why"][0]
    assert "ValueError: the model failed" in stderr  # the program's own words are not swallowed
    assert found["program_exit_code"] == 1
    code, found, _ = report(
        "import torch; torch.empty(1 << 33, device='neuron', dtype=torch.int8)", NEURON_SIM_MEMORY="1GiB"
    )
    assert (code, found["verdict"]["word"]) == (3, "refused")
    assert "NRT allocation failed" in found["verdict"]["why"][0]


def test_a_failure_of_the_programs_own_is_told_apart(report):
    code, found, _ = report(
        """
        import sys, torch
        x = torch.ones(4, device="neuron")
        try:
            x + torch.ones(4)
        except RuntimeError:
            pass
        raise KeyError("mine")
        """
    )
    assert (code, found["verdict"]["word"]) == (1, "failed")
    assert "the program's own failure: KeyError: 'mine'" in found["verdict"]["why"][0]
    assert "once refused, and survived by the program" in found["verdict"]["why"][1]
    code, found, _ = report("import sys, torch; torch.ones(2, device='neuron'); sys.exit(3)")
    assert (code, found["program_exit_code"], found["verdict"]["word"]) == (1, 3, "failed")


def test_a_program_that_leaves_by_os_exit_after_a_refusal_is_refused(report):
    program = """
    import os, torch
    x = torch.ones(4, device="neuron")
    if os.fork() == 0:
        os._exit(0)
    try:
        x + torch.ones(4)
    except RuntimeError:
        os._exit(7)
    """
    code, found, _ = report(program)
    assert (code, found["verdict"]["word"]) == (3, "refused")
    assert len(found["processes"]) == 1
    assert "is on cpu device, expected neuron" in found["verdict"]["why"][0]


def test_two_ranks_are_merged(report):
    code, found, _ = report(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("neuron")
        x = torch.ones(256, device="neuron")
        dist.all_reduce(x)
        dist.destroy_process_group()
        """,
        launcher=[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
    )
    assert (code, found["verdict"]["word"]) == (0, "runs")
    assert [process["rank"] for process in found["processes"]] == [0, 1]
    assert [process["memory"][0]["core"] for process in found["processes"]] == [0, 1]
    assert found["collectives"]["all_reduce"] == {"calls": 2, "bytes": 2 * 1024}


def test_a_rank_that_is_refused_while_another_waits_for_it(report):
    start = time.monotonic()
    code, found, _ = report(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("neuron")
        x = torch.ones(2, device="neuron")
        if dist.get_rank() == 1:
            x + torch.ones(2)
        dist.all_reduce(x)
        """,
        launcher=[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
    )
    assert (code, found["verdict"]["word"]) == (3, "refused")
    assert found["verdict"]["why"][0].startswith("rank 1: Non-scalar tensor arg1 is on cpu device")
    assert len(found["processes"]) == 2
    assert time.monotonic() - start < 90


def test_a_collectives_rule_is_told_with_its_details(rules):
    from neuron_sim import NeuronRuleError, collectives

    rules("sdk-2.33", "warn")
    collectives.reset_counts()
    for _ in range(2):
        with pytest.raises(NeuronRuleError):
            collectives.apply("topology", "init_process_group", "trn1.32xlarge: this one has 4")
    [entry] = recorder.collect()["rules"]
    assert (entry["rule"], entry["action"], entry["count"]) == ("topology", "refuse", 2)
    assert entry["message"].startswith("no such group on trn1.32xlarge: this one has 4 [init_process_group at ")
    collectives.reset_counts()


def test_a_forked_childs_signals_are_its_own(python, tmp_path):
    program = """
import os, signal, time, torch
torch.ones(2, device="neuron")
if (child := os.fork()) == 0:
    time.sleep(30)
    os._exit(0)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
time.sleep(0.2)
print("alive")
"""
    file = tmp_path / "own.json"
    assert python(program, NEURON_SIM_REPORT=str(file)).stdout == "-15\nalive\n"
    assert merged.read(file)["process"]["ended"] == {"how": "finished"}


def test_the_environment_variable(python, tmp_path):
    file = tmp_path / "own.json"
    python("import torch; torch.ones(2, device='neuron')", NEURON_SIM_REPORT=str(file))
    found = merged.merge([merged.read(file)])
    assert found["operators"]["native"]["aten::fill_.Scalar"] == 1
    shown = text.render(found, verdict.judge(found, "trn2.48xlarge", 0, False))
    assert shown.endswith("verdict for trn2.48xlarge: runs")
    assert "\033" not in shown


def test_a_program_that_is_terminated_still_reports(tmp_path):
    file = tmp_path / "own.json"
    program = "import torch, time; torch.ones(2, device='neuron'); print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | {"NEURON_SIM_REPORT": str(file)}, stdout=subprocess.PIPE
    ) as started:
        assert started.stdout.readline() == b"ready\n"
        started.terminate()
        assert started.wait(30) == -signal.SIGTERM
    assert merged.read(file)["process"]["ended"] == {"how": "signal", "signal": "SIGTERM"}


@pytest.mark.parametrize(
    "path, words", [("nowhere/report.json", "is no folder"), (".", "is a folder"), ("file/report.json", "is no folder")]
)
def test_a_report_that_cannot_be_written_is_told_before_the_work(python, tmp_path, path, words):
    (tmp_path / "file").write_text("")
    wish = f"{tmp_path}/{path}"
    done = python("import torch; torch.ones(2, device='neuron')", check=False, NEURON_SIM_REPORT=wish)
    assert done.returncode == 1
    assert f"ConfigurationError: NEURON_SIM_REPORT={wish!r}: the report cannot be written" in done.stderr
    assert words in done.stderr


def cli(*arguments, **variables):
    command = [sys.executable, "-m", "neuron_sim.cli", *arguments]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "arguments, variables, words",
    [
        (["report"], {}, "there is no program to run"),
        (["report", "--", "/no/such/program"], {}, "'/no/such/program' cannot be run"),
        (["report", "--instance", "trn9", "--", "true"], {}, "unknown instance type 'trn9'"),
        (["report", "--", "true"], {"NEURON_SIM_PROFILE": "sdk-1"}, "unknown profile 'sdk-1'"),
        (["report", "--", "true"], {"NEURON_SIM_MEMORY": "x"}, "NEURON_SIM_MEMORY"),
        (["report", "--", "true"], {"NEURON_RT_VISIBLE_CORES": "99"}, "NEURON_RT_VISIBLE_CORES"),
        (["report", "-o", "/no/such/folder/r.json", "--", "true"], {}, "cannot be written to /no/such/folder"),
        (["rules", "--profile", "sdk-1"], {}, "unknown profile 'sdk-1'"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_a_sentence(arguments, variables, words):
    done = cli(*arguments, **variables)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_without_the_device():
    done = cli("report", "--", "true")
    assert done.returncode == 0
    assert done.stdout.endswith("device not used\n  no process of the program used the neuron device\n")
    done = cli("report", "--", "sh", "-c", "exit 9")
    assert (done.returncode, "verdict for trn2.48xlarge: failed" in done.stdout) == (9, True)
    done = cli("report", "--", "sh", "-c", "kill -9 $$")
    assert done.returncode == 128 + 9


def test_rules_command():
    from neuron_sim import profiles

    for name in profiles.names():
        found = json.loads(cli("rules", "--profile", name, "--json").stdout)
        assert found["rules"].keys() == profiles.profile(name).rules.keys()
    shown = cli("rules", "--profile", "beta-2.10").stdout
    assert shown.startswith("beta-2.10: ")
    assert "NCC_EVRF004: Complex data types are not supported" in shown
    assert max(map(len, shown.splitlines())) <= 120


def process(rank=None, **ended):
    return {
        "rank": rank, "pid": 1, "seconds": 1.0, "ended": ended or {"how": "finished"}, "host_peak_bytes": 1 << 30,
        "memory": [{"core": 0, "peak_bytes": 1 << 20, "capacity_bytes": 1 << 30, "out_of_memory": 0}],
    }  # fmt: skip


def applied(rule, action, count=1):
    place = {"file": "/x/model.py", "line": 7, "via": "diffusers/models/x.py:3"}
    return {"rule": rule, "action": action, "op": "aten::roll", "count": count, "message": f"{rule}!", **place}


@pytest.mark.parametrize(
    "rules, ended, program_exit, word, code",
    [
        ([], {}, 0, "runs", 0),
        ([applied("cast64", "tell")], {}, 0, "runs", 0),
        ([applied("fallback", "tell")], {}, 0, "falls back", 0),
        ([applied("dynamic_shape", "tell")], {}, 0, "falls back", 0),
        ([applied("complex", "refuse")], {}, 0, "runs", 0),  # the program caught it
        ([applied("complex", "refuse")], {}, 1, "refused", 3),  # a test runner ended with 1
        (
            [applied("complex", "refuse")],
            {"how": "exception", "type": "E", "message": "m", "refusal": None},
            1,
            "failed",
            1,
        ),
        ([], {"how": "exception", "type": "E", "message": "m", "refusal": "no"}, 1, "refused", 3),
        ([], {"how": "signal", "signal": "SIGTERM"}, 143, "failed", 143),
    ],
)
def test_verdicts(rules, ended, program_exit, word, code):
    found = {
        "format": recorder.FORMAT, "versions": {"neuron-sim": "0", "torch": "2"}, "profile": "p", "strictness": "warn",
        "settings": {}, "instance": "trn2.48xlarge", "processes": [process(**ended)],
        "operators": {"native": {"aten::add": 2}, "fallen_back": {}},
        "programs": {"compiled": 1, "disk_hits": 0, "memory_hits": 1, "rewritten": 0, "disk": None, "by_operator": {}},
        "compiler": None,
        "rules": rules, "host_syncs": {"by_kind": {}, "by_line": []}, "collectives": {},
    }  # fmt: skip
    judged = verdict.judge(found, "trn2.48xlarge", program_exit, no_fallbacks=False)
    assert (judged.word, judged.exit_code) == (word, code)
    assert f"verdict for trn2.48xlarge: {word}" in text.render(found, judged)


def test_host_memory_is_compared_with_the_instances():
    found = {"rules": [], "processes": [process(rank) | {"host_peak_bytes": 10 << 30} for rank in range(4)]}
    judged = verdict.judge(found, "inf2.xlarge", 0, no_fallbacks=False)
    assert "the processes held 40.0 GiB on the host, and inf2.xlarge has 16" in judged.why[0]


def test_launches_that_block_are_synchronisations(monkeypatch):
    import torch

    from neuron_sim import counts, reset_counts

    x = torch.ones(2, device="neuron")
    reset_counts()
    x + x
    assert "launch" not in counts().host_syncs
    monkeypatch.setenv("NEURON_LAUNCH_BLOCKING", "1")
    assert counts().host_syncs["launch"] == 1
    start, end = (torch.neuron.Event(enable_timing=True) for _ in range(2))
    start.record()
    time.sleep(0.01)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 10
    assert counts().host_syncs["event"] == 1
