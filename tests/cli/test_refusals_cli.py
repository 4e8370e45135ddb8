"""Bad input: one clear line, a hint where there is one, the right exit code, and nothing half-written."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.command import environment as environment_of_a_command
from support.command import vitrail

from vitrail.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, bundled: Path) -> Path:
    return Path(shutil.copytree(bundled, tmp_path_factory.mktemp("model") / "model"))


def nothing(folder: Path) -> None: ...


def no_index(folder: Path) -> None:
    (folder / "model_index.json").unlink()


def no_transformer(folder: Path) -> None:
    shutil.rmtree(folder / "transformer")


def truncated_transformer(folder: Path) -> None:
    os.truncate(folder / "transformer" / "diffusion_pytorch_model.safetensors", 3_000_000)


def truncated_vae(folder: Path) -> None:
    os.truncate(folder / "vae" / "diffusion_pytorch_model.safetensors", 1_000_000)


def remove_tensor(folder: Path, component: str, name: str) -> None:
    (file,) = (folder / component).glob("*.safetensors")
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})


def incomplete_vae(folder: Path) -> None:
    remove_tensor(folder, "vae", "decoder.conv_out.weight")


def incomplete_text_encoder(folder: Path) -> None:
    remove_tensor(folder, "text_encoder", "model.layers.3.mlp.up_proj.weight")


def change_tensor(folder: Path, component: str, name: str, value: torch.Tensor) -> None:
    (file,) = (folder / component).glob("*.safetensors")
    save_file({**load_file(file), name: value}, file, metadata={"format": "pt"})


def other_shape(folder: Path) -> None:
    change_tensor(folder, "vae", "decoder.conv_out.weight", torch.zeros(2, 2))


def not_a_number(folder: Path) -> None:
    change_tensor(folder, "transformer", "proj_out.weight", torch.full((64, 192), torch.nan))


def no_vocabulary(folder: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").unlink()


def no_text_encoder_config(folder: Path) -> None:
    (folder / "text_encoder" / "config.json").unlink()


def empty_text_encoder_config(folder: Path) -> None:
    (folder / "text_encoder" / "config.json").write_text("{}")


def no_vae_weights(folder: Path) -> None:
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()


def negative_default(folder: Path) -> None:
    (folder / "vitrail.json").write_text('{"defaults": {"height": -64}}')


def unknown_pipeline(folder: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": "NoSuchPipeline"}))


def incomplete_transformer(folder: Path) -> None:
    remove_tensor(folder, "transformer", "proj_out.weight")


def unknown_class(folder: Path) -> None:
    rename_transformer(folder, "PixArtTransformer2DModel")


def rename_transformer(folder: Path, name: str) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    index["transformer"][1] = name
    (folder / "model_index.json").write_text(json.dumps(index))


def unet(folder: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    index["unet"] = ["diffusers", "UNet2DConditionModel"]
    del index["transformer"]
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "unet").mkdir()


@pytest.mark.parametrize(
    "damage, arguments, code, error, hint",
    [
        (
            nothing,
            ["--tp", "9"],
            3,
            "over 9 ranks: heads (attention heads) has 8 units, fewer than 9",
            "degrees that would do: 1 to 8",
        ),
        (nothing, ["--tp", "0"], 2, "--tp 0: the degree must be at least 1", None),
        (nothing, ["--tp", "two"], 2, 'Invalid value for --tp: unable to convert "two" into int', "see vitrail --help"),
        (nothing, ["--height", "70"], 2, "--height 70: this model makes multiples of 16", "the nearest are 64, 80"),
        (nothing, ["--width", "-16"], 2, "--width -16 is not a size", None),
        (nothing, ["--steps", "0"], 2, "--steps 0: at least 1 step is needed", None),
        (nothing, ["-n", "0"], 2, "-n 0: at least 1 image is needed", None),
        (nothing, ["--seed", "-1"], 2, "--seed -1: a seed is an integer from 0", None),
        (nothing, ["--dtype", "float8"], 2, "--dtype float8: unknown", "known: float32, bfloat16, float16"),
        (nothing, ["--device", "abacus"], 2, "--device abacus: unknown device", "known: cpu, cuda, xpu, neuron"),
        (nothing, ["--device", "cuda"], 3, "--device cuda: this machine has none that PyTorch", "available here: cpu"),
        (nothing, ["--device", "cpu:1"], 2, "--device cpu:1: give the type alone", None),
        (
            nothing,
            ["-o", "picture.jpg"],
            2,
            "--output picture.jpg: pictures are PNG files",
            "give a name ending in .png, or a folder",
        ),
        (nothing, ["-o", "absent/picture.png"], 2, "there is no folder absent", None),
        (nothing, ["-o", "/proc/picture.png"], 2, "/proc cannot be written to", None),
        (nothing, ["-p", " "], 2, "a prompt is empty", None),
        (nothing, ["-p", "-"], 2, "-p -: standard input holds no prompt", None),
        (nothing, ["--like", "absent.png"], 2, "there is no file absent.png", None),
        (nothing, ["--sharpness", "3"], 2, "Unknown option: --sharpness", "see vitrail --help"),
        (no_index, [], 1, "is not a diffusers pipeline: it has no model_index.json", None),
        (
            no_transformer,
            [],
            1,
            "is incomplete: the component 'transformer' (Flux2Transformer2DModel) has no folder",
            "download or copy it again",
        ),
        (
            truncated_transformer,
            ["--tp", "2"],
            1,
            "transformer/diffusion_pytorch_model.safetensors is truncated: tensor '",
            "download or copy it again",
        ),
        (truncated_transformer, [], 1, "transformer/diffusion_pytorch_model.safetensors is truncated: tensor '", None),
        (truncated_vae, ["--tp", "2"], 1, "vae/diffusion_pytorch_model.safetensors is truncated: tensor '", None),
        (incomplete_vae, [], 1, "the checkpoint of AutoencoderKLFlux2 lacks tensor 'decoder.conv_out.weight'", None),
        (
            incomplete_text_encoder,
            [],
            1,
            "the checkpoint of Qwen3ForCausalLM lacks tensor 'model.layers.3.mlp.up_proj.weight'",
            None,
        ),
        (
            incomplete_transformer,
            [],
            1,
            "the checkpoint of Flux2Transformer2DModel lacks tensor 'proj_out.weight'",
            "download or copy it again",
        ),
        (other_shape, [], 1, "model cannot be loaded: ", "VITRAIL_DEBUG=1 shows where"),
        (unknown_pipeline, [], 1, "model cannot be loaded: AttributeError: ", None),
        (
            not_a_number,
            [],
            1,
            "'a red apple' came out as values that are not numbers",
            "float16 is too narrow for some",
        ),
        (no_vocabulary, [], 1, "tokenizer (Qwen2Tokenizer) has no vocabulary", "download or copy it again"),
        (no_text_encoder_config, [], 1, "text_encoder/config.json is missing", "the folder is incomplete"),
        (empty_text_encoder_config, [], 1, "text_encoder/config.json does not say what model it is of", None),
        (no_vae_weights, [], 1, "vae (AutoencoderKLFlux2) has no weights", "download or copy it again"),
        (negative_default, [], 1, "vitrail.json: the default height cannot be -64", None),
        (nothing, ["--steps", "100000000000"], 2, "--steps 100000000000: at most 1000000", None),
        (nothing, ["--height", "99999999999"], 2, "--height 99999999999: at most 65536", None),
        (nothing, ["--guidance", "nan"], 2, "--guidance nan: not a number to guide by", None),
        (nothing, ["-o", ""], 2, "--output : pictures are PNG files", None),
        (nothing, ["-o", "x" * 300 + ".png"], 2, "--output: the name is longer than 200 bytes", None),
        (nothing, ["-p", "\udcff"], 2, "a prompt is not UTF-8 text", None),
        (unknown_class, ["--tp", "2"], 1, "tensors of PixArtTransformer2DModel", None),
        (
            unet,
            ["--tp", "2"],
            3,
            "its denoiser is a UNet (UNet2DConditionModel), which is not supported",
            "run it unsharded: --tp 1",
        ),
    ],
)
def test_one_line_a_hint_and_an_exit_code(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
    arguments: list[str],
    code: int,
    error: str,
    hint: str | None,
) -> None:
    folder = model
    if damage is not nothing:
        folder = Path(shutil.copytree(model, tmp_path / "model"))
        damage(folder)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    prompt = [] if "-p" in arguments else ["-p", "a red apple"]
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(folder), *prompt, *arguments])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (code, ""), err
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line and "%|" not in line]  # a progress bar may come before
    assert lines[0].startswith("error: ")
    assert error in lines[0]
    if hint is not None:
        assert lines[1].startswith(f"hint: {hint}")
    assert len(lines) <= 2, err
    assert list(work.iterdir()) == [], "nothing half-written"


def test_what_only_the_ranks_can_find_is_told_once(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    other_shape(folder)
    done = vitrail("generate", str(folder), "-p", "x", "--tp", "2", "--device", "cpu", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    said = done.stderr.strip().splitlines()
    assert said[0].startswith("error: ")
    assert "model cannot be loaded: ValueError: " in said[0]
    assert said[1:] == ["hint: VITRAIL_DEBUG=1 shows where"]
    assert not (tmp_path / "vitrail.png").exists()


def test_an_unknown_model(tmp_path: Path) -> None:
    done = vitrail("generate", "./absent", "-p", "x", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: there is no folder ./absent\nhint: give a folder in diffusers' format, or a hub id"
    )
    done = vitrail("generate", "nobody/nothing", "-p", "x", cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: nobody/nothing is no local folder, and the hub did not give it:")


def test_a_folder_that_is_one_model_of_a_pipeline(model: Path, tmp_path: Path) -> None:
    done = vitrail("generate", str(model / "vae"), "-p", "x", cwd=tmp_path)
    assert done.returncode == 1
    assert "hint: it looks like one model of a pipeline; give the folder above it" in done.stderr


def test_help_is_there_without_torch(tmp_path: Path) -> None:
    done = vitrail("generate", "--help", cwd=tmp_path, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    assert "--prompt" in done.stdout
    assert "torch" not in {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}


@pytest.mark.parametrize(
    "environment, error",
    [
        ({"RANK": "0"}, "error: RANK is set, but WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "error: RANK is set, but MASTER_PORT is not"),
        ({"RANK": "x"}, "error: environment variable RANK='x' cannot be read"),
        (
            {"RANK": "5", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29999"},
            "error: RANK is 5, but WORLD_SIZE is 2",
        ),
    ],
)
def test_rank_set_by_accident(tmp_path: Path, environment: dict[str, str], error: str) -> None:
    done = vitrail("generate", "-p", "x", cwd=tmp_path, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(error)
    assert "Traceback" not in done.stderr


def test_a_full_standard_output(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "vitrail", "generate", "-p", "a dog", "--steps", "1", "--device", "cpu"],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment_of_a_command(),
            timeout=120,
            check=False,
        )
    assert done.returncode == 1
    assert "error: standard output cannot be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "vitrail.png").exists()


def test_environment_variables_that_cannot_be_read(tmp_path: Path) -> None:
    done = vitrail("generate", "-p", "x", "--tp", "2", cwd=tmp_path, VITRAIL_CHECK_INPUTS="perhaps")
    assert done.returncode == 2
    assert "environment variable VITRAIL_CHECK_INPUTS='perhaps' cannot be read: expected on or off" in done.stderr
