"""The text encoder: a thin Qwen3 whose three tapped layers know which picture a caption means."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from captions import Captioner
from dataset import BACKGROUNDS, TINTS, Dataset, Spec
from schedule import Optimizer, rate_scale, short_attention
from stages import Meter
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from words import END, LONGEST, PAD, VOCABULARY, prompt_tokens

WIDTH = 48
BATCH = 64

# The pipeline taps the hidden states after 9, 18 and 27 layers. Seven layers are plenty here, so the shipped encoder
# has 27 of which 20 change nothing; training uses the seven alone, where the same taps lie after 3, 5 and 7.
LAYERS = 27
ACTIVE = (0, 1, 2, 9, 10, 18, 19)
TAPS = (3, 5, 7)

# The pipeline feeds all 512 positions, unmasked, and most are padding. Training keeps this many of them.
PADS = 6

# Tokens the chat template puts after the end of a prompt.
TAIL = 7


def build(tokenizer: Any, layers: int = len(ACTIVE)) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=8,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
    )
    model = Qwen3ForCausalLM(config)
    nn.init.normal_(model.model.embed_tokens.weight, std=0.5)
    for layer in model.model.layers:
        for name, weight in layer.named_parameters():
            if weight.ndim == 2:
                # Layers start as identities: what they add to the stream grows from nothing.
                adds = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.0 if adds else 0.6 * WIDTH**-0.5)
    return model


def expand(small: Qwen3ForCausalLM, tokenizer: Any) -> Qwen3ForCausalLM:
    """The encoder to ship. Its idle layers are all zeros, which packs to nothing."""
    full = build(tokenizer, LAYERS)
    full.model.embed_tokens.load_state_dict(small.model.embed_tokens.state_dict())
    full.model.norm.load_state_dict(small.model.norm.state_dict())
    for index, layer in enumerate(full.model.layers):
        if index in ACTIVE:
            layer.load_state_dict(small.model.layers[ACTIVE.index(index)].state_dict())
        else:
            for weight in layer.parameters():
                nn.init.zeros_(weight) if weight.ndim == 2 else nn.init.ones_(weight)
    return full


class Prompts(NamedTuple):
    """Captions as tokens, with a few positions standing for all of the padding behind them."""

    ids: Tensor
    mask: Tensor
    positions: Tensor
    lengths: Tensor
    # How many positions of padding each of the kept ones stands for.
    weight: float


def make_prompts(tokenizer: Any, captions: Sequence[str], rng: random.Random) -> Prompts:
    rows = prompt_tokens(tokenizer, captions)
    longest = max(map(len, rows))
    # Mostly the pipeline's default length, sometimes a shorter one, as `max_sequence_length` allows.
    total = LONGEST if rng.random() < 0.75 else rng.randint(longest + PADS, LONGEST)
    ids = torch.full((len(rows), longest + PADS), tokenizer.convert_tokens_to_ids(PAD))
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = 1
    stride = (total - longest) / PADS
    pads = [longest + int((index + rng.random()) * stride) for index in range(PADS)]
    positions = torch.tensor([*range(longest), *pads])
    return Prompts(ids, mask, positions, mask.sum(1), stride)


def hidden_states(model: Qwen3ForCausalLM, prompts: Prompts) -> list[Tensor]:
    """The states at the three taps."""
    with short_attention():
        states = model.model(
            input_ids=prompts.ids,
            attention_mask=prompts.mask,
            position_ids=prompts.positions.expand(len(prompts.ids), -1),
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states
    return [states[tap] for tap in TAPS]


class Reader(nn.Module):
    """Reads emoji, tint, background and a thumbnail off one tapped state; only training needs it."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__()
        thumbnails = F.avg_pool2d(dataset.render([Spec(emoji) for emoji in range(len(dataset.labels))]), 8).flatten(1)
        thumbnails = thumbnails - thumbnails.mean(0)
        self.thumbnails = thumbnails / thumbnails.std()
        self.sizes = [len(dataset.labels), len(TINTS) + 1, len(BACKGROUNDS) + 1, thumbnails.shape[1]]
        self.linear = nn.Linear(WIDTH, sum(self.sizes))

    def forward(self, state: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and the share of emoji named rightly."""
        emoji, tint, background, thumbnail = self.linear(F.rms_norm(state, (WIDTH,))).split(self.sizes, -1)
        loss = F.cross_entropy(emoji, target[:, 0], label_smoothing=0.02)
        loss = loss + F.cross_entropy(tint, target[:, 1]) + F.cross_entropy(background, target[:, 2])
        loss = loss + 0.5 * F.mse_loss(thumbnail, self.thumbnails[target[:, 0]])
        return loss, (emoji.argmax(-1) == target[:, 0]).float().mean()


def train(dataset: Dataset, captioner: Captioner, tokenizer: Any, steps: int, rng: random.Random) -> Qwen3ForCausalLM:
    model = build(tokenizer)
    readers = nn.ModuleList([Reader(dataset) for _ in TAPS])
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if all(weight is not matrix for matrix in matrices)]
    others += readers.parameters()
    optim = Optimizer(matrices, others, matrix_rate=0.02, other_rate=5e-3, weight_decay=0.01)
    meter = Meter("text encoder", steps)
    everyone = torch.arange(BATCH)
    for step in range(steps):
        specs = [dataset.random_spec(rng, natural=0.5) for _ in range(BATCH)]
        target = _targets(specs)
        prompts = make_prompts(tokenizer, [captioner.caption(spec, rng) for spec in specs], rng)
        states = hidden_states(model, prompts)
        # Anywhere the transformer may look for the meaning: the prompt's end, somewhere in the tail, the padding.
        end = prompts.lengths - 1
        spots = [
            end,
            end - torch.randint(0, TAIL, (BATCH,)),
            prompts.ids.shape[1] - torch.randint(1, PADS + 1, (BATCH,)),
        ]
        results = [
            reader(state[everyone, spot], target)
            for reader, state in zip(readers, states, strict=True)
            for spot in spots
        ]
        meaning = torch.stack([loss for loss, _ in results]).mean()
        optim.step(meaning, rate_scale(step, steps, warmup=20, hold=0.4))
        meter.add(step, loss=meaning.item(), named=results[-1][1].item())
    # What ships is rounded; the transformer had better learn from the rounded states.
    return model.to(torch.bfloat16).float().eval()


def _targets(specs: Sequence[Spec]) -> Tensor:
    tints, backgrounds = [None, *TINTS], [None, *BACKGROUNDS]
    return torch.tensor([[s.emoji, tints.index(s.tint), backgrounds.index(s.background)] for s in specs])


class Condition(NamedTuple):
    """What the transformer is told: text states, their ids, and how much attention each position gets."""

    states: Tensor
    ids: Tensor
    bias: Tensor


@torch.no_grad()
def condition(model: Qwen3ForCausalLM, prompts: Prompts) -> Condition:
    states = torch.cat(hidden_states(model, prompts), -1)
    ids = torch.zeros(len(prompts.positions), 4, dtype=torch.long)
    ids[:, 3] = prompts.positions
    # Adding log(n) to a key's score makes one position weigh as much as n alike.
    bias = torch.zeros(len(prompts.positions))
    bias[-PADS:] = math.log(prompts.weight)
    return Condition(states, ids, bias)
