"""Compares one operator of PyTorch's database on the device with the host: values, gradients, in-place, `out=`,
forward-mode AD; and, for norms in bfloat16, both with float64."""

import re
import signal
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from neuron_sim import NeuronRuleError, policy

DEVICE = "neuron"
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
TIMEOUT = 120

# What cannot be compared: memory that nobody wrote, and kernels that only other devices have.
NOT_COMPARED = re.compile(r"empty|new_empty|jiterator|triton")
# PyTorch itself wants this argument on the host, whatever the device.
HOST_ARGUMENTS = ("tensor_split",)
# In bfloat16 PyTorch itself accumulates in another dtype where the device is not the host's.
ACCUMULATES_BY_DEVICE = ("nn.functional.linear_cross_entropy.chunked_none",)
NORMS = re.compile(r".*(layer|group|batch|instance|rms|vector|matrix|linalg\.)_?norm.*|norm|norm\.(fro|inf)")
ON_HOST = ("fallback", "dynamic_shape")
REFUSALS = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)


def operators(pattern: str = "") -> list[OpInfo]:
    """The operators that are compared, those that match a regular expression."""
    return [op for op in op_db if re.search(pattern, op.full_name) and not NOT_COMPARED.search(op.full_name)]


@dataclass
class Outcome:
    """What became of an operator: `equal`, `rejected` by `rules`, or `failing`; and what ran on the host."""

    name: str
    verdict: str = "equal"
    rules: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    on_host: list[str] = field(default_factory=list)
    comparisons: int = 0
    norms_compared: int = 0

    def reject(self, rule: str, reason: str) -> None:
        """A rule refused it somewhere. Failing weighs more."""
        if rule not in self.rules:
            self.rules.append(rule)
            self.reasons.append(reason)
        if self.verdict == "equal":
            self.verdict = "rejected"

    def fail(self, reason: str) -> None:
        """It gave another result than the host, or an error of its own."""
        self.verdict = "failing"
        self.reasons.append(reason)

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def moved(value: Any, device: str, wants_grad: bool = False) -> Any:
    """A copy of a nest of tensors on a device, leaves of their own graphs; views stay views into as large a storage."""
    if isinstance(value, torch.Tensor):
        copy = _copied(value.detach(), device)
        return copy.requires_grad_() if wants_grad and value.requires_grad else copy
    if isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu"):
        return torch.device(device)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(moved(item, device, wants_grad) for item in value)
    if isinstance(value, dict):
        return {key: moved(item, device, wants_grad) for key, item in value.items()}
    return value


def _copied(tensor: torch.Tensor, device: str) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor.to(device, copy=True)
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    if elements == tensor.numel():
        return tensor.to(device, copy=True)
    whole = tensor.as_strided((elements,), (1,), 0).to(device, copy=True)
    return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).detach()


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a nest, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors(item)]
    return []


def same(one: Any, other: Any, bfloat16_tolerance: float | None = None) -> None:
    """Raises AssertionError unless both hold the same values, bit for bit but for rounding in the last places."""
    ones, others = tensors(one), tensors(other)
    assert len(ones) == len(others), f"{len(ones)} tensors against {len(others)}"
    for a, b in zip(ones, others, strict=True):
        assert b.device.type == DEVICE or a.device == b.device, f"result on {b.device}"
        b = b.detach().cpu()
        a = a.detach().to(b.dtype) if a.dtype == torch.float64 and b.dtype == torch.float32 else a.detach()
        tolerance = {torch.float32: 1e-5, torch.bfloat16: bfloat16_tolerance}.get(a.dtype)
        torch.testing.assert_close(b, a, equal_nan=True, rtol=tolerance, atol=tolerance)


class Comparison:
    """One sample of one operator in one dtype."""

    def __init__(self, info: OpInfo, sample: SampleInput, dtype: torch.dtype) -> None:
        self.info = info
        self.sample = sample
        self.wants_grad = dtype.is_floating_point and info.supports_autograd
        self.dtype = dtype

    def stages(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """The comparisons that apply, by name. Each raises AssertionError where host and device differ."""
        yield "forward", self.forward
        if self.wants_grad:
            yield "backward", self.backward
        if (
            self.info.inplace_variant
            and isinstance(self.sample.input, torch.Tensor)
            and not self.sample.broadcasts_input
        ):
            yield "in-place", lambda: self.compare(lambda device: self.call(self.info.inplace_variant, device)[0])
        if self.info.supports_out:
            yield "out=", self.out
        if self.wants_grad and self.info.supports_forward_ad and isinstance(self.sample.input, torch.Tensor):
            yield "forward AD", lambda: self.compare(self.tangents)

    def call(self, op: Callable[..., Any], device: str, wants_grad: bool = False) -> tuple[Any, list[torch.Tensor]]:
        """Call an operator on the sample's copy; returns the result and the leaves that may have gradients."""
        args = [moved(self.sample.input, device, wants_grad)]
        elsewhere = "cpu" if self.info.name in HOST_ARGUMENTS else device
        args += moved(self.sample.args, elsewhere, wants_grad)
        kwargs = moved(self.sample.kwargs, elsewhere, wants_grad)
        torch.manual_seed(0)
        result = op(*args, **kwargs)
        return result, [leaf for leaf in tensors((args, kwargs)) if leaf.requires_grad]

    def compare(self, call: Callable[[str], Any]) -> None:
        """Host and device give the same; nothing to compare where the host itself refuses."""
        try:
            expected = call("cpu")
        except REFUSALS:
            return
        same(expected, call(DEVICE), 3e-2 if self.info.full_name in ACCUMULATES_BY_DEVICE else None)

    def forward(self) -> None:
        self.compare(lambda device: self.call(self.info.op, device)[0])

    def backward(self) -> None:
        self.compare(lambda device: gradients(*self.call(self.info.op, device, wants_grad=True)))

    def out(self) -> None:
        expected = self.call(self.info.op, "cpu")[0]
        if isinstance(expected, torch.Tensor):
            self.compare(
                lambda device: self.call(
                    lambda *a, **k: self.info.op(*a, **k, out=torch.empty(0, dtype=expected.dtype, device=device)),
                    device,
                )[0]
            )

    def tangents(self, device: str) -> list[torch.Tensor]:
        """Forward-mode derivatives with a tangent of ones on the input."""
        with forward_ad.dual_level():

            def op(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                return self.info.op(forward_ad.make_dual(first, torch.ones_like(first)), *args, **kwargs)

            found = [forward_ad.unpack_dual(t).tangent for t in tensors(self.call(op, device)[0])]
            return [t for t in found if t is not None]

    def norm_is_as_precise(self) -> None:
        """In bfloat16, the device's result is no further from float64's than the host's."""
        exact_call = Comparison(self.info, _in_float64(self.sample), torch.float64)
        exact = tensors(exact_call.call(self.info.op, "cpu")[0])[0]
        on_host = tensors(self.call(self.info.op, "cpu")[0])[0]
        on_device = tensors(self.call(self.info.op, DEVICE)[0])[0]
        host, device = ((found.cpu().double() - exact).abs().nan_to_num() for found in (on_host, on_device))
        assert device.sum() <= host.sum(), f"bfloat16 error {device.sum():.3g}, the host's is {host.sum():.3g}"


def _in_float64(sample: SampleInput) -> SampleInput:
    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().double() if value.is_floating_point() else value.detach()
        if isinstance(value, list | tuple):
            return type(value)(convert(item) for item in value)
        if isinstance(value, dict):
            return {key: convert(item) for key, item in value.items()}
        return torch.float64 if value is torch.bfloat16 else value

    return SampleInput(convert(sample.input), args=convert(tuple(sample.args)), kwargs=convert(sample.kwargs))


def gradients(result: Any, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of the sum of what can be differentiated."""
    outputs = [t for t in tensors(result) if t.requires_grad and t.dtype.is_floating_point]
    if not outputs or not leaves:
        return []
    grads = torch.autograd.grad(outputs, leaves, [torch.ones_like(t) for t in outputs], allow_unused=True)
    return [grad for grad in grads if grad is not None]


def examine(info: OpInfo, dtypes: tuple[torch.dtype, ...] = DTYPES, samples: int = 4) -> Outcome:
    """What becomes of one operator under the rulebook in force. Every stage of every sample is tried."""
    outcome = Outcome(info.full_name)
    book = policy.current()
    before = set(book.events)
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(TIMEOUT)
    try:
        for dtype in dtypes:
            if dtype in info.supported_dtypes("cpu"):
                _examine_dtype(info, dtype, samples, outcome)
    except TimeoutError as error:
        outcome.fail(str(error))
    finally:
        signal.alarm(0)
    outcome.on_host = sorted(
        {e.op for e in set(book.events) - before if book.actions[e.rule] == "tell" and e.rule in ON_HOST}
    )
    return outcome


def _examine_dtype(info: OpInfo, dtype: torch.dtype, samples: int, outcome: Outcome) -> None:
    wants_grad = dtype.is_floating_point and info.supports_autograd
    for count, sample in enumerate(info.sample_inputs("cpu", dtype, requires_grad=wants_grad)):
        if count >= samples:
            return
        comparison = Comparison(info, sample, dtype)
        stages = list(comparison.stages())
        if dtype == torch.bfloat16 and NORMS.fullmatch(info.full_name.removeprefix("nn.functional.")):
            stages.append(("norm", comparison.norm_is_as_precise))
        for stage, compare in stages:
            where = f"{str(dtype).removeprefix('torch.')} {stage}"
            try:
                compare()
                outcome.comparisons += 1
                outcome.norms_compared += stage == "norm"
            except NeuronRuleError as error:
                outcome.reject(error.rule, f"{where}: {str(error).split(' [')[0]}")
            except NotImplementedError as error:
                if "strided tensors only" not in str(error) and "Sparse" not in str(error):
                    outcome.fail(f"{where}: {_short(error)}")
                else:
                    outcome.reject("layout", f"{where}: {_short(error)}")
            except (AssertionError, *REFUSALS) as error:
                outcome.fail(f"{where}: {type(error).__name__} {_short(error)}")


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:240]


def _too_long(number: int, frame: types.FrameType | None) -> None:  # noqa: ARG001  a signal handler's signature
    raise TimeoutError(f"it did not end within {TIMEOUT} s")
