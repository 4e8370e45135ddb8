"""Small text encoders of transformers, and calls for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 97


def language_model(config: str, model: str, **more: Any) -> nn.Module:
    sizes = {"hidden_size": 60, "intermediate_size": 154, "num_hidden_layers": 2, "num_attention_heads": 12}
    heads = {"num_key_value_heads": 6, "head_dim": 10, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    made = getattr(transformers, config)(vocab_size=VOCABULARY, **sizes, **heads, **more)
    return getattr(transformers, model)(made).eval()


def t5(config: str, model: str) -> nn.Module:
    made = getattr(transformers, config)(
        vocab_size=VOCABULARY, d_model=60, d_kv=10, d_ff=84, num_layers=2, num_heads=6, feed_forward_proj="gated-gelu"
    )
    return getattr(transformers, model)(made).eval()


def clip(model: str) -> nn.Module:
    made = transformers.CLIPTextConfig(
        vocab_size=VOCABULARY, hidden_size=60, intermediate_size=84, num_hidden_layers=2, num_attention_heads=6,
        max_position_embeddings=20, eos_token_id=2, bos_token_id=1, pad_token_id=0, projection_dim=44,
    )  # fmt: skip
    return getattr(transformers, model)(made).eval()


CASES: dict[str, Callable[[], nn.Module]] = {
    "Qwen3Model": lambda: language_model("Qwen3Config", "Qwen3Model"),
    "Qwen3ForCausalLM": lambda: language_model("Qwen3Config", "Qwen3ForCausalLM"),
    "Qwen3ForCausalLM, tied": lambda: language_model("Qwen3Config", "Qwen3ForCausalLM", tie_word_embeddings=True),
    "LlamaModel": lambda: language_model("LlamaConfig", "LlamaModel"),
    "Gemma2Model": lambda: language_model("Gemma2Config", "Gemma2Model"),
    "T5EncoderModel": lambda: t5("T5Config", "T5EncoderModel"),
    "UMT5EncoderModel": lambda: t5("UMT5Config", "UMT5EncoderModel"),
    "CLIPTextModel": lambda: clip("CLIPTextModel"),
    "CLIPTextModelWithProjection": lambda: clip("CLIPTextModelWithProjection"),
}


def call(batch: int, length: int) -> dict[str, Any]:
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length - 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "output_hidden_states": True}
