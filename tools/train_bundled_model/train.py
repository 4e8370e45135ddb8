"""Train the bundled demo model from openly licensed sources, in one seeded run that ends by measuring the model."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import autoencoder
import decoder
import flow
import recall
import sources
import text_encoder
import torch
import words
from assemble import assemble
from captions import Captioner
from dataset import Dataset, Spec, build, load
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from safetensors.torch import load_file, save_file
from stages import Work
from torch.utils import deterministic
from transformers import Qwen2TokenizerFast, Qwen3ForCausalLM

# Below this share of core emoji, a full-length run has failed.
ENOUGH = 0.95


@dataclass(frozen=True)
class Lengths:
    """Steps of every trained stage, batches of samples for the decoder, and captions for the tokenizer."""

    vae: int = 3600
    text_encoder: int = 6000
    transformer: int = 6000
    decoder: int = 1000
    sampled: int = 48
    captions: int = 40000

    def scaled(self, scale: float) -> Lengths:
        return Lengths(**{field.name: max(2, round(getattr(self, field.name) * scale)) for field in fields(self)})


def get_dataset(work: Work, font: Path | None, labels: Path | None) -> Dataset:
    collected = work.stage("sources", lambda folder, _: sources.collect(folder, font, labels))
    return load(work.stage("dataset", lambda folder, _: build(folder, collected)))


def train(work: Work, dataset: Dataset, out: Path, lengths: Lengths) -> None:
    """Every stage in turn, and the finished pipeline in `out`."""
    captioner = Captioner(dataset)

    def train_vae(folder: Path, rng: random.Random) -> None:
        autoencoder.train(dataset, lengths.vae, rng).save_pretrained(folder)

    vae = AutoencoderKLFlux2.from_pretrained(work.stage("vae", train_vae), low_cpu_mem_usage=False).eval()

    def train_tokenizer(folder: Path, rng: random.Random) -> None:
        words.train(captioner.corpus(dataset, lengths.captions, rng)).save_pretrained(folder)

    tokenizer = Qwen2TokenizerFast.from_pretrained(work.stage("tokenizer", train_tokenizer))

    def train_encoder(folder: Path, rng: random.Random) -> None:
        text_encoder.train(dataset, captioner, tokenizer, lengths.text_encoder, rng).save_pretrained(folder)

    encoder = Qwen3ForCausalLM.from_pretrained(work.stage("text_encoder", train_encoder)).eval()

    def encode(folder: Path, rng: random.Random) -> None:
        chosen = flow.all_specs(dataset, rng)
        save_file({"tokens": autoencoder.to_tokens(vae, dataset, chosen)}, folder / "tokens.safetensors")
        (folder / "specs.json").write_text(json.dumps(chosen), encoding="utf-8")

    encoded = work.stage("tokens", encode)
    tokens = load_file(encoded / "tokens.safetensors")["tokens"]
    specs = [Spec(*spec) for spec in json.loads((encoded / "specs.json").read_text(encoding="utf-8"))]

    def train_transformer(folder: Path, rng: random.Random) -> None:
        model = flow.train(dataset, captioner, tokenizer, encoder, specs, tokens, lengths.transformer, rng)
        model.save_pretrained(folder)

    transformer = Flux2Transformer2DModel.from_pretrained(
        work.stage("transformer", train_transformer), low_cpu_mem_usage=False
    ).eval()

    def train_decoder(folder: Path, rng: random.Random) -> None:
        shown, made = decoder.sample_tokens(
            captioner, tokenizer, encoder, transformer, specs, tokens, lengths.sampled, rng
        )
        decoder.train(dataset, vae, specs, tokens, shown, made, lengths.decoder, rng)
        vae.save_pretrained(folder)

    vae = AutoencoderKLFlux2.from_pretrained(work.stage("decoder", train_decoder), low_cpu_mem_usage=False).eval()

    finished = work.stage("model", lambda folder, _: assemble(folder, vae, encoder, tokenizer, transformer))
    shutil.copytree(finished, out, dirs_exist_ok=True)


def check_settings(folder: Path, settings: dict[str, float]) -> None:
    """Refuse a work folder of a run with other settings: its stages would be taken for this run's."""
    path = folder / "settings.json"
    if path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if earlier != settings:
            raise SystemExit(f"error: {folder} belongs to a run with {earlier}, not {settings}; give another --work")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, metavar="FOLDER", help="train, and write the model here")
    action.add_argument("--measure", type=Path, metavar="FOLDER", help="only measure the recall of this model")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="keep and resume stages here (default: OUT.work)")
    parser.add_argument("--scale", type=float, default=1.0, help="multiply all step counts; 0.01 is a smoke run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--font", type=Path, metavar="FILE", help="NotoColorEmoji.ttf, instead of fetching it")
    parser.add_argument(
        "--emojibase", type=Path, metavar="PATH", help="unpacked emojibase-data, instead of fetching it"
    )
    options = parser.parse_args(arguments)
    if options.scale <= 0:
        parser.error("--scale must be above 0")
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory only guards against reading it unwritten, and takes time.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        return measure_only(options) if options.measure else train_and_measure(options)
    except sources.SourceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def measure_only(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        dataset = get_dataset(Work(options.work or Path(scratch), options.seed), options.font, options.emojibase)
        recall.measure(options.measure, dataset, Captioner(dataset), min(1.0, options.scale))
    return 0


def train_and_measure(options: argparse.Namespace) -> int:
    lengths = Lengths().scaled(options.scale)
    folder = options.work or options.out.with_name(f"{options.out.name}.work")
    check_settings(folder, {"seed": options.seed, "threads": options.threads, **asdict(lengths)})
    work = Work(folder, options.seed)
    dataset = get_dataset(work, options.font, options.emojibase)
    train(work, dataset, options.out, lengths)
    scores = recall.measure(options.out, dataset, Captioner(dataset), min(1.0, options.scale))
    report = {name: {"right": score.right, "asked": score.asked} for name, score in scores.items()}
    (options.out / "recall.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if options.scale >= 1 and scores["core"].share < ENOUGH:
        print(
            f"error: {scores['core'].share:.1%} of core emoji recalled, at least {ENOUGH:.0%} wanted", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
