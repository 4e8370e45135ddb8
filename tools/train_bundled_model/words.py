"""The tokenizer: byte-level BPE in Qwen's form, trained on captions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen2TokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

PAD = "<|endoftext|>"
START, END = "<|im_start|>", "<|im_end|>"
SPECIAL = [START, END, "<think>", "</think>"]
VOCABULARY = 2048
LONGEST = 512

# The shape of Qwen3's template, which the pipeline fills in with thinking switched off.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)


def train(corpus: Iterable[str]) -> Any:
    """A Qwen2 tokenizer of VOCABULARY tokens, the special ones last."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    frame = ["user\n", "assistant\n", "\n\n"] * 1000
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - 1,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([*corpus, *frame], trainer)
    learned = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2TokenizerFast(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        additional_special_tokens=SPECIAL,
        unk_token=PAD,
        eos_token=END,
        pad_token=PAD,
        model_max_length=LONGEST,
        padding_side="right",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def prompt_tokens(tokenizer: Any, captions: Iterable[str]) -> list[list[int]]:
    """Token ids of the captions inside the chat template, exactly as the pipeline makes them."""
    mark = "\0"
    message = [{"role": "user", "content": mark}]
    frame = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    before, after = frame.split(mark)
    ids: list[list[int]] = tokenizer([f"{before}{caption}{after}" for caption in captions])["input_ids"]
    return ids
