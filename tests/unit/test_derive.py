"""Derivation: what it finds on models made to show one thing each, and that it knows no class by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vitrail
from vitrail.apply.planning import derive_plan
from vitrail.apply.prove import compare, randomised
from vitrail.errors import PlanError, UnsupportedError, UsageError
from vitrail.plan import Plan, catalog, derive, resolve
from vitrail.plan.norms import recognise


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        made: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return made


class Stack(nn.Module):
    def __init__(self, width: int = 35, heads: int = 5) -> None:
        super().__init__()
        self.embed = nn.Linear(9, width)
        self.blocks = nn.ModuleList(Attention(width, heads) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return x


X = {"x": torch.randn(2, 11, 9)}


def test_no_class_of_diffusers_is_named_in_the_rules() -> None:
    names = set(catalog.probe_names()) | {
        "Flux",
        "Wan",
        "Qwen",
        "Sana",
        "Hunyuan",
        "CogVideo",
        "LTX",
        "Cosmos",
        "diffusers",
    }
    for file in Path(derive.__file__).parent.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert not [name for name in names if re.search(rf"\b{name}", text)], file.name


def test_a_fused_projection_and_the_attribute_that_counts_its_heads() -> None:
    plan = derive_plan(Stack(), X, keep=False)
    rules = {rule.module: (rule.style, rule.parts) for rule in plan.rules}
    assert rules["blocks.*.qkv"] == ("colwise", ("3*heads*head_dim",))
    assert rules["blocks.*.out"] == ("rowwise", ("heads*head_dim",))
    assert plan.attributes == {"blocks.*.heads": "heads"}
    assert plan.verified["degrees"] == [2, 3, 4]
    assert plan.verified["error"] <= 1e-9


def test_a_plan_serves_other_sizes_of_the_same_structure() -> None:
    plan = derive_plan(Stack(), X, keep=False)
    other = Stack(width=96, heads=12)
    resolved = resolve(plan, other, 5)
    assert resolved.attributes[("blocks.1", "heads")] == (3, 3, 2, 2, 2)
    call = {"x": torch.randn(1, 7, 9, dtype=torch.float64)}
    assert compare(plan, randomised(other), [lambda: call], 5).ok


def test_more_ranks_than_heads_are_refused() -> None:
    plan = derive_plan(Stack(), X, keep=False)
    with pytest.raises(PlanError, match=r"over 6 ranks: heads \(attention heads\) has 5 units, fewer than 6") as caught:
        resolve(plan, Stack(), 6)
    assert caught.value.hint == "degrees that would do: 1 to 5"


def test_inputs_are_guessed_where_none_are_given() -> None:
    assert derive_plan(Stack(), keep=False).attributes == {"blocks.*.heads": "heads"}


def test_a_forward_that_cannot_be_traced_is_refused_with_the_place() -> None:
    class Reads(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = super().forward(x)
            return made if made.isnan().nonzero().tolist() else made[0].item()  # type: ignore[no-any-return]

    with pytest.raises(UnsupportedError, match=r"Reads cannot be (traced|run)"):
        derive_plan(Reads(), X, keep=False)


def test_modules_that_no_call_reached_raise_when_they_run() -> None:
    class Branches(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(35, 35)

        def forward(self, x: torch.Tensor, extra: bool = False) -> torch.Tensor:
            made = super().forward(x)
            return self.extra(made) if extra else made  # type: ignore[no-any-return]

    plan = derive_plan(Branches(), X, keep=False)
    assert plan.untraced == ("extra",)
    model = randomised(Branches())
    found = compare(plan, model, [lambda: {"x": torch.randn(2, 3, 9, dtype=torch.float64), "extra": True}], 2)
    assert "extra ran, which the sharding plan knows nothing of" in found.trouble
    reached = derive_plan(Branches(), [X, {**X, "extra": True}], keep=False)
    assert reached.untraced == ()


def test_a_wrong_plan_is_noticed() -> None:
    plan = derive_plan(Stack(), X, keep=False)
    document = plan.to_document()
    document["modules"]["blocks.*.qkv"]["parts"] = ["heads*3*head_dim"]  # the order of another model's projection
    found = compare(
        Plan.from_document(document), randomised(Stack()), [lambda: {"x": torch.randn(2, 3, 9, dtype=torch.float64)}], 2
    )
    assert not found.ok
    assert found.error > 1e-3


class Scaled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5).to(x.dtype) * (1 + self.scale)


@pytest.mark.parametrize(
    "module, expected",
    [
        (nn.RMSNorm(12, eps=1e-6), ("rms", 1e-6, 0.0)),
        (nn.LayerNorm(12), ("layer", 1e-5, 0.0)),
        (nn.LayerNorm(12, elementwise_affine=False), ("layer", 1e-5, 0.0)),
        (Scaled(12), ("rms", 1e-5, 1.0)),
        (nn.Softmax(-1), None),
        (nn.Identity(), None),
    ],
)
def test_norms_are_told_by_what_they_compute(module: nn.Module, expected: tuple[str, float, float] | None) -> None:
    norm = recognise(module, 12)
    assert (None if norm is None else (norm.kind, norm.eps, norm.weight_offset)) == expected


def test_the_public_name() -> None:
    assert vitrail.derive_plan is derive_plan


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 40), nn.Linear(40, 6)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(x)))


class Shared(nn.Module):
    """One block, run again and again, and under two names."""

    def __init__(self) -> None:
        super().__init__()
        block = Step()
        self.blocks = nn.ModuleList([block] * 3)
        self.again = block

    def forward(self, x: Any) -> Any:
        for block in (*self.blocks, self.again):
            x = block(x)
        return x


def test_a_module_of_several_names_is_one_module() -> None:
    plan = derive_plan(Shared(), {"x": torch.randn(3, 6)}, keep=False)
    assert {rule.module: rule.style for rule in plan.rules} == {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    assert plan.verified["error"] <= 1e-9


class Slopes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 5
        self.qkv, self.out = nn.Linear(30, 90), nn.Linear(30, 30)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        slopes = torch.arange(q.shape[1], dtype=q.dtype)[:, None, None]
        weights = (q @ k.transpose(-1, -2) + slopes * torch.arange(q.shape[2], dtype=q.dtype)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def test_the_plan_says_why_heads_are_not_sharded() -> None:
    plan = derive_plan(Slopes(), {"x": torch.randn(2, 4, 30)}, keep=False)
    whys = {rule.module: (rule.style, rule.why) for rule in plan.rules}
    assert whys["qkv"] == ("gathered", "its values are made in the forward, by arange")


def test_heads_may_be_told_to_unflatten() -> None:
    class Told(Slopes):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.Unflatten(-1, (3, 5, 6))

        def forward(self, x: Any) -> Any:
            q, k, v = self.parts(self.qkv(x)).permute(2, 0, 3, 1, 4).unbind(0)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.out(mixed.transpose(1, 2).flatten(2))

    plan = derive_plan(Told(), {"x": torch.randn(2, 4, 30)}, keep=False)
    assert plan.attributes == {"parts.unflattened_size[1]": "heads"}


@pytest.mark.parametrize(
    "model, message",
    [
        (None, "a model is needed, not a NoneType"),
        (Shared, "a model is needed, not the class Shared"),
        (nn.LazyLinear(3), "the parameter weight of LazyLinear has no shape yet"),
    ],
)
def test_what_is_no_model_is_refused(model: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        derive_plan(model)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    import threading

    model = Shared()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="Shared cannot be copied"):
        derive_plan(model, {"x": torch.randn(3, 6)})


class Folded(nn.Module):
    """Heads folded into the batch, and a mask repeated the other way: what a sample has reaches another's heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 6
        self.q, self.k, self.v, self.out = (nn.Linear(48, 48) for _ in range(4))

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        q, k, v = (
            f(x).view(batch, length, self.heads, 8).transpose(1, 2).reshape(batch * self.heads, length, 8)
            for f in (self.q, self.k, self.v)
        )
        mask = x[..., :1].transpose(1, 2).repeat(self.heads, 1, 1)
        mixed = (q @ k.mT + mask).softmax(-1) @ v
        return self.out(mixed.view(batch, self.heads, length, 8).transpose(1, 2).reshape(batch, length, 48))


@pytest.mark.parametrize("batch", [2, 3])
def test_a_batch_that_divides_the_heads_is_not_taken_for_heads(batch: int) -> None:
    plan = derive_plan(Folded(), {"x": torch.randn(batch, 12, 48)}, keep=False)
    model = randomised(Folded())
    for size in (1, 2, 3, 4, 6):
        inputs = torch.randn(size, 9, 48, dtype=torch.float64)
        assert compare(plan, model, [lambda inputs=inputs: {"x": inputs}], 2).ok  # type: ignore[misc]


class Nested(Folded):
    def forward(self, batch: Any) -> Any:
        return super().forward(batch["x"][0])


def test_inputs_inside_others_are_varied_too() -> None:
    plan = derive_plan(Nested(), {"batch": {"x": [torch.randn(2, 12, 48)]}}, keep=False)
    model = randomised(Nested())
    inputs = torch.randn(3, 9, 48, dtype=torch.float64)
    assert compare(plan, model, [lambda: {"batch": {"x": [inputs]}}], 2).ok


class Versioned(nn.Module):
    """A number that chooses a layout, and an attribute of the model itself that counts heads."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.version, self.heads = version, 5
        self.qkv, self.out = nn.Linear(30, 90), nn.Linear(30, 30)

    def forward(self, x: Any) -> Any:
        if self.version == 1:
            q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = self.qkv(x).unflatten(-1, (self.heads, 3, -1)).permute(3, 0, 2, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


def test_an_earlier_derivation_serves_its_own_configuration_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitrail.apply.planning import plan_for

    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path))
    x = torch.randn(2, 4, 30, dtype=torch.float64)
    for version in (1, 2, 1):
        plan = plan_for(Versioned(version))
        assert compare(plan, randomised(Versioned(version)), [lambda: {"x": x}], 2).ok
    assert len(list(tmp_path.rglob("*.json"))) == 2


def test_a_plan_with_an_attribute_of_the_model_itself_is_read_back() -> None:
    plan = derive_plan(Versioned(1), {"x": torch.randn(2, 4, 30)}, keep=False)
    assert plan.attributes == {"heads": "heads"}
    again = Plan.from_json(plan.to_json())
    assert resolve(again, Versioned(1), 2).attributes == {("", "heads"): (3, 2)}


class Viewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(12, 48), nn.Linear(48, 12)

    def forward(self, x: Any) -> Any:
        mixed = self.q(x).view(x.shape[0], 6, x.shape[1], 8).softmax(-2)
        return self.out(mixed.view(x.shape[0], x.shape[1], 48))


def test_what_is_gathered_raggedly_can_be_viewed() -> None:
    plan = derive_plan(Viewed(), {"x": torch.randn(2, 7, 12)}, keep=False)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    for degree in (2, 5, 7):
        assert compare(plan, randomised(Viewed()), [lambda: {"x": x}], degree).ok
