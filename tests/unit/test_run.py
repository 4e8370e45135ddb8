"""The run layer's pure parts: requests, folders, devices, failures, pictures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from PIL import Image

from vitrail.apply import mesh
from vitrail.apply.load import Request as LoadRequest
from vitrail.errors import CheckpointError, UnsupportedError, UsageError, VitrailError
from vitrail.run import devices, png
from vitrail.run.folder import Defaults, read_index, size_multiple
from vitrail.run.launch import told
from vitrail.run.rank import Failure
from vitrail.run.request import Request


def test_a_request_travels_as_json() -> None:
    request = Request(prompts=("a", "b"), tp=2, guidance=1.5)
    assert Request.from_json(request.to_json()) == request


@pytest.mark.parametrize(
    "output, count, paths",
    [
        ("apple.png", 1, ["apple.png"]),
        ("in/apple.png", 2, ["in/apple-1.png", "in/apple-2.png"]),
        ("in/", 2, ["in/a-red-apple-3.png", "in/a-red-apple-4.png"]),
    ],
)
def test_names_of_pictures(output: str, count: int, paths: list[str]) -> None:
    request = Request(prompts=("A red apple!",), output=output, count=count, seed=3)
    assert [picture.path for picture in request.pictures()] == paths
    assert [picture.seed for picture in request.pictures()] == [3, 4][:count]


def test_equal_names_are_told_apart() -> None:
    paths = [picture.path for picture in Request(prompts=("é", "?"), output="x/").pictures()]
    assert len(set(paths)) == 2


def test_sizes_of_the_bundled_model(bundled: Path) -> None:
    index = read_index(bundled)
    assert size_multiple(index, bundled) == 16
    assert Defaults.of(bundled).steps == 4


def test_sizes_of_an_sd3_folder(tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    (tmp_path / "transformer").mkdir()
    (tmp_path / "vae/config.json").write_text(json.dumps({"block_out_channels": [1, 1, 1, 1], "latent_channels": 16}))
    (tmp_path / "transformer/config.json").write_text(json.dumps({"in_channels": 16, "patch_size": 2}))
    index = {"vae": ["diffusers", "AutoencoderKL"], "transformer": ["diffusers", "SD3Transformer2DModel"]}
    assert size_multiple(index, tmp_path) == 16
    (tmp_path / "vae/config.json").write_text(json.dumps({"latent_channels": 16}))
    assert size_multiple(index, tmp_path) is None, "unknown is not guessed"


def test_a_broken_index(tmp_path: Path, bundled: Path) -> None:
    folder = Path(shutil.copytree(bundled, tmp_path / "model"))
    (folder / "model_index.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"model_index.json cannot be read"):
        read_index(folder)
    (folder / "model_index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"does not name a pipeline class"):
        read_index(folder)


def failure(rank: int, exitcode: int, report: Failure | None = None) -> SimpleNamespace:
    return SimpleNamespace(exitcode=exitcode, error_file_data={"vitrail": vars(report)} if report else {})


LOST = Failure(0, "RuntimeError: Connection closed by peer", None, 1, True, "trace")


def test_the_rank_that_failed_by_itself_is_the_one_told() -> None:
    error = told({0: failure(0, 1, LOST), 1: failure(1, -9)})
    assert str(error).startswith("rank 1 was ended by signal 9 (SIGKILL)\nhint: the kernel ends a process so")
    own = Failure(1, "out of memory: 4 GiB", "less", 1, False, None)
    assert str(told({0: failure(0, 1, LOST), 1: failure(1, 1, own)})) == "rank 1: out of memory: 4 GiB\nhint: less"
    assert (
        str(told({0: failure(0, 1, LOST)}))
        == "rank 0 lost touch with the others: RuntimeError: Connection closed by peer"
    )


def test_a_mistake_that_all_ranks_report_is_told_once_without_a_rank() -> None:
    reports = [Failure.of(UnsupportedError("no plan", hint="write one"), rank) for rank in (0, 1)]
    error = told({rank: failure(rank, 3, report) for rank, report in enumerate(reports)})
    assert (str(error), error.exit_code) == ("no plan\nhint: write one", 3)


@pytest.mark.parametrize(
    "error, message, secondary",
    [
        (MemoryError(), "out of memory: MemoryError", False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory: ", False),
        (RuntimeError("NRT allocation failed for size 4096 (OOM)"), "out of memory: NRT allocation failed", False),
        (RuntimeError("[gloo] Connection closed by peer [127.0.0.1]"), "RuntimeError: [gloo] Connection", True),
        (RuntimeError("shape mismatch"), "RuntimeError: shape mismatch", False),
        (ValueError("Connection closed by peer"), "ValueError: Connection", False),
    ],
)  # fmt: skip
def test_what_ended_a_rank(error: BaseException, message: str, secondary: bool) -> None:
    found = Failure.of(error, 1)
    assert found.message.startswith(message)
    assert found.secondary is secondary


def test_the_best_real_device_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"cpu": 2, "neuron": 4}
    monkeypatch.setattr(devices, "available", lambda kind: there.get(kind, 0))
    monkeypatch.setattr(devices, "simulated", lambda kind: kind == "neuron")
    assert devices.choose(None) == "cpu", "a simulated device is only used when named"
    assert devices.choose("neuron") == "neuron"
    monkeypatch.setattr(devices, "simulated", lambda kind: False)
    assert devices.choose(None) == "neuron"
    there["cuda"] = 1
    assert devices.choose(None) == "cuda"
    with pytest.raises(UnsupportedError, match="2 ranks need 2 cuda devices; this machine has 1"):
        devices.check_degree("cuda", 2)
    assert devices.check_degree("cpu", 8) == "8 ranks share 2 CPU cores: right, but slower than 2"


@pytest.mark.parametrize(
    "backend, device",
    [
        ("gloo", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda"),
        ("nccl", "cuda"),
        ("neuron", "neuron"),
        ("cuda:gloo,cpu:gloo", "cpu"),
    ],
)
def test_the_device_of_a_process_group(monkeypatch: pytest.MonkeyPatch, backend: str, device: str) -> None:
    monkeypatch.setattr(mesh.dist, "get_backend_config", lambda: backend)
    assert mesh.device_of_group() == device


def test_a_picture_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image, facts = Image.new("RGB", (4, 4)), {"prompt": "naïve “fox”", "seed": 1, "versions": {"a": "1"}}
    png.write(image, tmp_path / "x.png", facts)
    assert png.read_facts(tmp_path / "x.png") == facts

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(VitrailError, match=r"y.png cannot be written: No space left on device"):
        png.write(image, tmp_path / "y.png", facts)
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]


def test_pictures_that_vitrail_did_not_make(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "x.png")
    with pytest.raises(UsageError, match="does not say how it was made"):
        png.read_facts(tmp_path / "x.png")
    (tmp_path / "y.png").write_text("no picture")
    with pytest.raises(UsageError, match="is not a picture"):
        png.read_facts(tmp_path / "y.png")


class MadeWithEmpty(ModelMixin, ConfigMixin):
    config_name = "config.json"

    @register_to_config
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.register_buffer("table", torch.empty(width).fill_(2.0), persistent=False)
        self.plain = torch.empty(width).fill_(3.0)


@pytest.mark.parametrize("attribute, value", [("table", 2.0), ("plain", 3.0)])
def test_what_init_computes_is_real_however_it_was_made(tmp_path: Path, attribute: str, value: float) -> None:
    MadeWithEmpty().save_config(tmp_path)
    model: Any = LoadRequest.of(MadeWithEmpty, str(tmp_path), {}).skeleton()
    assert model.linear.weight.is_meta
    assert getattr(model, attribute).tolist() == [value] * 3
