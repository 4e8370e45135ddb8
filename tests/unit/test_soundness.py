"""Derived plans are right or refused: models with what tempts a derivation into wrong values.

The constructs stand in stacks of a few blocks, beside a plain MLP that should be sharded whatever becomes of them.
Values are compared with fresh weights, fresh buffers and inputs that the derivation has not seen: of two shapes, and
a hundred times larger.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from vitrail import Plan
from vitrail.apply import planning, trial
from vitrail.apply.planning import derive_plan
from vitrail.apply.prove import compare, randomised
from vitrail.errors import PlanError, VitrailError
from vitrail.plan import resolve

FEATURES, DIM, HEADS, HEAD_DIM, HIDDEN = 9, 20, 6, 4, 36
INNER = HEADS * HEAD_DIM
DEGREES = (2, 3)

Inputs = dict[str, Any]
M = TypeVar("M", bound=type[nn.Module])


# The stack -----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Plain attention, whose steps the constructs replace."""

    def __init__(self, dim: int = DIM, heads: int = HEADS, head_dim: int = HEAD_DIM) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, heads * head_dim)
        self.k = nn.Linear(dim, heads * head_dim)
        self.v = nn.Linear(dim, heads * head_dim)
        self.out = nn.Linear(heads * head_dim, dim)
        self.made()

    def made(self) -> None:
        """What the construct adds."""

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * HEAD_DIM**-0.5

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.logits(q, k).softmax(-1) @ v

    def joined(self, o: Tensor) -> Tensor:
        return o.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(t) for t in (self.q(x), self.k(x), self.v(x)))
        return self.out(self.joined(self.mixed(q, k, v)))


class FeedForward(nn.Module):
    """A plain MLP, whose middle the constructs replace."""

    def __init__(self, dim: int = DIM, hidden: int = HIDDEN, out: int | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(out or hidden, dim)
        self.made()

    def made(self) -> None:
        """What the construct adds."""

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle(self.up(x)))


class Block(nn.Module):
    """A construct in its residual branch."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mixer = mixer

    def forward(self, x: Tensor, *extra: Any) -> Tensor:
        return x + self.mixer(self.norm(x), *extra)


class Stack(nn.Module):
    """A block for each construct and a plain MLP. What else it is called with goes to every construct."""

    def __init__(self, *mixers: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, DIM)
        self.blocks = nn.ModuleList(Block(mixer()) for mixer in mixers)
        self.norm, self.mlp = nn.LayerNorm(DIM), FeedForward(DIM, 28)
        self.last = nn.Linear(DIM, 7)

    def forward(self, x: Tensor, **extra: Any) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, *extra.values())
        return self.last(x + self.mlp(self.norm(x)))


# The check -----------------------------------------------------------------------------------------------------------


def features(batch: int, length: int, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(100 * seed + length)
    return {"x": torch.randn(batch, length, FEATURES, generator=generator)}


def wide(inputs: Inputs) -> Inputs:
    def widen(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return {name: widen(value) for name, value in inputs.items()}


def larger(inputs: Inputs) -> Inputs:
    """Features far outside what random inputs reach: past what is clipped or thresholded."""
    return {name: value * 100 if name == "x" else value for name, value in inputs.items()}


def loaded(model: nn.Module, seed: int = 5) -> nn.Module:
    """A copy with weights and stored buffers of another checkpoint."""
    model = randomised(model, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    stored = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name not in stored:
            continue
        if buffer.is_floating_point():
            buffer.copy_(torch.rand(buffer.shape, generator=generator, dtype=buffer.dtype) + 0.5)
        elif buffer.dtype == torch.bool:
            buffer.copy_(torch.rand(buffer.shape, generator=generator) > 0.5)
        elif buffer.ndim == 1:
            buffer.copy_(buffer[torch.randperm(len(buffer), generator=generator)])
    return model


def built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().eval()


def agree(plan: Plan, model: nn.Module, calls: list[Inputs], degrees: tuple[int, ...] = DEGREES) -> None:
    for degree in degrees:
        try:
            comparison = compare(plan, model, [lambda call=call: wide(call) for call in calls], degree)
        except PlanError:
            continue
        fine = comparison.ok or "cannot be sharded over" in str(comparison.trouble)
        where = f"at degree {degree}: {comparison.trouble}"
        assert fine, f"wrong by {comparison.error} {where}\n{plan.to_json()}"


class Found(NamedTuple):
    plan: Plan
    model: nn.Module

    def shards(self, *names: str, held: bool = False) -> bool:
        """Whether all these parameters are cut."""
        resolved = resolve(self.plan, self.model, 2)
        return all(name in resolved.shards and (held or name not in resolved.held) for name in names)


def sound(
    build: Callable[[], nn.Module], inputs: Callable[..., Inputs] = features, seen: tuple[int, int] = (2, 5)
) -> Found | None:
    """The plan, if there is one, with its values compared at two degrees; None where there is none."""
    try:
        plan = derive_plan(built(build), inputs(*seen), keep=False)
    except VitrailError:
        return None
    model = loaded(built(build))
    agree(plan, model, [inputs(2, 7, seed=4), larger(inputs(2, 7, seed=6))], degrees=(2,))
    agree(plan, model, [inputs(3, 8, seed=4)], degrees=(3,))
    return Found(plan, model)


BESIDE = ("mlp.up.weight", "mlp.down.weight")

CONSTRUCTS: dict[str, Callable[[], nn.Module]] = {}
# Where a refusal of the whole model is no surprise.
MAY_REFUSE = {"SlopesMadeAtFirstUse", "WeightOfUpIsDown", "WeightReadBeside"}


def construct(cls: M) -> M:
    CONSTRUCTS[cls.__name__] = cls
    return cls


# What attention does with its number of heads ------------------------------------------------------------------------


@construct
class AlibiFromArange(Attention):
    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        slopes = 2.0 ** (-8 / self.heads * torch.arange(1, self.heads + 1, dtype=q.dtype))
        positions = torch.arange(q.shape[2])
        return super().logits(q, k) - slopes[:, None, None] * (positions[None] - positions[:, None]).abs()


@construct
class HeadMaskFromArange(Attention):
    def joined(self, o: Tensor) -> Tensor:
        return super().joined(o * (torch.arange(self.heads) % 2)[:, None, None])


@construct
class TokenMaskByHead(Attention):
    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        reach = torch.arange(1, self.heads + 1)[:, None, None]
        positions = torch.arange(q.shape[2])
        return super().logits(q, k).masked_fill((positions[None] - positions[:, None]).abs() > reach, float("-inf"))


@functools.cache
def cached_slopes(heads: int) -> Tensor:
    return torch.linspace(0.1, 1.0, heads)


@construct
class SlopesFromCache(Attention):
    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        positions = torch.arange(q.shape[2])
        return super().logits(q, k) - cached_slopes(self.heads).to(q.dtype)[:, None, None] * positions


@construct
class SlopesMadeAtFirstUse(Attention):
    slopes: Tensor | None = None

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        if self.slopes is None:
            self.slopes = torch.linspace(0.1, 1.0, self.heads, dtype=q.dtype)
        return super().logits(q, k) - self.slopes[:, None, None] * torch.arange(q.shape[2])


@construct
class SlopesFromPythonLoop(Attention):
    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        logits = super().logits(q, k)
        return torch.stack([logits[:, i] * 2.0**-i for i in range(self.heads)], dim=1)


@construct
class HeadsInALoop(Attention):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.stack([super(HeadsInALoop, self).mixed(q[:, i], k[:, i], v[:, i]) for i in range(q.shape[1])], 1)


@construct
class HeadBuffer(Attention):
    def made(self) -> None:
        self.register_buffer("slopes", torch.rand(self.heads))

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return super().logits(q, k) * self.slopes[:, None, None]


@construct
class HeadBufferNotStored(Attention):
    def made(self) -> None:
        self.register_buffer("slopes", torch.arange(1.0, 1 + self.heads), persistent=False)

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return super().logits(q, k) * self.slopes[:, None, None]


@construct
class LongerHeadBuffer(Attention):
    def made(self) -> None:
        self.register_buffer("slopes", torch.rand(16))

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return super().logits(q, k) * self.slopes[: self.heads, None, None]


@construct
class LongerHeadBufferOfOnes(Attention):
    """Until a checkpoint is loaded, every piece of the buffer looks like every other."""

    def made(self) -> None:
        self.register_buffer("slopes", torch.ones(16))

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return super().logits(q, k) * self.slopes[: self.heads, None, None]


@construct
class LongerHeadParameter(Attention):
    def made(self) -> None:
        self.slopes = nn.Parameter(torch.ones(16))

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return super().logits(q, k) * self.slopes[: q.shape[1], None, None]


@construct
class ConstantByHead(Attention):
    def made(self) -> None:
        self.slopes = torch.linspace(0.1, 1.0, self.heads)

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return super().logits(q, k) * self.slopes.to(q.dtype)[:, None, None]


@construct
class ScaleFromLocalHeads(Attention):
    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * q.shape[1] ** -0.5


@construct
class ScaleFromLocalWidth(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        scale = q.shape[-1] ** -0.5
        return self.out(self.joined((self.split(q * scale) @ self.split(k).mT).softmax(-1) @ self.split(v)))


@construct
class ScaleFromHeads(Attention):
    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / math.sqrt(self.heads)


@construct
class ScaleFromHeadsInABranch(Attention):
    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * (2.0 if self.heads > 4 else 0.5)


@construct
class HeadsWrittenAsANumber(Attention):
    """A width of 36 in 6 heads: halved, it still reads as 6 heads of 3."""

    def __init__(self) -> None:
        super().__init__(head_dim=6)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (6, -1)).transpose(1, 2)


@construct
class HeadsFromClosure(Attention):
    def made(self) -> None:
        heads = self.heads
        self.cut = lambda x: x.view(*x.shape[:2], heads, -1).transpose(1, 2)

    def split(self, x: Tensor) -> Tensor:
        return self.cut(x)


@construct
class HeadsFromSharedConfig(Attention):
    """One configuration for all blocks, of which the number of heads serves two purposes."""

    config = SimpleNamespace(heads=HEADS)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.config.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / self.config.heads)


@construct
class HeadsFromTuple(Attention):
    def made(self) -> None:
        self.shape = (HEADS, HEAD_DIM)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, self.shape).transpose(1, 2)


@construct
class HeadsFromProperty(Attention):
    def made(self) -> None:
        self.inner = INNER

    @property
    def head_dim(self) -> int:
        return self.inner // self.heads

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * self.head_dim**-0.5


@construct
class UnflattenModule(Attention):
    def made(self) -> None:
        self.cut = nn.Unflatten(-1, (self.heads, HEAD_DIM))

    def split(self, x: Tensor) -> Tensor:
        return self.cut(x).transpose(1, 2)


@construct
class HeadsAsBatch(Attention):
    def split(self, x: Tensor) -> Tensor:
        return super().split(x).flatten(0, 1)

    def joined(self, o: Tensor) -> Tensor:
        return super().joined(o.unflatten(0, (-1, self.heads)))


@construct
class HeadsAsBatchHeadFirst(Attention):
    """The heads outside the batch, as the first transformers had them."""

    def split(self, x: Tensor) -> Tensor:
        return torch.cat(x.chunk(self.heads, dim=-1), dim=0)

    def joined(self, o: Tensor) -> Tensor:
        return torch.cat(o.chunk(self.heads, dim=0), dim=-1)


@construct
class HeadsInnermost(Attention):
    """Channels in the order (head width, heads): a head is not a run of rows."""

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.heads).permute(0, 3, 1, 2)

    def joined(self, o: Tensor) -> Tensor:
        return o.permute(0, 2, 3, 1).flatten(2)


@construct
class WronglyJoined(Attention):
    """Heads and tokens mixed by a reshape that forgot to transpose."""

    def joined(self, o: Tensor) -> Tensor:
        return o.reshape(o.shape[0], o.shape[2], -1)


@construct
class HeadSwitchStored(Attention):
    """Which heads were pruned: none, until a checkpoint says so."""

    def made(self) -> None:
        self.register_buffer("kept", torch.ones(16, dtype=torch.bool))

    def joined(self, o: Tensor) -> Tensor:
        return super().joined(o * self.kept[: o.shape[1], None, None])


@construct
class HeadKindsLookedUp(Attention):
    """A table of few rows, looked up by a stored number for each head."""

    def made(self) -> None:
        self.table = nn.Embedding(4, 1)
        self.register_buffer("kind", torch.arange(16) % 4)

    def joined(self, o: Tensor) -> Tensor:
        return super().joined(o * self.table(self.kind[: o.shape[1]])[:, None])


@construct
class HeadEmbedding(Attention):
    def made(self) -> None:
        self.table = nn.Embedding(self.heads, HEAD_DIM)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().mixed(q + self.table(torch.arange(q.shape[1]))[:, None], k, v)


@construct
class RelativeBiasEmbedding(Attention):
    def made(self) -> None:
        self.relative = nn.Embedding(31, self.heads)

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        positions = torch.arange(q.shape[2])
        index = (positions[None] - positions[:, None]).clamp(-15, 15) + 15
        return super().logits(q, k) + self.relative(index).permute(2, 0, 1)


@construct
class ValuesConvolvedByHead(Attention):
    def made(self) -> None:
        self.mix = nn.Conv1d(INNER, INNER, 3, padding=1, groups=self.heads)

    def forward(self, x: Tensor) -> Tensor:
        v = self.v(x)
        mixed = self.joined(self.mixed(self.split(self.q(x)), self.split(self.k(x)), self.split(v)))
        return self.out(mixed + self.mix(v.mT).mT)


@construct
class HeadsAsChannels(Attention):
    def made(self) -> None:
        self.mix = nn.Conv2d(self.heads, self.heads, (3, 1), padding=(1, 0), groups=self.heads)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().mixed(q, k, v) + self.mix(v)


@construct
class HeadsRouted(Attention):
    """The two best heads of each token."""

    def made(self) -> None:
        self.gate = nn.Linear(DIM, self.heads)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        chosen = torch.zeros_like(gate).scatter_(-1, gate.topk(2, dim=-1).indices, 1.0) * gate.sigmoid()
        q, k, v = (self.split(t) for t in (self.q(x), self.k(x), self.v(x)))
        return self.out((self.mixed(q, k, v).transpose(1, 2) * chosen[..., None]).flatten(2))


@construct
class HeadScalesSumToOne(Attention):
    def made(self) -> None:
        self.scales = nn.Parameter(torch.zeros(self.heads))

    def joined(self, o: Tensor) -> Tensor:
        return super().joined(o * self.scales.softmax(0)[:, None, None])


# What attention does across its heads --------------------------------------------------------------------------------


@construct
class TalkingHeads(Attention):
    def made(self) -> None:
        self.before = nn.Linear(self.heads, self.heads, bias=False)
        self.after = nn.Conv2d(self.heads, self.heads, 1)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = self.before(self.logits(q, k).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.after(logits.softmax(-1)) @ v


@construct
class TalkingHeadsByEinsum(Attention):
    def made(self) -> None:
        self.talk = nn.Parameter(torch.eye(self.heads))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = self.logits(q, k).softmax(-1)
        return torch.einsum("bhij,hg->bgij", weights, self.talk) @ v


@construct
class MeanOverHeads(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(HEAD_DIM, DIM)

    def joined(self, o: Tensor) -> Tensor:
        return o.mean(1)


@construct
class SumOverHeads(Attention):
    def joined(self, o: Tensor) -> Tensor:
        return super().joined(o) + o.sum(1).repeat(1, 1, self.heads)


@construct
class MeanOfWeights(Attention):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = self.logits(q, k).softmax(-1)
        return weights.mean(1, keepdim=True) @ v


@construct
class SoftmaxOverHeads(Attention):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.logits(q, k).softmax(1) @ v


@construct
class BestHeadOnly(Attention):
    def joined(self, o: Tensor) -> Tensor:
        strength = o.square().mean((2, 3))
        best = F.one_hot(strength.argmax(1), strength.shape[1])
        return super().joined(o * best[..., None, None])


@construct
class HeadsReversed(Attention):
    def joined(self, o: Tensor) -> Tensor:
        return super().joined(o.flip(1))


@construct
class HeadsRolled(Attention):
    def joined(self, o: Tensor) -> Tensor:
        return super().joined(o + o.roll(1, dims=1))


@construct
class FirstHeadApart(Attention):
    def joined(self, o: Tensor) -> Tensor:
        o = o.clone()
        o[:, 0] = o[:, 0] * 3
        o[:, -1] += 1
        return super().joined(o)


@construct
class HeadPairs(Attention):
    """Differential attention: pairs of heads share their values."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = self.logits(q, k).softmax(-1).unflatten(1, (-1, 2))
        weights = weights[:, :, 0] - 0.5 * weights[:, :, 1]
        return (weights[:, :, None] @ v.unflatten(1, (-1, 2))).flatten(1, 2)


@construct
class HeadHalves(Attention):
    """Pairs again, of a head of the first half with one of the second."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first, second = self.logits(q, k).softmax(-1).chunk(2, dim=1)
        return torch.cat((first - second, second), dim=1) @ v


@construct
class NormOverHeads(Attention):
    """One mean and variance for all heads of a token."""

    def joined(self, o: Tensor) -> Tensor:
        o = super().joined(o)
        return (o - o.mean(-1, keepdim=True)) / (o.var(-1, keepdim=True) + 1e-5).sqrt()


@construct
class GroupNormWrittenOut(Attention):
    groups = HEADS

    def joined(self, o: Tensor) -> Tensor:
        o = super().joined(o).unflatten(-1, (self.groups, -1))
        o = (o - o.mean(-1, keepdim=True)) * torch.rsqrt(o.var(-1, unbiased=False, keepdim=True) + 1e-5)
        return o.flatten(-2)


@construct
class GroupNormWrittenOutInOtherGroups(GroupNormWrittenOut):
    groups = 4


@construct
class GroupNormModule(Attention):
    def made(self) -> None:
        self.norm = nn.GroupNorm(self.heads, self.heads * HEAD_DIM)

    def joined(self, o: Tensor) -> Tensor:
        return self.norm(super().joined(o).mT).mT


@construct
class ResidualWithinHeads(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(t) for t in (self.q(x), self.k(x), self.v(x)))
        o = self.joined(self.mixed(q, k, v))
        return self.out(o) + o[..., :DIM]


# Grouped keys --------------------------------------------------------------------------------------------------------


class Grouped(Attention):
    kv_heads = 3

    def made(self) -> None:
        self.k = nn.Linear(DIM, self.kv_heads * HEAD_DIM)
        self.v = nn.Linear(DIM, self.kv_heads * HEAD_DIM)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, HEAD_DIM).transpose(1, 2)


@construct
class KeysRepeatInterleaved(Grouped):
    def made(self) -> None:
        super().made()
        self.repeats = self.heads // self.kv_heads

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().mixed(q, k.repeat_interleave(self.repeats, 1), v.repeat_interleave(self.repeats, 1))


@construct
class KeysRepeatInterleavedByHeads(Grouped):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        repeats = self.heads // self.kv_heads
        return super().mixed(q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1))


@construct
class KeysTiled(Grouped):
    """Head i takes keys i modulo 3: a run of query heads needs keys that are not a run."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().mixed(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))


@construct
class KeysOfTwoHeads(KeysRepeatInterleaved):
    """Too few for degree 3."""

    kv_heads = 2


@construct
class KeysOfOneHead(Grouped):
    kv_heads = 1


@construct
class KeysGroupedBySdpa(Grouped):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@construct
class QueriesGroupedInView(Grouped):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.unflatten(1, (self.kv_heads, -1))
        return super().mixed(q, k[:, :, None], v[:, :, None]).flatten(1, 2)


# Positions and sinks -------------------------------------------------------------------------------------------------


@construct
class ComplexRotary(Attention):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(q.shape[2], dtype=q.dtype), torch.tensor([1.0, 0.1], dtype=q.dtype))
        turn = torch.polar(torch.ones_like(angles), angles)
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.float().unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)
            for t in (q, k)
        )
        return super().mixed(q.type_as(v), k.type_as(v), v)


@construct
class RotaryByHead(Attention):
    """Every head turns at its own speed, kept in a buffer by head."""

    def made(self) -> None:
        self.register_buffer("speeds", torch.rand(self.heads, HEAD_DIM // 2))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        angles = torch.arange(q.shape[2])[None, :, None] * self.speeds[:, None]
        cos, sin = angles.cos(), angles.sin()
        q, k = (torch.cat((a * cos - b * sin, b * cos + a * sin), -1) for a, b in (t.chunk(2, dim=-1) for t in (q, k)))
        return super().mixed(q, k, v)


@construct
class RotaryBeforeSplit(Attention):
    """The whole width is turned as one, before it is cut into heads: its halves are far apart."""

    def forward(self, x: Tensor) -> Tensor:
        def turned(t: Tensor) -> Tensor:
            angles = torch.arange(t.shape[1])[:, None] * torch.arange(1, t.shape[-1] // 2 + 1)[None] * 0.1
            a, b = t.chunk(2, dim=-1)
            return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

        q, k, v = self.split(turned(self.q(x))), self.split(turned(self.k(x))), self.split(self.v(x))
        return self.out(self.joined(self.mixed(q, k, v)))


@construct
class Sinks(Attention):
    def made(self) -> None:
        self.sinks = nn.Parameter(torch.zeros(self.heads))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = self.logits(q, k)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        return torch.cat((logits, sinks), -1).softmax(-1)[..., :-1] @ v


@construct
class LearnedKeys(Attention):
    """Keys and values that are parameters, put before the projected ones."""

    def made(self) -> None:
        self.more_k = nn.Parameter(torch.randn(1, self.heads, 2, HEAD_DIM))
        self.more_v = nn.Parameter(torch.randn(1, 2, self.heads * HEAD_DIM))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = torch.cat((self.more_k.expand(k.shape[0], -1, -1, -1), k), dim=2)
        v = torch.cat((self.split(self.more_v).expand(k.shape[0], -1, -1, -1), v), dim=2)
        return super().mixed(q, k, v)


@construct
class TorchMultihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@construct
class TorchEncoderLayer(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(DIM, 5, 32, batch_first=True)


# What a feed-forward does along its hidden width ---------------------------------------------------------------------


@construct
class HiddenFlipped(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h).flip(-1)


@construct
class HiddenFlippedAndAdded(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h) * h.flip(-1)


@construct
class HiddenRolled(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h) + h.roll(3, dims=-1)


@construct
class HiddenRolledFlat(FeedForward):
    """A roll without dims goes over the flattened tensor."""

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h) + h.roll(5)


@construct
class HiddenSorted(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return h.sort(dim=-1).values


@construct
class HiddenTopK(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return h * (h >= h.topk(7, dim=-1).values[..., -1:])


@construct
class HiddenCumulativeSum(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h).cumsum(-1)


@construct
class HiddenCumulativeProduct(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return (1 + 0.1 * torch.tanh(h)).cumprod(-1)


@construct
class TokensCumulativeSum(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h).cumsum(-2)


@construct
class HiddenDifferences(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h).diff(dim=-1, prepend=h[..., :1])


@construct
class HiddenSoftmax(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return h.softmax(-1)


@construct
class HiddenLogSumExp(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return h - h.logsumexp(-1, keepdim=True)


@construct
class HiddenOverMaximum(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return h / h.abs().amax(-1, keepdim=True)


@construct
class HiddenOverMaximumOfAll(FeedForward):
    """A quantisation by the largest value of the whole tensor."""

    def middle(self, h: Tensor) -> Tensor:
        scale = h.abs().max() / 127
        return (h / scale).round() * scale


@construct
class HiddenArgmax(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h) * (1 + h.argmax(-1, keepdim=True))


@construct
class HiddenNormalised(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return F.normalize(F.gelu(h), dim=-1)


@construct
class HiddenVectorNorm(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return h / (torch.linalg.vector_norm(h, dim=-1, keepdim=True) + 1)


@construct
class HiddenStandardised(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return (h - h.mean(-1, keepdim=True)) / h.std(-1, keepdim=True)


@construct
class HiddenLayerNorm(FeedForward):
    def made(self) -> None:
        self.norm = nn.LayerNorm(HIDDEN)

    def middle(self, h: Tensor) -> Tensor:
        return self.norm(F.gelu(h))


@construct
class HiddenFunctionalNorm(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return F.rms_norm(h, h.shape[-1:])


@construct
class HiddenGroupNorm(FeedForward):
    def made(self) -> None:
        self.norm = nn.GroupNorm(4, HIDDEN)

    def middle(self, h: Tensor) -> Tensor:
        return self.norm(F.gelu(h).transpose(1, 2)).transpose(1, 2)


@construct
class HiddenFunctionalGroupNorm(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return F.group_norm(F.gelu(h).transpose(1, 2), 3).transpose(1, 2)


@construct
class HiddenBatchNorm(FeedForward):
    def made(self) -> None:
        self.norm = nn.BatchNorm1d(HIDDEN)

    def middle(self, h: Tensor) -> Tensor:
        return self.norm(F.gelu(h).transpose(1, 2)).transpose(1, 2)


@construct
class HiddenInstanceNorm(FeedForward):
    def made(self) -> None:
        self.norm = nn.InstanceNorm1d(HIDDEN, affine=True)

    def middle(self, h: Tensor) -> Tensor:
        return self.norm(F.gelu(h).transpose(1, 2)).transpose(1, 2)


@construct
class HiddenGlobalResponseNorm(FeedForward):
    def made(self) -> None:
        self.gamma = nn.Parameter(torch.zeros(HIDDEN))

    def middle(self, h: Tensor) -> Tensor:
        size = F.gelu(h).norm(dim=1, keepdim=True)
        return h + self.gamma * h * size / (size.mean(-1, keepdim=True) + 1e-6)


@construct
class HiddenScaledByLocalWidth(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h) * h.shape[-1] ** -0.5


@construct
class HiddenScaledByLocalNumber(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h) * (1000 / h.numel())


@construct
class HiddenSumDividedByWidth(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h - h.sum(-1, keepdim=True) / h.size(-1))


@construct
class HiddenBranchOnWidth(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h) * 2 if h.shape[-1] >= 30 else torch.relu(h)


@construct
class HiddenPositions(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h + torch.arange(h.shape[-1]) / 7)


@construct
class HiddenMaskFromArange(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return h.masked_fill(torch.arange(h.shape[-1]) < 5, 0.0)


@construct
class HiddenLinspace(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return h * torch.linspace(0, 1, h.shape[-1], dtype=h.dtype)


@construct
class HiddenEye(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h) @ torch.eye(h.shape[-1], dtype=h.dtype).cumsum(0)


@construct
class HiddenSeededNoise(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        noise = torch.rand(h.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        return F.gelu(h) * noise.to(h.dtype)


@construct
class HiddenWhereConstant(FeedForward):
    def made(self) -> None:
        self.kept = torch.arange(HIDDEN) % 3 == 0

    def middle(self, h: Tensor) -> Tensor:
        return torch.where(self.kept, F.gelu(h), -h)


@construct
class HiddenWhereConstantValues(FeedForward):
    def made(self) -> None:
        self.fallback = torch.linspace(-1, 1, HIDDEN)

    def middle(self, h: Tensor) -> Tensor:
        return torch.where(h > 0, h, self.fallback.to(h.dtype))


@construct
class HiddenConstantInList(FeedForward):
    """A constant the module does not own by name."""

    def made(self) -> None:
        self.constants = [torch.linspace(0.5, 2, HIDDEN), torch.linspace(2, 3, HIDDEN)]

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h * self.constants[0].to(h.dtype)) + self.constants[1].to(h.dtype)


@construct
class HiddenConstantFromPython(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h) * torch.tensor([1.0 + i % 5 for i in range(h.shape[-1])], dtype=h.dtype)


@construct
class HiddenBuffer(FeedForward):
    def made(self) -> None:
        self.register_buffer("scale", torch.ones(HIDDEN))

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h) * self.scale


@construct
class HiddenLongerBuffer(FeedForward):
    def made(self) -> None:
        self.register_buffer("scale", torch.ones(50))

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h) * self.scale[: h.shape[-1]]


@construct
class HiddenPermuted(FeedForward):
    def made(self) -> None:
        self.register_buffer("order", torch.arange(HIDDEN).roll(11))

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h) * h[..., self.order]


@construct
class HiddenGathered(FeedForward):
    def made(self) -> None:
        self.register_buffer("order", torch.arange(HIDDEN).flip(0))

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h).gather(-1, self.order.expand_as(h))


@construct
class HiddenShuffled(FeedForward):
    """ShuffleNet's exchange of channels between groups."""

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h).unflatten(-1, (4, -1)).transpose(-1, -2).flatten(-2)


@construct
class HiddenSliceInPlace(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        h = F.gelu(h)
        h[..., :5] += 1
        return h


@construct
class HiddenHalfInPlace(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        h = F.gelu(h)
        h[..., : h.shape[-1] // 2].mul_(2)
        return h


@construct
class HiddenViewInPlace(FeedForward):
    """A view is changed after it was taken, and the whole is used."""

    def middle(self, h: Tensor) -> Tensor:
        h = h.clone()
        first = h.view(-1)[: h.shape[-1] // 3]
        first.fill_(3.0)
        return F.gelu(h)


@construct
class HiddenWritten(FeedForward):
    """Halves written into an empty tensor of a width from the configuration."""

    width = HIDDEN

    def middle(self, h: Tensor) -> Tensor:
        out = h.new_zeros(*h.shape[:-1], self.width)
        out[..., : h.shape[-1]] = F.gelu(h)
        return out


@construct
class HiddenPadded(FeedForward):
    def __init__(self) -> None:
        super().__init__(out=HIDDEN + 4)

    def middle(self, h: Tensor) -> Tensor:
        return F.pad(F.gelu(h), (1, 3), value=0.5)


@construct
class HiddenPooled(FeedForward):
    """Maximum over windows of three channels with stride one."""

    def middle(self, h: Tensor) -> Tensor:
        return F.max_pool1d(h, 3, stride=1, padding=1)


@construct
class HiddenMaxout(FeedForward):
    def __init__(self) -> None:
        super().__init__(out=HIDDEN // 3)

    def middle(self, h: Tensor) -> Tensor:
        return h.unflatten(-1, (-1, 3)).amax(-1)


@construct
class HiddenMaxoutFarApart(FeedForward):
    def __init__(self) -> None:
        super().__init__(out=HIDDEN // 3)

    def middle(self, h: Tensor) -> Tensor:
        return h.unflatten(-1, (3, -1)).amax(-2)


@construct
class HiddenFolded(FeedForward):
    """Half of the channels become tokens and return."""

    def middle(self, h: Tensor) -> Tensor:
        folded = h.reshape(h.shape[0], h.shape[1] * 2, -1)
        return (F.gelu(folded) + folded.mean(1, keepdim=True)).reshape(h.shape)


@construct
class HiddenTransform(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return torch.fft.fft(F.gelu(h), dim=-1).real


@construct
class HiddenConvolved(FeedForward):
    def made(self) -> None:
        self.kernel = nn.Parameter(torch.randn(1, 1, 3))

    def middle(self, h: Tensor) -> Tensor:
        return F.conv1d(F.gelu(h).flatten(0, 1)[:, None], self.kernel, padding=1).view_as(h)


@construct
class HiddenGroupedConvolution(FeedForward):
    def made(self) -> None:
        self.mix = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1, groups=4)

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(self.mix(h.transpose(1, 2))).transpose(1, 2)


@construct
class HiddenSecondMoment(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        h = torch.tanh(h)
        return h @ (h.mT @ h) / 10


@construct
class HiddenGram(FeedForward):
    """Tokens against tokens, summed over the hidden channels, then back."""

    def middle(self, h: Tensor) -> Tensor:
        return (h @ h.mT).softmax(-1) @ h


@construct
class HiddenChunkedByConfig(FeedForward):
    chunks = 3

    def __init__(self) -> None:
        super().__init__(out=HIDDEN // 3)

    def middle(self, h: Tensor) -> Tensor:
        first, second, third = torch.chunk(h, self.chunks, dim=-1)
        return F.silu(first) * second + third


@construct
class HiddenChunkedIntoUnequal(FeedForward):
    """36 in chunks of at most 8: five, the last of 4."""

    def middle(self, h: Tensor) -> Tensor:
        return torch.cat([F.gelu(part) * (i + 1) for i, part in enumerate(h.split(8, dim=-1))], dim=-1)


@construct
class HiddenGatedInSlices(FeedForward):
    def __init__(self) -> None:
        super().__init__(out=HIDDEN // 2)

    def middle(self, h: Tensor) -> Tensor:
        return h[..., 0::2] * torch.sigmoid(h[..., 1::2])


@construct
class HiddenGlu(FeedForward):
    def __init__(self) -> None:
        super().__init__(out=HIDDEN // 2)

    def middle(self, h: Tensor) -> Tensor:
        return F.glu(h, dim=-1)


@construct
class HiddenOverlappingSlices(FeedForward):
    """Two slices that overlap: no row of the projection belongs to one alone."""

    def __init__(self) -> None:
        super().__init__(out=24)

    def middle(self, h: Tensor) -> Tensor:
        return h[..., :24] * torch.sigmoid(h[..., 12:])


@construct
class HiddenDropout(FeedForward):
    def made(self) -> None:
        self.drop = nn.Dropout(0.5)

    def middle(self, h: Tensor) -> Tensor:
        return self.drop(F.dropout(F.gelu(h), 0.3, self.training))


@construct
class HiddenCasts(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h.float()).to(torch.bfloat16).type_as(h) + h.half().to(h.dtype)


@construct
class HiddenRounded(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return (h * 8).to(torch.int32).to(h.dtype) / 8


@construct
class HiddenAsBits(FeedForward):
    """Dtypes viewed, so that a channel is several."""

    def middle(self, h: Tensor) -> Tensor:
        signs = h.contiguous().view(torch.uint8).unflatten(-1, (h.shape[-1], -1))[..., -1] >= 128
        return torch.where(signs, -h, h * 2)


@construct
class HiddenStrided(FeedForward):
    """Overlapping windows through as_strided with strides from the configuration."""

    def middle(self, h: Tensor) -> Tensor:
        h = F.gelu(h).contiguous()
        return h.as_strided((*h.shape[:2], HIDDEN), (h.shape[1] * h.shape[2], h.shape[2], 1)) * 2


@construct
class HiddenClippedByNorm(FeedForward):
    """Nothing is clipped at the size of random inputs."""

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h) * torch.clamp(50 / h.norm(dim=-1, keepdim=True), max=1)


@construct
class HiddenOutliers(FeedForward):
    """There are none at the size of random inputs."""

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h) * (1 + 2 * (h > 20).any(-1, keepdim=True)) / (1 + (h > 30).sum(-1, keepdim=True))


@construct
class HiddenSumBelowThreshold(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h) + F.relu(h.sum(-1, keepdim=True) - 100)


@construct
class HiddenSwitchStored(FeedForward):
    def made(self) -> None:
        self.register_buffer("kept", torch.ones(50, dtype=torch.bool))

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h) * self.kept[: h.shape[-1]]


@construct
class HiddenOrderStored(FeedForward):
    """The order of the channels is as they are, until a checkpoint says otherwise."""

    def made(self) -> None:
        self.register_buffer("order", torch.arange(HIDDEN))

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h)[..., self.order[: h.shape[-1]] % h.shape[-1]]


@construct
class HiddenEmbedding(FeedForward):
    def made(self) -> None:
        self.table = nn.Embedding(50, 1)

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h) * self.table(torch.arange(h.shape[-1])).squeeze(-1)


@construct
class HiddenScalesAccumulated(FeedForward):
    def made(self) -> None:
        self.scales = nn.Parameter(torch.ones(HIDDEN))

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h) * self.scales.cumsum(0)


@construct
class HiddenBranchOnValue(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h) * 2 if h.mean().item() > 0 else F.relu(h)


@construct
class HiddenThroughNumpy(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return h * torch.from_numpy(h.detach().numpy()[..., ::-1].copy())


@construct
class HiddenIntoGivenTensor(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        out = torch.empty_like(h)
        torch.mul(h, h.sum(-1, keepdim=True), out=out)
        return out


@construct
class HiddenThroughVmap(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return torch.vmap(lambda row: row / row.norm(dim=-1, keepdim=True))(h)


class Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h / h.norm(dim=-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@construct
class HiddenThroughAutogradFunction(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return Normed.apply(h)


# What is added, returned or used outside a projection ----------------------------------------------------------------


@construct
class BiasAfterProduct(FeedForward):
    def made(self) -> None:
        self.down = nn.Linear(HIDDEN, DIM, bias=False)
        self.bias = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


@construct
class BiasIntoAddmm(FeedForward):
    def made(self) -> None:
        self.bias = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x)).flatten(0, 1)
        return torch.addmm(self.bias, h, self.down.weight.t()).view_as(x)


@construct
class WeightsUsedByHand(FeedForward):
    """The modules hold the weights, and are not called."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(F.linear(x, self.up.weight, self.up.bias))
        return F.linear(h, self.down.weight) + self.down.bias


@construct
class WeightOfUpIsDown(FeedForward):
    """One weight, used one way and transposed."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(self.up(x)), self.up.weight.t())


@construct
class WeightReadBeside(FeedForward):
    """A module is called, and its weight read too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.up.weight.square().mean() + self.down.weight.mean(1)


@construct
class SquaredAfterDown(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square_()


@construct
class AddedInPlace(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        y += x
        y.add_(self.down.bias)
        return y


@construct
class TwoDownsOneUp(FeedForward):
    def made(self) -> None:
        self.gate = nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        return self.down(h) * torch.sigmoid(self.gate(h))


@construct
class HiddenGatedByMean(FeedForward):
    """Squeeze and excite."""

    def made(self) -> None:
        self.squeeze, self.excite = nn.Linear(HIDDEN, 6), nn.Linear(6, HIDDEN)

    def middle(self, h: Tensor) -> Tensor:
        h = F.gelu(h)
        return h * torch.sigmoid(self.excite(F.relu(self.squeeze(h.mean(1, keepdim=True)))))


@construct
class HiddenResidual(FeedForward):
    def made(self) -> None:
        self.mid = nn.Linear(HIDDEN, HIDDEN)

    def middle(self, h: Tensor) -> Tensor:
        h = F.gelu(h)
        return h + F.gelu(self.mid(h))


@construct
class HiddenDotVector(FeedForward):
    def made(self) -> None:
        self.vector = nn.Parameter(torch.randn(HIDDEN))

    def middle(self, h: Tensor) -> Tensor:
        h = F.gelu(h)
        return h * torch.sigmoid((h * self.vector).sum(-1, keepdim=True))


@construct
class HiddenAlsoResidual(FeedForward):
    """As wide as the stream, so that hidden and stream can be added."""

    def __init__(self) -> None:
        super().__init__(hidden=DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        return self.down(h) + h


@construct
class HiddenPlusStream(FeedForward):
    def __init__(self) -> None:
        super().__init__(hidden=DIM)

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle(self.up(x)) + x)


@construct
class OutAlsoOnTheStream(Attention):
    """The output projection serves the stream as well as the heads, which are as wide."""

    def __init__(self) -> None:
        super().__init__(head_dim=5, heads=4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.out(x)


@construct
class QueryAlsoOnTheStream(Attention):
    """What the query projects is wanted whole, too."""

    def __init__(self) -> None:
        super().__init__(head_dim=5, heads=4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.q(x)


@construct
class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.inner(x))


@construct
class DownCalledTwice(FeedForward):
    def made(self) -> None:
        self.other = nn.Linear(DIM, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))) * self.down(torch.tanh(self.other(x)))


@construct
class UpCalledTwiceApart(FeedForward):
    """Once for the hidden channels, once for their mean."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))) * self.up(-x).amax(-1, keepdim=True)


# Linear layers that are not quite ------------------------------------------------------------------------------------


class ActivatedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(super().forward(x))


class LoraLinear(nn.Linear):
    def __init__(self, features_in: int, features_out: int) -> None:
        super().__init__(features_in, features_out)
        self.a, self.b = nn.Linear(features_in, 3, bias=False), nn.Linear(3, features_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.b(self.a(x)) * 0.5


class LoraParameters(nn.Linear):
    def __init__(self, features_in: int, features_out: int) -> None:
        super().__init__(features_in, features_out)
        self.a = nn.Parameter(torch.randn(3, features_in))
        self.b = nn.Parameter(torch.randn(features_out, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.b @ self.a, self.bias)


class EqualisedLinear(nn.Linear):
    """The scale is read from the number of inputs at run time."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.in_features**-0.5, self.bias)


class StandardisedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight - self.weight.mean(1, keepdim=True)) / (self.weight.std(1, keepdim=True) + 1e-3)
        return F.linear(x, weight, self.bias)


class NormedInputLinear(nn.Linear):
    """BitLinear's habit: the norm of the input within the layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.layer_norm(x, x.shape[-1:]))


class QuantisedInputLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 7
        return super().forward((x / scale).round() * scale)


class TransposedLinear(nn.Module):
    """transformers' Conv1D."""

    def __init__(self, features_in: int, features_out: int) -> None:
        super().__init__()
        self.width = features_out
        self.weight = nn.Parameter(torch.randn(features_in, features_out) * 0.1)
        self.bias = nn.Parameter(torch.zeros(features_out))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], self.width)


class BiasTwice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class MultipliedLinear(nn.Linear):
    """A learned number for all outputs after the bias."""

    def __init__(self, features_in: int, features_out: int) -> None:
        super().__init__(features_in, features_out)
        self.multiplier = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x) * self.multiplier)


LINEARS: list[type[nn.Module]] = [
    ActivatedLinear,
    LoraLinear,
    LoraParameters,
    EqualisedLinear,
    StandardisedLinear,
    NormedInputLinear,
    QuantisedInputLinear,
    TransposedLinear,
    BiasTwice,
    MultipliedLinear,
]


def with_linears(linear: Any) -> nn.Module:
    attention, feed_forward = Attention(), FeedForward()
    attention.q, attention.v = linear(DIM, INNER), linear(DIM, INNER)
    attention.out = linear(INNER, DIM)
    feed_forward.up, feed_forward.down = linear(DIM, HIDDEN), linear(HIDDEN, DIM)
    return nn.Sequential(attention, feed_forward)


CONSTRUCTS |= {cls.__name__: functools.partial(with_linears, cls) for cls in LINEARS}


@construct
class WeightNormed(FeedForward):
    def made(self) -> None:
        parametrizations.weight_norm(self.up)
        parametrizations.weight_norm(self.down)


@construct
class SpectrallyNormed(FeedForward):
    def made(self) -> None:
        parametrizations.spectral_norm(self.up)
        parametrizations.spectral_norm(self.down)


# The tests of the constructs -----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def outcome(names: list[str]) -> str:
    """What is amiss with the plan for these constructs together, or nothing."""
    try:
        found = sound(lambda: Stack(*(CONSTRUCTS[name] for name in names)))
    except AssertionError as error:
        return f"{names}: {error}"
    if found is None:
        return "" if MAY_REFUSE.issuperset(names) else f"{names}: refused, though the rest can be sharded"
    return "" if found.shards(*BESIDE) else f"{names}: the MLP beside is not sharded"


def grouped() -> Iterator[list[str]]:
    """Constructs of attention cost the derivation more when many of them stand together."""
    attention = {name for name, cls in CONSTRUCTS.items() if isinstance(cls, type) and issubclass(cls, Attention)}
    for some, size in ((attention, 3), (CONSTRUCTS.keys() - attention, 6)):
        names = [name for name in CONSTRUCTS if name in some - MAY_REFUSE]
        yield from (names[i : i + size] for i in range(0, len(names), size))
    yield from ([name] for name in sorted(MAY_REFUSE))


@pytest.mark.parametrize("names", list(grouped()), ids="-".join)
def test_constructs(names: list[str]) -> None:
    """Some at a time, which is quicker; each alone only where something is amiss."""
    if amiss := outcome(names):
        alone = [amiss for name in names if (amiss := outcome([name]))] if len(names) > 1 else []
        raise AssertionError("\n".join(alone) or amiss)


def test_the_plain_ones_are_sharded() -> None:
    found = sound(lambda: Stack(Attention, FeedForward, Attention))
    assert found is not None
    attention = (f"blocks.{i}.mixer.{name}.weight" for i in (0, 2) for name in ("q", "k", "v", "out"))
    assert found.shards(*BESIDE, *attention, "blocks.1.mixer.up.weight", "blocks.1.mixer.down.weight")


@pytest.mark.parametrize("seen", [(HEADS, HEADS), (HEAD_DIM, INNER), (3, HIDDEN), (1, 5)])
def test_lengths_that_equal_widths(seen: tuple[int, int]) -> None:
    found = sound(lambda: Stack(HeadBuffer, HiddenBuffer, WronglyJoined), seen=seen)
    assert found is not None
    assert found.shards(*BESIDE)


# Hooks ---------------------------------------------------------------------------------------------------------------


def squashed(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.tanh()


def squashed_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] / args[0].abs().amax(-1, keepdim=True),)


def hooked(names: tuple[str, ...], how: Callable[[nn.Module], Any]) -> nn.Module:
    model = Stack(Attention, FeedForward)
    for name in names:
        how(model.get_submodule(name))
    return model


ROWWISE, COLWISE = ("blocks.0.mixer.out", "blocks.1.mixer.down"), ("blocks.0.mixer.q", "blocks.1.mixer.up")
WITHIN = ("blocks.0.mixer", "blocks.1.mixer")


@pytest.mark.parametrize("names", [ROWWISE, WITHIN])
def test_forward_hook(names: tuple[str, ...]) -> None:
    found = sound(lambda: hooked(names, lambda module: module.register_forward_hook(squashed)))
    assert found is None or found.shards(*BESIDE)


@pytest.mark.parametrize("names", [ROWWISE, COLWISE])
def test_forward_pre_hook(names: tuple[str, ...]) -> None:
    found = sound(lambda: hooked(names, lambda module: module.register_forward_pre_hook(squashed_input)))
    assert found is None or found.shards(*BESIDE)


def test_hook_that_takes_the_hidden_out() -> None:
    """A user's collector of activations: what it keeps, the forward then uses."""

    class Collected(FeedForward):
        def made(self) -> None:
            self.up.register_forward_hook(self.keep)

        def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
            self.kept = output

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.kept.mean(-1, keepdim=True)

    sound(lambda: Stack(Collected))


def test_forward_replaced_on_the_instance() -> None:
    def patch(module: nn.Module) -> None:
        original = module.forward
        module.forward = lambda x: original(x).tanh()  # type: ignore[method-assign]

    sound(lambda: hooked(ROWWISE, patch))


# What leaves a block, and what comes in ------------------------------------------------------------------------------


class Leaving(nn.Module):
    """Every hidden tensor is returned, beside what it becomes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, DIM)
        self.layers = nn.ModuleList(FeedForward() for _ in range(2))
        self.mlp = FeedForward(DIM, 28)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.first(x)
        hidden = []
        for layer in self.layers:
            h = layer.middle(layer.up(x))
            hidden.append(h)
            x = x + layer.down(h)
        return {"x": x + self.mlp(x), "hidden": hidden}


def test_hidden_returned_and_used() -> None:
    found = sound(Leaving)
    assert found is not None
    assert found.shards("mlp.up.weight", "mlp.down.weight")


class Skips(nn.Module):
    """The first layer's hidden channels are the second's, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, DIM)
        self.a, self.b = FeedForward(), FeedForward()
        self.join = nn.Linear(2 * HIDDEN, DIM)
        self.mlp = FeedForward(DIM, 28)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        h = self.a.middle(self.a.up(x))
        x = x + self.a.down(h)
        g = self.b.middle(self.b.up(x)) + h
        x = x + self.b.down(g) + self.join(torch.cat((h, g), dim=-1))
        return x + self.mlp(x)


def test_hidden_of_one_layer_used_in_another() -> None:
    found = sound(Skips)
    assert found is not None
    assert found.shards("mlp.up.weight", "mlp.down.weight")


class SharedKeys(nn.Module):
    """The second layer attends to the first's keys, which the module keeps in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, DIM)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.mlp = FeedForward(DIM, 28)

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.first(x), {}
        for layer in self.layers:
            if not kept:
                kept["k"], kept["v"] = layer.split(layer.k(x)), layer.split(layer.v(x))
            x = x + layer.out(layer.joined(layer.mixed(layer.split(layer.q(x)), kept["k"], kept["v"])))
        return x + self.mlp(x)


def test_keys_of_one_layer_used_in_another() -> None:
    found = sound(SharedKeys)
    assert found is not None
    assert found.shards("mlp.up.weight", "mlp.down.weight")


class MaskedByHead(Attention):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (self.split(t) for t in (self.q(x), self.k(x), self.v(x)))
        return self.out(self.joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


def with_mask_by_head(batch: int, length: int, seed: int = 0) -> Inputs:
    inputs = features(batch, length, seed)
    generator = torch.Generator().manual_seed(seed)
    return {**inputs, "mask": torch.randn(batch, HEADS, length, length, generator=generator)}


def test_mask_by_head_given() -> None:
    found = sound(lambda: Stack(MaskedByHead), with_mask_by_head)
    assert found is not None
    assert found.shards(*BESIDE)


class HeadsSwitched(Attention):
    def forward(self, x: Tensor, switch: Tensor) -> Tensor:
        q, k, v = (self.split(t) for t in (self.q(x), self.k(x), self.v(x)))
        return self.out(self.joined(self.mixed(q, k, v) * switch[:, None, None]))


def test_head_switch_given() -> None:
    """With ones, as given to the derivation, any piece would do."""

    def inputs(batch: int, length: int, seed: int = 0) -> Inputs:
        switch = torch.ones(HEADS) if seed == 0 else torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.5])
        return {**features(batch, length, seed), "switch": switch}

    found = sound(lambda: Stack(HeadsSwitched), inputs)
    assert found is None or found.shards(*BESIDE)


class Cached(nn.Module):
    """Past keys and values come in and go out by head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, DIM)
        self.layer = Attention()
        self.mlp = FeedForward(DIM, 28)

    def forward(self, x: Tensor, past_k: Tensor, past_v: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x, layer = self.first(x), self.layer
        q, k, v = (layer.split(project(x)) for project in (layer.q, layer.k, layer.v))
        k, v = torch.cat((past_k, k), dim=2), torch.cat((past_v, v), dim=2)
        x = x + layer.out(layer.joined(layer.mixed(q, k, v)))
        return x + self.mlp(x), (k, v)


def test_past_keys_in_and_out() -> None:
    def inputs(batch: int, length: int, seed: int = 0) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        past = [torch.randn(batch, HEADS, 3, HEAD_DIM, generator=generator) for _ in range(2)]
        return {**features(batch, length, seed), "past_k": past[0], "past_v": past[1]}

    found = sound(Cached, inputs)
    assert found is None or found.shards("mlp.up.weight", "mlp.down.weight")


# Weights and modules that are one ------------------------------------------------------------------------------------


def tied(pairs: list[tuple[str, str]], mixer: Callable[[], nn.Module]) -> nn.Module:
    model = Stack(mixer, mixer)
    for one, other in pairs:
        model.get_submodule(one).weight = model.get_submodule(other).weight
    return model


def square() -> nn.Module:
    return Attention(DIM, 4, 5)


@pytest.mark.parametrize(
    ("pairs", "mixer"),
    [
        ([("blocks.1.mixer.q", "blocks.0.mixer.q"), ("blocks.1.mixer.out", "blocks.0.mixer.out")], Attention),
        ([("blocks.0.mixer.k", "blocks.0.mixer.q"), ("blocks.1.mixer.k", "blocks.1.mixer.q")], Attention),
        ([("blocks.0.mixer.out", "blocks.0.mixer.q"), ("blocks.1.mixer.out", "blocks.1.mixer.v")], square),
        ([("blocks.1.mixer.up", "blocks.0.mixer.up")], FeedForward),
    ],
    ids=["across blocks", "same role", "opposite roles", "up only"],
)
def test_tied_weights(pairs: list[tuple[str, str]], mixer: Callable[[], nn.Module]) -> None:
    found = sound(lambda: tied(pairs, mixer))
    assert found is None or found.shards(*BESIDE)


class TiedLanguage(nn.Module):
    """An embedding that is the output projection too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(33, DIM)
        self.blocks = nn.ModuleList(Block(Attention()) for _ in range(2))
        self.mlp = FeedForward(DIM, 28)
        self.head = nn.Linear(DIM, 33, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.mlp(x))


def test_tied_embedding() -> None:
    def inputs(batch: int, length: int, seed: int = 0) -> Inputs:
        return {"ids": torch.randint(0, 33, (batch, length), generator=torch.Generator().manual_seed(seed))}

    found = sound(TiedLanguage, inputs)
    assert found is None or found.shards(*BESIDE)


def test_embedding_as_matrix() -> None:
    """The embedding's weight is used by hand as the output projection."""

    class ByHand(TiedLanguage):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Identity()

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) @ self.embed.weight.t()

    def inputs(batch: int, length: int, seed: int = 0) -> Inputs:
        return {"ids": torch.randint(0, 33, (batch, length), generator=torch.Generator().manual_seed(seed))}

    found = sound(ByHand, inputs)
    assert found is None or found.shards(*BESIDE)


def test_one_block_many_times() -> None:
    class Recurrent(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for step in range(3):
                x = self.blocks[0](x) + step
            x = self.blocks[1](x)
            return self.last(x + self.mlp(self.norm(x)))

    found = sound(lambda: Recurrent(Attention, Attention))
    assert found is not None
    assert found.shards(*BESIDE, "blocks.0.mixer.q.weight", "blocks.1.mixer.q.weight")


def test_the_same_module_in_both_blocks() -> None:
    def build() -> nn.Module:
        shared = Attention()
        return Stack(lambda: shared, lambda: shared)

    found = sound(build)
    assert found is None or found.shards(*BESIDE)


# What derivation leaves behind ---------------------------------------------------------------------------------------


def test_the_model_is_left_as_it_was() -> None:
    class Counting(SlopesMadeAtFirstUse):
        def made(self) -> None:
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    model = built(lambda: Stack(Counting)).train()
    before = copy.deepcopy(model.state_dict())
    inputs = features(2, 5)
    kept = inputs["x"].clone()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    derive_plan(model, inputs, keep=False)
    assert torch.equal(torch.rand(3), expected), "the user's random state moved"
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(inputs["x"], kept)
    assert all(block.mixer.slopes is None for block in model.blocks)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("cls", [SlopesMadeAtFirstUse, SlopesFromCache])
def test_a_model_that_was_used_before(cls: Callable[[], nn.Module]) -> None:
    def build() -> nn.Module:
        model = Stack(cls).eval()
        with torch.no_grad():
            model(**features(2, 4))
        return model

    found = sound(build)
    assert found is None or found.shards(*BESIDE)


# What the inputs given to the derivation do not show -----------------------------------------------------------------


DULL: dict[str, Callable[[], Inputs]] = {
    "one token": lambda: features(2, 1),
    "zeros": lambda: {"x": torch.zeros(2, 5, FEATURES)},
    "ones": lambda: {"x": torch.ones(2, 5, FEATURES)},
    "no tokens": lambda: {"x": torch.zeros(2, 0, FEATURES)},
}


@pytest.mark.parametrize(
    ("cls", "dull"), [(WronglyJoined, "one token"), *((ScaleFromHeadsInABranch, dull) for dull in DULL)]
)
def test_inputs_that_show_little(cls: Callable[[], nn.Module], dull: str) -> None:
    """With one token, or all tokens the same, attention's weights do not depend on its logits."""
    try:
        plan = derive_plan(built(lambda: Stack(cls)), DULL[dull](), keep=False)
    except VitrailError:
        return
    agree(plan, loaded(built(lambda: Stack(cls))), [features(2, 7, seed=4)])


class WindowFromHeads(Attention):
    """A number of heads, used as a number of tokens that short inputs do not reach."""

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        positions = torch.arange(q.shape[2])
        far = (positions[None] - positions[:, None]).abs() > 16 * self.heads
        return super().logits(q, k).masked_fill(far, float("-inf"))


class RelativeClampedByHeads(Attention):
    """Distances are clamped at a number made of the heads."""

    def made(self) -> None:
        self.relative = nn.Embedding(200, 1)

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        positions, most = torch.arange(q.shape[2]), 4 * self.heads
        distances = (positions[None] - positions[:, None]).clamp(-most, most)
        return super().logits(q, k) + self.relative(distances + 100)[..., 0]


class WindowFromWidth(Attention):
    """The width of all heads, used in a reshape, is the window too."""

    def made(self) -> None:
        self.inner = INNER

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        positions = torch.arange(q.shape[2])
        return super().logits(q, k).masked_fill((positions[None] - positions[:, None]).abs() >= self.inner, -1e9)

    def joined(self, o: Tensor) -> Tensor:
        return o.transpose(1, 2).reshape(o.shape[0], o.shape[2], self.inner)


class WindowOfTheSameNumber(Attention):
    """The window happens to be as large as the width: it is another attribute."""

    def made(self) -> None:
        self.inner = self.window = INNER

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        positions = torch.arange(q.shape[2])
        return super().logits(q, k).masked_fill((positions[None] - positions[:, None]).abs() >= self.window, -1e9)

    def joined(self, o: Tensor) -> Tensor:
        return o.transpose(1, 2).reshape(o.shape[0], o.shape[2], self.inner)


class TokensCutByLocalWidth(FeedForward):
    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h) * (torch.arange(h.shape[1]) < h.shape[-1])[:, None]


@pytest.mark.parametrize(
    "cls",
    [WindowFromHeads, RelativeClampedByHeads, WindowFromWidth, WindowOfTheSameNumber, TokensCutByLocalWidth],
)
def test_thresholds_beyond_the_inputs(cls: Callable[[], nn.Module]) -> None:
    """Derived with 5 tokens, used with 120."""
    try:
        plan = derive_plan(built(lambda: Stack(cls)), features(2, 5), keep=False)
    except VitrailError:
        return
    agree(plan, loaded(built(lambda: Stack(cls))), [features(1, 120, seed=4)])


class ScaleForMoreThanTwoHeads(Attention):
    def __init__(self) -> None:
        super().__init__(heads=12)

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return super().logits(q, k) * (2.0 if self.heads > 2 else 0.5)


def test_degrees_that_were_not_compared() -> None:
    """12 heads over 2, 3 and 4 ranks are more than two each; over 6 they are not."""
    try:
        plan = derive_plan(built(lambda: Stack(ScaleForMoreThanTwoHeads)), features(2, 5), keep=False)
    except VitrailError:
        return
    agree(plan, loaded(built(lambda: Stack(ScaleForMoreThanTwoHeads))), [features(2, 7, seed=4)], degrees=(4, 6))


class Told(Stack):
    """A stack that gives its output in some form."""

    def __init__(self, tell: Callable[[Tensor], Any]) -> None:
        super().__init__(ScaleFromHeadsInABranch)
        self.tell = tell

    def forward(self, x: Tensor, **extra: Any) -> Any:
        return self.tell(super().forward(x, **extra))


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "namespace": lambda y: SimpleNamespace(y=[y]),
    "iterator": lambda y: iter([y]),
    "list of numbers": lambda y: y.tolist(),
    "number": lambda y: y.sum().item(),
    "numpy": lambda y: y.numpy(),
    "nothing": lambda y: None,
    "zeros": lambda y: y * 0,
}


@pytest.mark.parametrize("form", FORMS)
def test_outputs_that_are_hard_to_compare(form: str) -> None:
    """A plan with which nothing was compared is no plan."""
    try:
        plan = derive_plan(built(lambda: Told(FORMS[form])), features(2, 5), keep=False)
    except VitrailError:
        return
    agree(plan, loaded(built(lambda: Told(lambda y: y))), [features(2, 7, seed=4)])


def test_no_inputs_at_all() -> None:
    with pytest.raises(VitrailError):
        derive_plan(built(lambda: Stack(FeedForward)), [], keep=False)


@pytest.mark.parametrize("inputs", [torch.randn(2, 5, FEATURES), (torch.randn(2, 5, FEATURES),)], ids=type)
def test_inputs_of_another_form(inputs: Any) -> None:
    with pytest.raises((VitrailError, TypeError)):
        derive_plan(built(lambda: Stack(FeedForward)), inputs, keep=False)


# Models too large to be compared in full -----------------------------------------------------------------------------


class Sixth(FeedForward):
    """Plain, or not, by a flag."""

    flag = False

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h).cumsum(-1) if self.flag else F.gelu(h)


class Six(nn.Module):
    """Six blocks, of which the two first tell nothing of the fourth."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(FEATURES, DIM)
        self.blocks = nn.ModuleList(
            Block(HiddenCumulativeSum() if how == "class" and i == 3 else Sixth()) for i in range(6)
        )
        self.last = nn.Linear(DIM, 7)
        self.blocks[3].mixer.flag = how == "flag"
        if how == "hook":
            self.blocks[3].mixer.down.register_forward_pre_hook(squashed_input)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, taken = self.first(x), []
        for i, block in enumerate(self.blocks):
            x = block(x)
            if self.how == "index" and i == 3:
                x = x + block.mixer.up(x).amax(-1, keepdim=True)
            if self.how == "taken" and i == 3:
                taken.append(block.mixer.up(x))
        return self.last(x), taken


@pytest.mark.parametrize("how", ["plain", "flag", "class", "hook", "index", "taken"])
def test_blocks_that_differ_in_a_large_model(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of each list are compared; the fourth is not as they are."""
    for module in (planning, trial):
        monkeypatch.setattr(module, "most_numel", lambda: 4500)
    try:
        plan = derive_plan(built(lambda: Six(how)), features(2, 5), keep=False)
    except VitrailError:
        assert how != "plain"
        return
    agree(plan, loaded(built(lambda: Six(how))), [features(2, 7, seed=4)])
