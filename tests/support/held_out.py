"""Ten transformers in styles that diffusers does not use: what derivation is tried on and was not written for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "EinsumParameters",
    "FusedKeyValue",
    "GroupedRope",
    "HeadGated",
    "InterleavedProjection",
    "LatentKeys",
    "LinearAttentionMixer",
    "ParallelBlocks",
    "RoutedExperts",
    "WindowedImages",
    "cases",
]

Inputs = dict[str, Any]
Case = tuple[str, Callable[[], nn.Module], list[Inputs]]


def causal_mask(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


# 1 ------------------------------------------------------------------------------------------------------------------


class SelfAttentionKV(nn.Module):
    """Multi-head attention with queries apart and keys and values from one projection."""

    def __init__(self, dim: int, context_dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.kv_proj = nn.Linear(context_dim, 2 * num_heads * head_dim)
        self.o_proj = nn.Linear(num_heads * head_dim, dim)

    def forward(self, x: Tensor, context: Tensor | None = None, causal: bool = False) -> Tensor:
        source = x if context is None else context
        q = self.q_proj(x)
        k, v = self.kv_proj(source).chunk(2, dim=-1)
        b, n, inner = q.shape
        q, k, v = (t.view(b, -1, self.num_heads, inner // self.num_heads).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return cast(Tensor, self.o_proj(out.transpose(1, 2).reshape(b, n, inner)))


class SwiGLU(nn.Module):
    """Gate and value from one projection."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w12 = nn.Linear(dim, 2 * hidden, bias=False)
        self.w3 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w12(x).chunk(2, dim=-1)
        return cast(Tensor, self.w3(F.silu(gate) * value))


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention, feed-forward; all pre-norm."""

    def __init__(self, dim: int, context_dim: int, num_heads: int, head_dim: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.self_attn = SelfAttentionKV(dim, dim, num_heads, head_dim)
        self.norm2 = nn.LayerNorm(dim)
        self.cross_attn = SelfAttentionKV(dim, context_dim, num_heads, head_dim)
        self.norm3 = nn.LayerNorm(dim)
        self.mlp = SwiGLU(dim, hidden)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm1(x), causal=True)
        x = x + self.cross_attn(self.norm2(x), context)
        return x + cast(Tensor, self.mlp(self.norm3(x)))


class FusedKeyValue(nn.Module):
    """An encoder-decoder's decoder: queries alone, keys and values fused, a tied-size language-model head."""

    def __init__(
        self,
        vocab: int = 89,
        dim: int = 52,
        context_dim: int = 46,
        num_heads: int = 6,
        head_dim: int = 11,
        hidden: int = 76,
        depth: int = 2,
        max_length: int = 31,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(max_length, dim)
        self.layers = nn.ModuleList(DecoderLayer(dim, context_dim, num_heads, head_dim, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids: Tensor, context: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = layer(x, context)
        return cast(Tensor, self.lm_head(self.norm(x)))


# 2 ------------------------------------------------------------------------------------------------------------------


class InterleavedAttention(nn.Module):
    """One projection whose rows are head by head: that head's value, then its query, then its key."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.vqk = nn.Linear(dim, heads * 3 * head_dim)
        self.dense = nn.Linear(heads * head_dim, dim)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, _ = hidden.size()
        fused = self.vqk(hidden).view(batch, length, self.heads, 3, self.head_dim)
        value, query, key = fused.permute(3, 0, 2, 1, 4).unbind(0)
        scores = query @ key.transpose(-2, -1) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1)
        mixed = (weights @ value).transpose(1, 2).contiguous().flatten(2)
        return cast(Tensor, self.dense(mixed))


class InterleavedBlock(nn.Module):
    """A post-norm encoder block, as the first transformers were."""

    def __init__(self, dim: int, heads: int, head_dim: int, hidden: int) -> None:
        super().__init__()
        self.attention = InterleavedAttention(dim, heads, head_dim)
        self.attention_norm = nn.LayerNorm(dim)
        self.feed_forward = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, dim))
        self.output_norm = nn.LayerNorm(dim)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        hidden = self.attention_norm(hidden + self.attention(hidden, mask))
        return cast(Tensor, self.output_norm(hidden + self.feed_forward(hidden)))


class InterleavedProjection(nn.Module):
    """A masked encoder with fused projections in the order value, query, key, interleaved by head."""

    def __init__(self, features: int = 17, dim: int = 58, heads: int = 5, head_dim: int = 14, hidden: int = 94) -> None:
        super().__init__()
        self.project = nn.Linear(features, dim)
        self.blocks = nn.ModuleList(InterleavedBlock(dim, heads, head_dim, hidden) for _ in range(3))
        self.pool = nn.Linear(dim, dim)
        self.classify = nn.Linear(dim, 23)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden = self.project(features)
        for block in self.blocks:
            hidden = block(hidden, mask)
        pooled = torch.tanh(self.pool(hidden[:, 0]))
        return hidden, self.classify(pooled)


# 3 ------------------------------------------------------------------------------------------------------------------


class HeadNorm(nn.Module):
    """Root mean square over one head's width, its weight shared by all heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale


class GatedAttention(nn.Module):
    """Each head's output times a learned number and times a number projected from the token."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, heads * head_dim, bias=False)
        self.to_k = nn.Linear(dim, heads * head_dim, bias=False)
        self.to_v = nn.Linear(dim, heads * head_dim)
        self.to_gate = nn.Linear(dim, heads)
        self.head_scale = nn.Parameter(torch.ones(heads, 1, 1))
        self.temperature = nn.Parameter(torch.zeros(heads))
        self.q_norm, self.k_norm = HeadNorm(head_dim), HeadNorm(head_dim)
        self.proj = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.q_norm(self.to_q(x).unflatten(-1, (self.heads, -1))).transpose(1, 2)
        k = self.k_norm(self.to_k(x).unflatten(-1, (self.heads, -1))).transpose(1, 2)
        v = self.to_v(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q = q * self.temperature.exp()[None, :, None, None]
        out = F.scaled_dot_product_attention(q, k, v)
        gate = self.to_gate(x).sigmoid()  # batch, length, heads
        out = out * self.head_scale * gate.permute(0, 2, 1).unsqueeze(-1)
        return cast(Tensor, self.proj(out.transpose(1, 2).reshape(b, n, -1)))


class GatedBlock(nn.Module):
    """Attention with gates, then an MLP, with a learned scale for each branch."""

    def __init__(self, dim: int, heads: int, head_dim: int, hidden: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.attn = GatedAttention(dim, heads, head_dim)
        self.fc_in, self.fc_out = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.gamma_1 = nn.Parameter(torch.full((dim,), 0.5))
        self.gamma_2 = nn.Parameter(torch.full((dim,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma_1 * self.attn(self.ln_1(x))
        return x + self.gamma_2 * self.fc_out(F.relu(self.fc_in(self.ln_2(x))).square())


class HeadGated(nn.Module):
    """A point transformer with gated heads, its two blocks plain attributes, pooled by a learned query token."""

    def __init__(
        self, coordinates: int = 3, dim: int = 62, heads: int = 7, head_dim: int = 8, hidden: int = 98
    ) -> None:
        super().__init__()
        self.lift = nn.Sequential(nn.Linear(coordinates, 37), nn.SiLU(), nn.Linear(37, dim))
        self.token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.block0 = GatedBlock(dim, heads, head_dim, hidden)
        self.block1 = GatedBlock(dim, heads, head_dim, hidden)
        self.head = nn.Linear(dim, 13)

    def forward(self, points: Tensor) -> Tensor:
        x = self.lift(points)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.block1(self.block0(x))
        return cast(Tensor, self.head(x[:, 0]))


# 4 ------------------------------------------------------------------------------------------------------------------


class ParallelBlock(nn.Module):
    """Attention and MLP side by side: one projection in, one projection out."""

    def __init__(self, dim: int, heads: int, head_dim: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.head_dim, self.hidden = heads, head_dim, hidden
        inner = heads * head_dim
        self.splits = (hidden, inner, inner, inner, hidden)
        self.norm = nn.LayerNorm(dim)
        self.in_proj = nn.Linear(dim, sum(self.splits))
        self.out_proj = nn.Linear(inner + hidden, dim)
        self.q_norm = nn.LayerNorm(head_dim)
        self.k_norm = nn.LayerNorm(head_dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, q, k, v, up = self.in_proj(self.norm(x)).split(self.splits, dim=-1)
        shape = (*q.shape[:-1], self.heads, self.head_dim)
        q, k, v = (t.reshape(shape).swapaxes(-2, -3) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        mixed = mixed.swapaxes(-2, -3).flatten(-2)
        return x + cast(Tensor, self.out_proj(torch.cat((mixed, F.gelu(gate, approximate="tanh") * up), dim=-1)))


class ParallelBlocks(nn.Module):
    """A patch transformer of parallel blocks, pooled by attention and by its mean."""

    def __init__(
        self, channels: int = 3, patch: int = 2, dim: int = 56, heads: int = 6, head_dim: int = 10, hidden: int = 88
    ) -> None:
        super().__init__()
        self.patch = patch
        self.patchify = nn.Conv2d(channels, dim, kernel_size=patch, stride=patch)
        self.positions = nn.Parameter(torch.randn(1, dim, 8, 8) * 0.02)
        self.blocks = nn.Sequential(*(ParallelBlock(dim, heads, head_dim, hidden) for _ in range(3)))
        self.norm = nn.LayerNorm(dim)
        self.unpatchify = nn.Linear(dim, patch * patch * channels)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patchify(image)
        height, width = x.shape[-2:]
        x = (x + self.positions[..., :height, :width]).flatten(2).transpose(1, 2)
        x = self.unpatchify(self.norm(self.blocks(x)))
        p = self.patch
        x = x.reshape(-1, height, width, p, p, x.shape[-1] // (p * p))
        return x.permute(0, 5, 1, 3, 2, 4).reshape(image.shape)


# 5 ------------------------------------------------------------------------------------------------------------------


class WindowAttention(nn.Module):
    """Attention within windows, with a learned bias for every relative position and head."""

    relative_index: Tensor

    def __init__(self, dim: int, window: int, heads: int) -> None:
        super().__init__()
        self.dim, self.window, self.heads = dim, window, heads
        self.scale = (dim // heads) ** -0.5
        self.bias_table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.02)
        coords = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + window - 1
        index = relative[..., 0] * (2 * window - 1) + relative[..., 1]
        self.register_buffer("relative_index", index, persistent=False)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        groups, tokens, channels = x.shape
        qkv = self.qkv(x).reshape(groups, tokens, 3, self.heads, channels // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0] * self.scale, qkv[1], qkv[2]
        scores = q @ k.transpose(-2, -1)
        bias = self.bias_table[self.relative_index.view(-1)].view(tokens, tokens, -1).permute(2, 0, 1).contiguous()
        scores = scores + bias.unsqueeze(0)
        if mask is not None:
            windows = mask.shape[0]
            scores = scores.view(groups // windows, windows, self.heads, tokens, tokens) + mask[:, None].unsqueeze(0)
            scores = scores.view(-1, self.heads, tokens, tokens)
        out = scores.softmax(dim=-1) @ v
        return cast(Tensor, self.proj(out.transpose(1, 2).reshape(groups, tokens, channels)))


class WindowBlock(nn.Module):
    """A block over windows, shifted or not."""

    def __init__(self, dim: int, window: int, heads: int, hidden: int, shift: int) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, window, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def partition(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        x = x.view(b, h // self.window, self.window, w // self.window, self.window, c)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.window * self.window, c)

    def merge(self, windows: Tensor, b: int, h: int, w: int) -> Tensor:
        x = windows.view(b, h // self.window, w // self.window, self.window, self.window, -1)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, -1)

    def shift_mask(self, h: int, w: int, like: Tensor) -> Tensor:
        regions = like.new_zeros(1, h, w, 1)
        cuts = (slice(0, -self.window), slice(-self.window, -self.shift), slice(-self.shift, None))
        for number, (rows, columns) in enumerate((r, c) for r in cuts for c in cuts):
            regions[:, rows, columns, :] = number
        flat = self.partition(regions).squeeze(-1)
        difference = flat.unsqueeze(1) - flat.unsqueeze(2)
        return difference.masked_fill(difference != 0, -100.0)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, _ = x.shape
        y = self.norm1(x)
        mask = None
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), dims=(1, 2))
            mask = self.shift_mask(h, w, x)
        y = self.merge(self.attn(self.partition(y), mask), b, h, w)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), dims=(1, 2))
        x = x + y
        return x + cast(Tensor, self.mlp(self.norm2(x)))


class WindowedImages(nn.Module):
    """A hierarchical image encoder: windows, shifted windows, patches merged between two stages of widths."""

    def __init__(self, channels: int = 5, dim: int = 30, window: int = 3, heads: tuple[int, int] = (5, 6)) -> None:
        super().__init__()
        self.embed = nn.Conv2d(channels, dim, kernel_size=2, stride=2)
        self.stage1 = nn.ModuleList(WindowBlock(dim, window, heads[0], 82, shift) for shift in (0, 1))
        self.reduce_norm = nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, 54, bias=False)
        self.stage2 = nn.ModuleList(WindowBlock(54, window, heads[1], 96, shift) for shift in (0, 1))
        self.norm = nn.LayerNorm(54)
        self.head = nn.Linear(54, 19)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embed(pixels).permute(0, 2, 3, 1)
        for block in self.stage1:
            x = block(x)
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], dim=-1)
        x = self.reduction(self.reduce_norm(x))
        for block in self.stage2:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x).mean(dim=(1, 2))))


# 6 ------------------------------------------------------------------------------------------------------------------


class RootMeanSquare(nn.Module):
    """The norm of the latents."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        variance = x.float().pow(2).mean(-1, keepdim=True) if x.dtype == torch.float16 else x.pow(2).mean(-1, True)
        return self.weight * (x * torch.rsqrt(variance + self.eps)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class LatentAttention(nn.Module):
    """Queries through a low rank; keys and values through another, with one rotary key that all heads share."""

    def __init__(self, dim: int, heads: int, nope: int, rope: int, value: int, q_rank: int, kv_rank: int) -> None:
        super().__init__()
        self.heads, self.nope, self.rope, self.value, self.kv_rank = heads, nope, rope, value, kv_rank
        self.q_down = nn.Linear(dim, q_rank, bias=False)
        self.q_norm = RootMeanSquare(q_rank)
        self.q_up = nn.Linear(q_rank, heads * (nope + rope), bias=False)
        self.kv_down = nn.Linear(dim, kv_rank + rope, bias=False)
        self.kv_norm = RootMeanSquare(kv_rank)
        self.kv_up = nn.Linear(kv_rank, heads * (nope + value), bias=False)
        self.o_proj = nn.Linear(heads * value, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.q_up(self.q_norm(self.q_down(x))).view(b, n, self.heads, self.nope + self.rope).transpose(1, 2)
        q_nope, q_rope = torch.split(q, [self.nope, self.rope], dim=-1)
        latent, k_rope = torch.split(self.kv_down(x), [self.kv_rank, self.rope], dim=-1)
        kv = self.kv_up(self.kv_norm(latent)).view(b, n, self.heads, self.nope + self.value).transpose(1, 2)
        k_nope, v = torch.split(kv, [self.nope, self.value], dim=-1)
        k_rope = rotate(k_rope.unsqueeze(1), cos, sin).expand(-1, self.heads, -1, -1)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), dim=-1)
        k = torch.cat((k_nope, k_rope), dim=-1)
        scores = torch.matmul(q, k.mT) * (self.nope + self.rope) ** -0.5
        scores = scores.masked_fill(~mask, float("-inf"))
        out = F.softmax(scores, dim=-1) @ v
        return cast(Tensor, self.o_proj(out.transpose(1, 2).reshape(b, n, self.heads * self.value)))


class LatentLayer(nn.Module):
    """Latent attention and a gated MLP."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.input_norm = RootMeanSquare(dim)
        self.attn = LatentAttention(dim, heads, nope=9, rope=4, value=12, q_rank=34, kv_rank=26)
        self.post_norm = RootMeanSquare(dim)
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attn(self.input_norm(x), cos, sin, mask)
        y = self.post_norm(x)
        return x + cast(Tensor, self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y)))


class LatentKeys(nn.Module):
    """A language model with latent attention and a head tied to its embedding."""

    inv_freq: Tensor

    def __init__(self, vocab: int = 83, dim: int = 64, heads: int = 5, hidden: int = 92, depth: int = 2) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(LatentLayer(dim, heads, hidden) for _ in range(depth))
        self.norm = RootMeanSquare(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("inv_freq", 1.0 / 100 ** (torch.arange(0, 4, 2) / 4), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        angles = torch.arange(tokens.shape[1], device=x.device)[:, None] * self.inv_freq
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        mask = causal_mask(tokens.shape[1], x.device)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return cast(Tensor, self.lm_head(self.norm(x)))


# 7 ------------------------------------------------------------------------------------------------------------------


class Expert(nn.Module):
    """One gated MLP."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.w2(F.silu(self.w1(x)) * self.w3(x)))


class MixtureOfExperts(nn.Module):
    """Each token's two best experts of four, and one expert for all tokens."""

    def __init__(self, dim: int, hidden: int, shared_hidden: int, experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(experts))
        self.shared_expert = Expert(dim, shared_hidden)
        self.shared_gate = nn.Linear(dim, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        weights = self.router(flat).softmax(dim=-1)
        best, chosen = torch.topk(weights, self.top_k, dim=-1)
        best = best / best.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == number)
            out.index_add_(0, rows, expert(flat[rows]) * best[rows, slots, None])
        out = out + torch.sigmoid(self.shared_gate(flat)) * self.shared_expert(flat)
        return out.view_as(hidden)


class ExpertLayer(nn.Module):
    """Attention by torch's own function, then experts."""

    def __init__(self, dim: int, heads: int, hidden: int, shared_hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = dim // heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.moe = MixtureOfExperts(dim, hidden, shared_hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wqkv(self.norm1(x)).split(self.heads * self.head_dim, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.wo(mixed)
        return x + cast(Tensor, self.moe(self.norm2(x)))


class RoutedExperts(nn.Module):
    """A mixture-of-experts language model with a shared expert in each layer."""

    def __init__(self, vocab: int = 79, dim: int = 60, heads: int = 6, depth: int = 2) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.h = nn.ModuleList(ExpertLayer(dim, heads, 44, 68) for _ in range(depth))
        self.ln_f = nn.RMSNorm(dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for layer in self.h:
            x = layer(x)
        return cast(Tensor, self.out(self.ln_f(x)))


# 8 ------------------------------------------------------------------------------------------------------------------


class KernelAttention(nn.Module):
    """Attention linear in the length: positive features of queries and keys, keys and values summed first."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, heads * head_dim)
        self.key = nn.Linear(dim, heads * head_dim)
        self.value = nn.Linear(dim, heads * head_dim)
        self.out = nn.Linear(heads * head_dim, dim)

    def split(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], self.heads, -1)

    def forward(self, x: Tensor) -> Tensor:
        q = F.elu(self.split(self.query(x))) + 1
        k = F.elu(self.split(self.key(x))) + 1
        v = self.split(self.value(x))
        kv = torch.einsum("bnhd,bnhe->bhde", k, v)
        normaliser = 1 / (torch.einsum("bnhd,bhd->bnh", q, k.sum(dim=1)) + 1e-6)
        mixed = torch.einsum("bnhd,bhde,bnh->bnhe", q, kv, normaliser)
        return cast(Tensor, self.out(mixed.flatten(-2)))


class WrittenOutAttention(nn.Module):
    """Attention by einsum, its softmax by exponentials and sums."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.qkv = nn.Linear(dim, 3 * heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, self.head_dim).unbind(dim=2)
        logits = torch.einsum("bihd,bjhd->bhij", q, k) / self.head_dim**0.5
        logits = logits - logits.amax(dim=-1, keepdim=True).detach()
        weights = logits.exp()
        weights = weights / weights.sum(dim=-1, keepdim=True)
        mixed = torch.einsum("bhij,bjhd->bihd", weights, v)
        return cast(Tensor, self.out(mixed.reshape(b, n, -1)))


class ConvMLP(nn.Module):
    """An MLP with a depthwise convolution over time between its two projections."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Conv1d(dim, hidden, 1)
        self.mix = nn.Conv1d(hidden, hidden, 3, padding=1, groups=hidden)
        self.down = nn.Conv1d(hidden, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.mix(self.up(x.transpose(1, 2))))
        return cast(Tensor, self.down(y)).transpose(1, 2)


class LinearAttentionMixer(nn.Module):
    """A sequence model in which linear attention and attention written out by hand take turns."""

    def __init__(self, bands: int = 21, dim: int = 50, heads: int = 6, head_dim: int = 9, hidden: int = 74) -> None:
        super().__init__()
        self.stem = nn.Conv1d(bands, dim, 3, padding=1)
        self.mixers = nn.ModuleList(
            cast(nn.Module, cls(dim, heads, head_dim))
            for cls in (KernelAttention, WrittenOutAttention, KernelAttention)
        )
        self.channels = nn.ModuleList(ConvMLP(dim, hidden) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(6))
        self.last = nn.Linear(dim, bands)

    def forward(self, spectrum: Tensor) -> Tensor:
        x = self.stem(spectrum).transpose(1, 2)
        for i, (mixer, channel) in enumerate(zip(self.mixers, self.channels, strict=True)):
            x = x + mixer(self.norms[2 * i](x))
            x = x + channel(self.norms[2 * i + 1](x))
        return cast(Tensor, self.last(x)).transpose(1, 2)


# 9 ------------------------------------------------------------------------------------------------------------------


class ParameterAttention(nn.Module):
    """Projections that are parameters shaped by head, applied by einsum."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.w_q = nn.Parameter(torch.randn(heads, dim, head_dim) * dim**-0.5)
        self.w_k = nn.Parameter(torch.randn(heads, dim, head_dim) * dim**-0.5)
        self.w_v = nn.Parameter(torch.randn(dim, heads, head_dim) * dim**-0.5)
        self.b_v = nn.Parameter(torch.zeros(heads, head_dim))
        self.w_o = nn.Parameter(torch.randn(heads, head_dim, dim) * (heads * head_dim) ** -0.5)
        self.b_o = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        q = torch.einsum("bnc,hcd->bhnd", x, self.w_q)
        k = torch.einsum("bnc,hcd->bhnd", x, self.w_k)
        v = torch.einsum("bnc,chd->bnhd", x, self.w_v) + self.b_v
        weights = torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5, dim=-1)
        mixed = torch.einsum("bhij,bjhd->bihd", weights, v)
        return torch.einsum("bnhd,hdc->bnc", mixed, self.w_o) + self.b_o


class ParameterMLP(nn.Module):
    """Two matrices and ``@``."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(dim, hidden) * dim**-0.5)
        self.b_in = nn.Parameter(torch.zeros(hidden))
        self.w_out = nn.Parameter(torch.randn(hidden, dim) * hidden**-0.5)
        self.b_out = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x @ self.w_in + self.b_in) @ self.w_out + self.b_out


class EinsumParameters(nn.Module):
    """A transformer of bare parameters, its layers held in lists by role."""

    def __init__(self, vocab: int = 71, dim: int = 48, heads: int = 5, head_dim: int = 13, hidden: int = 86) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(vocab, dim))
        self.attns = nn.ModuleList(ParameterAttention(dim, heads, head_dim) for _ in range(3))
        self.mlps = nn.ModuleList(ParameterMLP(dim, hidden) for _ in range(3))
        self.attn_scales = nn.ParameterList(nn.Parameter(torch.ones(dim)) for _ in range(3))
        self.mlp_scales = nn.ParameterList(nn.Parameter(torch.ones(dim)) for _ in range(3))
        self.unembed = nn.Parameter(torch.randn(dim, vocab) * dim**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table[ids]
        width = (x.shape[-1],)
        for attn, mlp, a, m in zip(self.attns, self.mlps, self.attn_scales, self.mlp_scales, strict=True):
            x = x + attn(F.layer_norm(x, width) * a)
            x = x + mlp(F.layer_norm(x, width) * m)
        return torch.matmul(F.layer_norm(x, width), self.unembed)


# 10 -----------------------------------------------------------------------------------------------------------------


class FullWidthNorm(nn.Module):
    """Root mean square over all heads together, written by hand."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + self.eps)
        return x / scale * self.gain


def rotary(length: int, width: int, like: Tensor, base: float = 500.0) -> tuple[Tensor, Tensor]:
    frequencies = base ** (-torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(length, device=like.device, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


class GroupedAttention(nn.Module):
    """More query heads than key heads; queries and keys normed before they are cut into heads."""

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q = nn.Linear(dim, heads * head_dim)
        self.k = nn.Linear(dim, kv_heads * head_dim)
        self.v = nn.Linear(dim, kv_heads * head_dim)
        self.q_norm = FullWidthNorm(heads * head_dim)
        self.k_norm = FullWidthNorm(kv_heads * head_dim)
        self.o = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.q_norm(self.q(x)).view(b, n, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_norm(self.k(x)).view(b, n, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(x).view(b, n, self.kv_heads, self.head_dim).transpose(1, 2)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        repeats = self.heads // self.kv_heads
        k = k[:, :, None].expand(-1, -1, repeats, -1, -1).reshape(b, self.heads, n, self.head_dim)
        v = v[:, :, None].expand(-1, -1, repeats, -1, -1).reshape(b, self.heads, n, self.head_dim)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return cast(Tensor, self.o(mixed.transpose(1, 2).reshape(b, n, self.heads * self.head_dim)))


class ModulatedBlock(nn.Module):
    """Shift, scale and gate of both branches from the time embedding."""

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int, hidden: int) -> None:
        super().__init__()
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.attn = GroupedAttention(dim, heads, kv_heads, head_dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor, time: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(time)[:, None].chunk(6, dim=-1)
        x = x + gate_a * self.attn(self.norm(x) * (1 + scale_a) + shift_a, cos, sin)
        y = self.norm(x) * (1 + scale_m) + shift_m
        return x + gate_m * cast(Tensor, self.down(F.gelu(self.up(y), approximate="tanh")))


class GroupedRope(nn.Module):
    """A diffusion transformer with grouped keys, full-width norms, its own rotary tables and AdaLN."""

    def __init__(
        self,
        channels: int = 15,
        dim: int = 54,
        heads: int = 10,
        kv_heads: int = 5,
        head_dim: int = 6,
        hidden: int = 90,
        depth: int = 2,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.frequencies = 28
        self.x_in = nn.Linear(channels, dim)
        self.time_mlp = nn.Sequential(nn.Linear(self.frequencies, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(ModulatedBlock(dim, heads, kv_heads, head_dim, hidden) for _ in range(depth))
        self.final_modulation = nn.Linear(dim, 2 * dim)
        self.x_out = nn.Linear(dim, channels)

    def embed_time(self, t: Tensor) -> Tensor:
        half = self.frequencies // 2
        exponents = -math.log(1000.0) * torch.arange(half, device=t.device, dtype=t.dtype) / half
        angles = t[:, None] * exponents.exp()
        return cast(Tensor, self.time_mlp(torch.cat((angles.cos(), angles.sin()), dim=-1)))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h, time = self.x_in(x), self.embed_time(t)
        cos, sin = rotary(x.shape[1], self.head_dim, h)
        for block in self.blocks:
            h = block(h, time, cos, sin)
        shift, scale = self.final_modulation(F.silu(time)).unsqueeze(1).chunk(2, dim=-1)
        h = F.layer_norm(h, h.shape[-1:]) * (1 + scale) + shift
        return cast(Tensor, self.x_out(h))


# --------------------------------------------------------------------------------------------------------------------


def cases() -> list[Case]:
    """Each class by name, its builder, and inputs of two batch sizes and lengths that reach all its branches."""
    generator = torch.Generator().manual_seed(3)

    def real(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def ids(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    def mask(batch: int, length: int) -> Tensor:
        return torch.arange(length) < torch.tensor([length, length - 2, length - 1][:batch])[:, None]

    def built(cls: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            torch.manual_seed(0)
            return cls().eval()

        return build

    inputs: list[tuple[Callable[[], nn.Module], list[Inputs]]] = [
        (
            FusedKeyValue,
            [
                dict(input_ids=ids(89, 2, 7), context=real(2, 4, 46)),
                dict(input_ids=ids(89, 3, 9), context=real(3, 8, 46)),
            ],
        ),
        (
            InterleavedProjection,
            [dict(features=real(2, 8, 17), mask=mask(2, 8)), dict(features=real(3, 11, 17), mask=None)],
        ),
        (HeadGated, [dict(points=real(2, 9, 3)), dict(points=real(4, 12, 3))]),
        (ParallelBlocks, [dict(image=real(2, 3, 6, 8)), dict(image=real(1, 3, 10, 4))]),
        (WindowedImages, [dict(pixels=real(2, 5, 12, 12)), dict(pixels=real(1, 5, 12, 24))]),
        (LatentKeys, [dict(tokens=ids(83, 2, 7)), dict(tokens=ids(83, 3, 10))]),
        (RoutedExperts, [dict(ids=ids(79, 2, 8)), dict(ids=ids(79, 3, 11))]),
        (LinearAttentionMixer, [dict(spectrum=real(2, 21, 8)), dict(spectrum=real(3, 21, 13))]),
        (EinsumParameters, [dict(ids=ids(71, 2, 7)), dict(ids=ids(71, 3, 9))]),
        (GroupedRope, [dict(x=real(2, 8, 15), t=real(2).abs()), dict(x=real(3, 11, 15), t=real(3).abs())]),
    ]
    return [(cast(type, cls).__name__, built(cls), calls) for cls, calls in inputs]
