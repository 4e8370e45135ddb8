"""Wordings for the pictures, from plain labels to sentences with words that do not matter."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

from dataset import BACKGROUNDS, TINTS, Dataset, Spec

WORDING = Path(__file__).with_name("wording.json")

# A keyword shared by more emoji than this says too little about any one of them.
RARE_TAG = 3


def with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


class Captioner:
    """Captions for a dataset's pictures; the wordings kept for measuring are never among them."""

    def __init__(self, dataset: Dataset) -> None:
        wording: dict[str, list[str]] = json.loads(WORDING.read_text(encoding="utf-8"))
        self._shapes, self._white, self._backgrounds = wording["shapes"], wording["white"], wording["backgrounds"]
        self._tints, self._adjectives, self._scenes = wording["tints"], wording["adjectives"], wording["scenes"]
        self._strange = dataset.strange_words
        self.unseen = wording["unseen"]
        self.labels = [_plain(label) for label in dataset.labels]
        self._aliases = dataset.aliases
        taken = {*self.labels, *(name for names in dataset.aliases for name in names), *TINTS, *BACKGROUNDS}
        uses = Counter(tag for tags in dataset.tags for tag in set(tags))
        self._tags = [
            [tag for tag in tags if uses[tag] <= RARE_TAG and len(tag) > 2 and tag not in taken]
            for tags in dataset.tags
        ]

    def label(self, emoji: int) -> str:
        """The plainest prompt: the label with its article."""
        return with_article(self.labels[emoji])

    def caption(self, spec: Spec, rng: random.Random) -> str:
        name = self._name(spec.emoji, rng)
        if spec.tint:
            name = rng.choice(self._tints).format(t=spec.tint, n=name)
        filler = rng.random()
        if filler < 0.2:
            name = " ".join([*rng.choices(self._adjectives, k=rng.choice((1, 1, 2))), name])
        text = rng.choice(self._shapes).format(n=name, a=with_article(name))
        if 0.15 <= filler < 0.3:
            text = f"{text} {rng.choice(self._scenes)}"
        text += rng.choice(self._backgrounds).format(b=spec.background) if spec.background else rng.choice(self._white)
        if not spec.tint and not spec.background and self._tags[spec.emoji] and rng.random() < 0.1:
            text += f", {rng.choice(self._tags[spec.emoji])}"
        if 0.27 <= filler < 0.42:
            text = self._scatter(text, rng)
        style = rng.random()
        if style < 0.12:
            text = text[0].upper() + text[1:]
        return text + "." if style < 0.06 or style > 0.9 else text

    def corpus(self, dataset: Dataset, captions: int, rng: random.Random) -> list[str]:
        """Text for the tokenizer: captions, and every name often enough to get tokens of its own."""
        names = [*self.labels, *(name for names in self._aliases for name in names)]
        tags = [tag for tags in self._tags for tag in tags]
        sentences = [self.caption(dataset.random_spec(rng, natural=0.6), rng) for _ in range(captions)]
        return [*sentences, *names * 5, *tags * 3]

    def _name(self, emoji: int, rng: random.Random) -> str:
        kind = rng.random()
        if kind < 0.27 and self._aliases[emoji]:
            return rng.choice(self._aliases[emoji])
        if kind > 0.92 and self._tags[emoji]:
            return rng.choice(self._tags[emoji])
        return self.labels[emoji]

    def _scatter(self, text: str, rng: random.Random) -> str:
        words = text.split(" ")
        for _ in range(rng.randint(1, 4)):
            words.insert(rng.randint(0, len(words)), rng.choice(self._strange))
        return " ".join(words)


def _plain(label: str) -> str:
    return label.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'").lower()
