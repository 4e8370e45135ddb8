"""The training pictures: chosen emoji, plain or tinted, on white or on a coloured background."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from glyphs import EmojiFont
from safetensors.torch import load_file, save_file
from sources import SourceError

VOCABULARY = Path(__file__).with_name("emoji.json")

TINTS: dict[str, tuple[int, int, int]] = {
    "red": (218, 42, 44),
    "orange": (245, 138, 32),
    "yellow": (248, 208, 52),
    "green": (62, 168, 72),
    "blue": (52, 112, 218),
    "purple": (140, 72, 190),
    "pink": (245, 130, 180),
}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "black": (20, 20, 24),
    "gray": (170, 170, 174),
    "red": (230, 92, 82),
    "orange": (255, 180, 100),
    "yellow": (255, 230, 120),
    "green": (140, 214, 130),
    "blue": (120, 180, 244),
    "purple": (184, 150, 234),
    "pink": (255, 190, 214),
}
# An emoji whose own label speaks of colour has no tinted versions: "a blue red apple" helps nobody.
COLOUR_WORDS = {*TINTS, *BACKGROUNDS, "white", "brown", "rainbow", "tropical"}


class Spec(NamedTuple):
    """One picture: which emoji, in which tint (None: its own colours), on which background (None: white)."""

    emoji: int
    tint: str | None = None
    background: str | None = None


@dataclass(frozen=True)
class Dataset:
    """The emoji in the vocabulary's order: the core first, the others after."""

    pictures: torch.Tensor
    labels: list[str]
    aliases: list[list[str]]
    tags: list[list[str]]
    # Words of emoji that are not in the vocabulary: they mean nothing here, so captions use them as filler.
    strange_words: list[str]
    core: int

    def tintable(self, emoji: int) -> bool:
        return not COLOUR_WORDS.intersection(re.findall("[a-z]+", self.labels[emoji].lower()))

    def random_spec(self, rng: random.Random, natural: float, core: float = 0.0) -> Spec:
        """A picture, left natural with that probability; `core` is the extra share given to the core emoji."""
        emoji = rng.randrange(self.core if rng.random() < core else len(self.labels))
        if rng.random() < natural:
            return Spec(emoji)
        kind = rng.random()
        tint = rng.choice(list(TINTS)) if kind < 0.65 and self.tintable(emoji) else None
        return Spec(emoji, tint, rng.choice(list(BACKGROUNDS)) if kind >= 0.45 else None)

    def render(self, specs: Sequence[Spec]) -> torch.Tensor:
        """Pictures `[len(specs), 3, 64, 64]` in -1..1."""
        rgba = self.pictures[[spec.emoji for spec in specs]]
        colour, alpha = rgba[:, :3], rgba[:, 3:]
        tinted = [index for index, spec in enumerate(specs) if spec.tint]
        if tinted:
            colour = colour.clone()
            tints = _rgb([TINTS[specs[index].tint or ""] for index in tinted])
            colour[tinted] = _tint(colour[tinted], alpha[tinted], tints)
        paper = _rgb([BACKGROUNDS[spec.background] if spec.background else (255, 255, 255) for spec in specs])
        return (colour + (1 - alpha) * paper) * 2 - 1


def _rgb(colours: list[tuple[int, int, int]]) -> torch.Tensor:
    return torch.tensor(colours, dtype=torch.float32)[:, :, None, None] / 255


def _tint(colour: torch.Tensor, alpha: torch.Tensor, tint: torch.Tensor) -> torch.Tensor:
    """Map lightness onto a ramp from black through the tint to white, the tint a little above the middle."""
    plain = (colour / alpha.clamp(min=1e-3)).clamp(0, 1)
    weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    # Lifted, because the black outlines many emoji have would otherwise stay black in every tint.
    light = 0.12 + 0.88 * (plain * weights).sum(1, keepdim=True)
    middle = 0.55
    dark = tint * (light / middle)
    bright = tint + (1 - tint) * ((light - middle) / (1 - middle))
    return torch.where(light < middle, dark, bright) * alpha


def build(folder: Path, sources: Path) -> None:
    """Write the dataset into `folder` from the collected sources."""
    vocabulary = json.loads(VOCABULARY.read_text(encoding="utf-8"))
    chosen: dict[str, list[str]] = vocabulary["core"] | vocabulary["others"]
    table = json.loads((sources / "labels.json").read_text(encoding="utf-8"))
    rows = {row["label"]: row for row in table}
    font = EmojiFont(sources / "font.ttf")
    pictures = []
    for label in chosen:
        picture = font.picture(rows[label]["hexcode"]) if label in rows else None
        if picture is None:
            raise SourceError(f"no emoji {label!r} in these sources; see the README for the versions to use")
        pictures.append(picture)

    tags = [[str(tag).lower() for tag in rows[label].get("tags", [])] for label in chosen]
    known = _words(*chosen, *chain.from_iterable(chosen.values()), *chain.from_iterable(tags))
    words = _words(*(text for row in table for text in (row["label"], *row.get("tags", []))))
    strange = sorted(words - known - COLOUR_WORDS)

    save_file({"pictures": torch.stack(pictures)}, folder / "pictures.safetensors")
    facts = {"labels": list(chosen), "aliases": list(chosen.values()), "tags": tags}
    facts |= {"strange_words": strange, "core": len(vocabulary["core"])}
    (folder / "facts.json").write_text(json.dumps(facts, ensure_ascii=False), encoding="utf-8")


def _words(*texts: str) -> set[str]:
    return set(re.findall("[a-z]{4,}", " ".join(texts).lower()))


def load(folder: Path) -> Dataset:
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    return Dataset(pictures=load_file(folder / "pictures.safetensors")["pictures"], **facts)
