"""What is compiled of a pipeline, and what is counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vitrail
from vitrail.errors import UnsupportedError, UsageError
from vitrail.run.compiling import repeated_blocks
from vitrail.run.counts import Counts, counts


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        return self.linears[1](self.linears[0](x))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.groups = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])])
        self.mixed = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])
        self.pair = nn.ModuleList([nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4), nn.Identity()])
        self.single = nn.ModuleList([nn.Linear(4, 4)])


def test_blocks_that_repeat_are_the_items_of_the_outermost_lists():
    tower = Tower()
    found = [name for name, module in tower.named_modules() if any(module is block for block in repeated_blocks(tower))]
    assert found == [
        *[f"blocks.{n}" for n in range(3)],
        *[f"groups.{n}.{m}" for n in range(2) for m in range(2)],
        *[f"pair.{n}" for n in range(4)],
    ]


def test_a_class_that_names_its_blocks_is_believed():
    tower = Tower()
    tower._repeated_blocks = ["Linear"]
    assert {type(block) for block in repeated_blocks(tower)} == {nn.Linear}


@pytest.fixture
def pipeline():
    torch._dynamo.reset()
    pipeline = vitrail.load_pipeline()
    pipeline.set_progress_bar_config(disable=True)
    yield pipeline
    torch._dynamo.reset()


def picture(pipeline, size=64, steps=2):
    generator = torch.Generator().manual_seed(0)
    return pipeline(
        prompt="a red apple", height=size, width=size, num_inference_steps=steps, generator=generator, output_type="np"
    ).images[0]


def test_the_whole_pipeline_compiles_and_makes_the_same_picture(pipeline):
    eager = picture(pipeline)
    regions = vitrail.compile_pipeline(pipeline, backend="eager")
    assert sorted(map(str, regions)) == [
        "text_encoder: 27 x Qwen3DecoderLayer",
        "transformer: 2 x Flux2TransformerBlock",
        "transformer: 4 x Flux2SingleTransformerBlock",
        "vae: decode",
    ]
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    assert abs(picture(pipeline) - eager).max() < 1e-5
    graphs = stats["unique_graphs"] - before
    # Equal blocks share a graph: fewer than there are regions of 27 + 2 + 4 blocks and a decoder.
    assert 4 <= graphs <= 8
    picture(pipeline, steps=3)
    assert stats["unique_graphs"] - before == graphs  # another number of steps
    picture(pipeline, size=32)
    assert stats["unique_graphs"] - before > graphs  # another size
    again = stats["unique_graphs"]
    picture(pipeline, size=64)
    assert stats["unique_graphs"] == again  # a size seen before


def test_parts_are_chosen(pipeline):
    regions = vitrail.compile_pipeline(pipeline, backend="eager", parts=["transformer"], whole=True)
    assert list(map(str, regions)) == ["transformer: Flux2Transformer2DModel"]
    assert "decode" not in vars(pipeline.vae)


def test_what_cannot_be_compiled_is_refused(pipeline):
    with pytest.raises(UsageError, match="unknown parts: unet_3"):
        vitrail.compile_pipeline(pipeline, parts=["unet_3"])
    with pytest.raises(UsageError, match="torch.compile has no backend 'nonesuch'") as error:
        vitrail.compile_pipeline(pipeline, backend="nonesuch")
    assert "inductor" in str(error.value.hint)
    pipeline.vae = None
    with pytest.raises(UnsupportedError, match="nothing to compile among vae"):
        vitrail.compile_pipeline(pipeline, backend="eager", parts=["vae"])


def test_counts_are_differences():
    assert Counts(3, 2, 1, 2, 2, 4) - Counts(1, 1, 0, 1, 2, 4) == Counts(2, 1, 1, 1, 0, 0)
    assert Counts(1, 1) + Counts(2, 1, 1) == Counts(3, 2, 1)
    assert counts("cpu").graphs >= 0
