"""`neuron-sim check`: rules by line, graphs, memory, collectives and a verdict, without weights and without running."""

import dataclasses
import json
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from neuron_sim import cli, profiles
from neuron_sim.check import published

pytest.importorskip("vitrail")

KLEIN = {
    "num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680,
    "guidance_embeds": False,
}  # fmt: skip
TINY = {
    "patch_size": 1, "in_channels": 8, "num_layers": 2, "num_single_layers": 3, "attention_head_dim": 16,
    "num_attention_heads": 4, "joint_attention_dim": 32, "timestep_guidance_channels": 32, "mlp_ratio": 3.0,
    "axes_dims_rope": [4, 4, 4, 4], "guidance_embeds": False,
}  # fmt: skip


@pytest.fixture
def check(capsys, monkeypatch, tmp_path):
    """Runs a check with --json. Returns the exit code and what was printed, as data."""
    monkeypatch.delenv("NEURON_SIM_STRICT", raising=False)

    def run(model, *arguments, config=None):
        if config is not None:
            file = tmp_path / "config.json"
            file.write_text(json.dumps(config))
            arguments += ("--config", str(file))
        code = cli.main(["check", model, "--json", *arguments])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def model_file(tmp_path):
    """Writes a file with a class `Model`, whose forward's body is given, and its inputs. Returns file.py:Model."""

    def write(body, init="", inputs="torch.ones(2, 8)"):
        file = tmp_path / "mine.py"
        text = "import torch\nfrom torch import nn\n\n\nclass Model(nn.Module):\n    def __init__(self):\n"
        text += "        super().__init__()\n        self.linear = nn.Linear(8, 8)\n"
        text += textwrap.indent(textwrap.dedent(init).strip() or "pass", " " * 8) + "\n\n    def forward(self, x):\n"
        text += textwrap.indent(textwrap.dedent(body).strip(), " " * 8)
        text += f"\n\n\ndef vitrail_inputs(model):\n    return {{'x': {inputs}}}\n"
        file.write_text(text)
        return f"{file}:Model"

    yield write
    sys.modules.pop("mine", None)


def line_of(target, text):
    file = target.rpartition(":")[0]
    lines = Path(file).read_text("utf-8").splitlines()
    return file, next(number for number, line in enumerate(lines, 1) if text in line)


def rules(found, mode=None):
    return {(e["rule"], e["action"]) for e in found["rules"] if mode in (None, e["mode"])}


def test_float64_is_found_at_the_models_line_in_both_modes(check, model_file):
    target = model_file(
        """
        angles = torch.arange(8, dtype=torch.float64, device=x.device) / 3
        return self.linear(x) * angles.to(x.dtype)
        """
    )
    code, found = check(target)
    assert code == 0
    assert {e["mode"] for e in found["rules"]} == {"eager", "compiled"}
    for entry in found["rules"]:
        assert (entry["rule"], entry["action"]) == ("float64", "convert")
        assert (entry["file"], entry["line"]) == line_of(target, "torch.arange")
        assert entry["message"].startswith("float64 is not supported on neuron: the tensor becomes float32")
    assert found["verdict"]["word"] == "runs"
    assert "silently another result" in found["verdict"]["why"][0]


def test_a_model_that_asks_what_it_is_on_gets_the_devices_answer(check, model_file):
    target = model_file(
        """
        dtype = torch.float32 if x.device.type == "neuron" else torch.float64
        return self.linear(x) * torch.arange(8, dtype=dtype, device=x.device).to(x.dtype)
        """
    )
    assert not check(target)[1]["rules"]


def test_complex_numbers_refuse_where_the_profile_does(check, model_file):
    target = model_file("return torch.view_as_real(torch.view_as_complex(self.linear(x).float().view(2, 4, 2)) * 1j)")
    code, found = check(target, "--profile", "beta-2.10")
    assert code == 3
    assert rules(found, "eager") == rules(found, "compiled") == {("complex", "refuse")}
    assert found["verdict"]["why"][0].startswith("eager: NCC_EVRF004: Complex data types are not supported")
    assert check(target, "--profile", "sdk-2.33")[0] == 0


def test_shapes_that_depend_on_values(check, model_file):
    target = model_file("return self.linear(x)[torch.nonzero(x[:, 0])[:, 0]]")
    code, found = check(target, "--mode", "eager")
    assert code == 3
    entry = found["rules"][0]
    assert (entry["rule"], entry["op"], entry["file"], entry["line"]) == (
        "dynamic_shape", "aten::nonzero", *line_of(target, "nonzero"),
    )  # fmt: skip
    assert "Dynamic shapes detected in the model" in entry["message"]
    assert check(model_file("return torch.where(x > 0, self.linear(x), 0.0)"), "--mode", "eager")[0] == 0
    # A number that the host reads first makes a shape that is fixed by then.
    read = model_file("n = x.long().sum().item()\nreturn torch.zeros(n, device=x.device)")
    code, found = check(read, "--mode", "eager")
    assert (code, found["parts"][0]["host_syncs"]["item"]) == (0, 1)


def test_a_tensor_left_on_the_host(check, model_file):
    left = model_file("return self.linear(x) + self.offset", "self.offset = torch.ones(8)")
    code, found = check(left, "--mode", "eager", "--dtype", "float32")
    assert code == 3
    assert "Non-scalar tensor arg1 is on cpu device, expected neuron" in found["verdict"]["why"][0]
    kept = model_file("return self.linear(x) + self.offset", "self.register_buffer('offset', torch.ones(8))")
    assert check(kept, "--mode", "eager", "--dtype", "float32")[0] == 0


def test_what_runs_on_the_host_falls_back_and_can_be_refused(check, model_file):
    target = model_file("return torch.roll(self.linear(x), 1, 0)")
    code, found = check(target, "--mode", "eager")
    assert (code, found["verdict"]["word"]) == (0, "falls back")
    assert "aten::roll" in found["verdict"]["why"][0]
    assert check(target, "--mode", "eager", "--no-fallbacks")[0] == 3
    solved = model_file("return torch.linalg.solve(self.linear(x), x)", inputs="torch.ones(8, 8)")
    code, found = check(solved, "--mode", "compiled", "--dtype", "float32")
    assert code == 3
    assert "NCC_EVRF001: An unsupported operator was used: aten::_linalg_solve_ex" in found["verdict"]["why"][0]


def test_a_float64_buffer_is_found_unless_loading_casts_it(check, model_file):
    init = "self.register_buffer('table', torch.ones(8, dtype=torch.float64), persistent={})"
    code, found = check(model_file("return self.linear(x) * self.table", init.format(False)), "--mode", "eager")
    (entry,) = found["rules"]
    assert (code, entry["rule"], entry["op"], entry["line"]) == (0, "float64", "the buffer table", 5)
    assert not check(model_file("return self.linear(x) * self.table", init.format(True)), "--mode", "eager")[1]["rules"]


def test_an_operator_that_is_waited_for_is_counted(check, model_file):
    target = model_file("return self.linear(x) * x.sum().cpu() + (x.long() + 1).float()")
    part = check(target, "--mode", "eager")[1]["parts"][0]
    assert part["host_syncs"] == {"copy_to_host": 1, "cast64": 2}


def test_alike_blocks_are_one_graph_and_the_whole_is_one(check, model_file):
    blocks = """
    self.blocks = nn.ModuleList([Block(8), Block(8), Block(8)])
    self.wide = nn.ModuleList([Block(16), Block(16)])
    """
    target = model_file(
        """
        for block in self.blocks:
            x = block(x)
        x = torch.cat([x, x], -1)
        for block in self.wide:
            x = block(x)
        return x
        """,
        blocks,
    )
    file = target.rpartition(":")[0]
    block = (
        "\n\nclass Block(nn.Module):\n    def __init__(self, width):\n        super().__init__()\n"
        "        self.linear = nn.Linear(width, width)\n\n"
        "    def forward(self, x):\n        return self.linear(x).relu()\n"
    )
    Path(file).write_text(Path(file).read_text("utf-8") + block, "utf-8")
    graphs = check(target, "--mode", "compiled")[1]["parts"][0]["graphs"]
    assert [graph["unit"] for graph in graphs] == ["Block", "Block"]
    (whole,) = check(target, "--mode", "compiled", "--whole")[1]["parts"][0]["graphs"]
    assert whole["unit"] == "Model"
    assert whole["operators"] > sum(graph["operators"] for graph in graphs)


def test_what_stays_eager_beside_compiled_blocks_is_judged_too(check, model_file):
    target = model_file(
        """
        angles = torch.arange(8, dtype=torch.float64, device=x.device).to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return x * angles
        """,
        "self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])",
    )
    (entry,) = check(target, "--mode", "compiled")[1]["rules"]
    assert (entry["mode"], entry["rule"], entry["op"], entry["count"]) == ("compiled", "float64", "aten::arange", 1)
    (entry,) = check(target, "--mode", "compiled", "--whole")[1]["rules"]
    assert (entry["mode"], entry["rule"], entry["op"], entry["count"]) == ("compiled", "float64", "aten::arange", 1)


def test_graph_breaks_are_told(check, model_file):
    found = check(model_file("y = self.linear(x)\nprint(y.shape)\ntorch._dynamo.graph_break()\nreturn y + 1"))[1]
    part = found["parts"][0]
    assert len(part["graphs"]) >= 2
    assert part["graph_breaks"]


def test_more_than_a_core_holds(check, model_file, monkeypatch):
    target = model_file("return self.linear(x)", "self.big = nn.Linear(1024, 1024)")
    monkeypatch.setenv("NEURON_SIM_MEMORY", "1MiB")
    code, found = check(target)
    assert code == 3
    assert found["memory"]["weights_bytes"] == 2 * (1024 * 1025 + 8 * 9)
    assert "shard over more cores" in found["verdict"]["why"][0]
    monkeypatch.setenv("NEURON_SIM_MEMORY", "3MiB")
    assert check(target)[0] == 0


@pytest.mark.parametrize(
    ("factor", "code", "said"), [(0.7, 0, None), (1.1, 0, "it may be refused"), (1.5, 3, "refused")]
)
def test_the_number_of_instructions_near_and_beyond_the_limit(check, model_file, monkeypatch, factor, code, said):
    target = model_file("return self.linear(x) @ x.T", inputs="torch.ones(4096, 8)")
    graph = check(target, "--mode", "compiled")[1]["parts"][0]["graphs"][0]
    sdk = profiles.profile("sdk-2.33")
    rule = dataclasses.replace(sdk.rules["instructions"], limit=int(graph["instructions_estimate"] / factor))
    changed = dataclasses.replace(sdk, rules={**sdk.rules, "instructions": rule})
    monkeypatch.setattr(profiles, "profile", lambda _: changed)
    found_code, found = check(target, "--mode", "compiled")
    assert found_code == code
    reasons = found["verdict"]["why"]
    assert (not reasons) if said is None else "NCC_EVRF007" in reasons[0]
    assert said is None or said in reasons[0] or said == found["verdict"]["word"]


def test_activations_are_what_lives_at_once(check, model_file):
    target = model_file("y = x + 1\nz = y * 2\ndel y\nreturn z + 1", inputs="torch.ones(1024, 8)")
    found = check(target, "--mode", "eager", "--dtype", "float32")[1]
    assert found["memory"]["activations_bytes_estimate"] == 3 * 1024 * 8 * 4  # the input, and two at a time


def test_what_does_not_run_without_values_is_said(check, model_file):
    code, found = check(model_file("return x if x.sum().item() > 3 else self.linear(x)"), "--mode", "eager")
    assert code == 1
    assert found["verdict"]["word"] == "failed"
    assert "could not be followed: its forward decides by values" in found["verdict"]["why"][0]


def test_two_ranks_of_a_transformer(check):
    from vitrail.apply.classes import model_class
    from vitrail.plan import resolve
    from vitrail.plan.skeleton import skeleton
    from vitrail.run.planning import plan_of

    model = skeleton(lambda: model_class("Flux2Transformer2DModel")(**TINY))
    resolved = resolve(plan_of(model, None), model, 2)
    code, found = check("Flux2Transformer2DModel", "--tp", "2", "--size", "256x128", config=TINY)
    assert code == 0
    part = found["parts"][0]
    assert part["is_sharded"]
    assert part["inputs"]["hidden_states"] == "bfloat16[1, 128, 8]"
    assert sum(one["calls"] for one in part["collectives"].values()) == resolved.collectives
    assert part["weights_bytes"] == 2 * max(resolved.parameter_numel(model, rank) for rank in (0, 1))
    assert [graph["unit"] for graph in part["graphs"]] == ["Flux2TransformerBlock", "Flux2SingleTransformerBlock"]
    assert found["topology"] == {"cores": 2, "of": 64, "groups": 32, "routes": True}


def test_a_pipelines_folder_has_all_its_parts_and_needs_no_weights(check, tmp_path):
    import vitrail

    bundled = vitrail.model_folder()
    for name in ("model_index.json", *(f"{part}/config.json" for part in ("transformer", "text_encoder", "vae"))):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((bundled / name).read_text("utf-8"))
    for part in ("scheduler", "tokenizer"):
        (tmp_path / part).mkdir()
    text_encoder = json.loads((tmp_path / "text_encoder" / "config.json").read_text("utf-8"))
    text_encoder |= {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    (tmp_path / "text_encoder" / "config.json").write_text(json.dumps(text_encoder))
    code, found = check(str(tmp_path), "--size", "128x128", "--instance", "trn2.3xlarge")
    assert (code, found["verdict"]["word"]) == (0, "falls back")
    assert [part["name"].split()[0] for part in found["parts"]] == ["Flux2Transformer2DModel", "text_encoder", "vae"]
    on_host = {entry["op"] for entry in found["rules"] if entry["rule"] == "fallback"}
    assert on_host == {"aten::native_group_norm", "aten::upsample_nearest2d"}
    assert {entry["part"] for entry in found["rules"] if entry["rule"] == "fallback"} == {"vae (AutoencoderKLFlux2)"}
    assert [graph["unit"] for graph in found["parts"][2]["graphs"]] == ["AutoencoderKLFlux2.decode"]
    assert found["memory"]["weights_bytes"] == 2 * sum(part["parameters"] for part in found["parts"])


def test_a_component_with_a_damaged_configuration_is_named(capsys, tmp_path):
    import vitrail

    for name in ("model_index.json", "transformer/config.json", "text_encoder/config.json", "vae/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((vitrail.model_folder() / name).read_text("utf-8"))
    for part in ("scheduler", "tokenizer"):
        (tmp_path / part).mkdir()
    (tmp_path / "vae" / "config.json").write_text('{"latent_channels": "many"}')
    assert cli.main(["check", str(tmp_path), "--size", "128x128"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"AutoencoderKLFlux2 cannot be made from {tmp_path / 'vae' / 'config.json'}" in line


def test_a_published_size(check):
    code, found = check("Flux2Transformer2DModel", "--size", "1024x1024", config=KLEIN)
    assert code == 0
    assert found["memory"]["weights_bytes"] == 2 * 3_875_544_576
    first, second = found["parts"][0]["graphs"]
    assert (first["unit"], second["unit"]) == ("Flux2TransformerBlock", "Flux2SingleTransformerBlock")
    in_all = 5 * first["instructions_estimate"] + 20 * second["instructions_estimate"]
    whole = next(point for point in published.points() if point.pixels == 1024).instructions
    assert in_all == pytest.approx(whole, rel=0.02)  # the published points' graph, but for what is outside of blocks


def test_compile_times_are_the_published_ones_and_grow_between():
    assert [published.compile_seconds(point.instructions) for point in published.points()] == pytest.approx(
        [101, 187, 436, 897, 3207]
    )
    sizes = [1000, 10**5, 3 * 10**5, 10**6, 3 * 10**6, 10**7]
    times = [published.compile_seconds(size) for size in sizes]
    assert times == sorted(times)
    assert "klein-4B" in published.basis()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["NoSuchModel"], "NoSuchModel"),
        (["no/such.py:Model"], "there is no file no/such.py"),
        (["./no-such-folder"], "there is no folder ./no-such-folder"),
        (["Flux2Transformer2DModel", "--instance", "trn9"], "unknown instance type 'trn9'"),
        (["Flux2Transformer2DModel", "--profile", "sdk-9"], "unknown profile 'sdk-9'"),
        (["Flux2Transformer2DModel", "--size", "1024"], "--size '1024' is not a size"),
        (["Flux2Transformer2DModel", "--size", "0x64"], "--size '0x64' is not a size"),
        (["Flux2Transformer2DModel", "--size", "1000x1024"], "multiples of 16, and the width is 1000"),
        (["Flux2Transformer2DModel", "--dtype", "int8"], "--dtype 'int8' is unknown"),
        (["Flux2Transformer2DModel", "--tp", "0"], "--tp 0: the degree must be at least 1"),
        (["Flux2Transformer2DModel", "--tp", "65"], "has 64 logical cores"),
        (["Flux2Transformer2DModel", "--tp", "12"], "--tp 12 does not route on trn2.48xlarge"),
        (["Flux2Transformer2DModel", "--tp", "4", "--instance", "trn1.32xlarge"], "does not route on trn1.32xlarge"),
        (["Flux2Transformer2DModel", "--set", "text"], "--set 'text' is not NAME=NUMBER"),
        (["Flux2Transformer2DModel", "--set", "nothing=3"], "this model's inputs are sized by"),
        (["Flux2Transformer2DModel", "--config", "/no/such.json"], "there is no such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, words, capsys):
    assert cli.main(["check", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert captured.err.startswith("neuron-sim: ")
    assert words in captured.err


def test_a_degree_that_the_model_cannot_be_sharded_over(capsys, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY))
    arguments = ["Flux2Transformer2DModel", "--config", str(file), "--tp", "64", "--size", "64x64"]
    assert cli.main(["check", *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "64" in line


def test_without_vitrail_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vitrail", None)
    assert cli.main(["check", "Flux2Transformer2DModel"]) == 2
    assert "pip install vitrail" in capsys.readouterr().err


def test_the_text_ends_in_the_verdict(capsys, model_file):
    target = model_file("return torch.roll(self.linear(x), 1, 0).double()")
    assert cli.main(["check", target]) == 0
    text = capsys.readouterr().out
    for words in ("eager", "float64", "graphs to compile: 1", "are estimates", "memory of a core", "without weights"):
        assert words in text
    verdict = text.index("verdict for trn2.48xlarge: falls back")
    assert verdict > text.index("memory of a core")


def test_nothing_of_it_needs_memory(check, model_file, monkeypatch):
    monkeypatch.setenv("NEURON_SIM_MEMORY", "64GiB")
    before = torch.neuron.memory_allocated() if torch.neuron.is_available() else 0
    target = model_file("return self.big(x)", "self.big = nn.Linear(8, 2**31)")
    code, found = check(target, "--mode", "eager")
    assert code == 0
    assert found["memory"]["weights_bytes"] > 2**34
    assert torch.neuron.memory_allocated() == before
