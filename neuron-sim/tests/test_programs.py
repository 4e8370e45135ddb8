"""Random programs give the host's results on the device, and leave no memory behind."""

from collections.abc import Callable

import pytest
import torch
from conftest import settle
from hypothesis import given
from hypothesis import strategies as st

from neuron_sim import policy
from neuron_sim.profiles import profile

CORE = 20
DEVICE = torch.device("neuron", CORE)
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool]


class Machine:
    """The same tensors twice, on the host and on the device, and the steps that keep them the same."""

    def __init__(self) -> None:
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def create(self, a: int, b: int, kind: int) -> None:
        shape = [(a % 4,), (a % 4, b % 4), (a % 3, 2, b % 3), ()][kind % 4]
        dtype = DTYPES[b % len(DTYPES)]
        host = torch.arange(max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()].reshape(shape).to(dtype)
        self.pairs.append((host, host.to(DEVICE)))

    def derive(self, index: int, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """A step that makes a tensor. What the host refuses, the device must refuse."""
        host, device = self.pairs[index % len(self.pairs)]
        try:
            expected = call(host)
        except (RuntimeError, IndexError, ValueError) as refusal:
            try:
                call(device)
            except type(refusal):
                return
            raise AssertionError(f"the host refuses, the device does not: {refusal}") from refusal
        found = call(device)
        if expected is not host:
            self.pairs.append((expected, found))
        else:
            assert found is device

    def free(self, index: int) -> None:
        if len(self.pairs) > 1:
            del self.pairs[index % len(self.pairs)]

    def copy_between(self, index: int, other: int) -> None:
        host, device = self.pairs[index % len(self.pairs)]
        source, device_source = self.pairs[other % len(self.pairs)]
        if host.shape == source.shape and host._is_view() <= source._is_view():
            host.copy_(source.clone())
            device.copy_(device_source.clone())

    def check(self) -> None:
        for host, device in self.pairs:
            assert device.device == DEVICE
            assert (host.dtype, host.shape, host.stride(), host.storage_offset()) == (
                device.dtype, device.shape, device.stride(), device.storage_offset(),
            )  # fmt: skip
            assert torch.equal(host, device.cpu())


def views(n: int, m: int) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    return [
        lambda t: t[n % 3 :],
        lambda t: t[..., :: 1 + n % 2],
        lambda t: t.transpose(0, -1),
        lambda t: t.unsqueeze(n % 2),
        lambda t: t.reshape(-1),
        lambda t: t.view(-1),
        lambda t: t.squeeze(),
        lambda t: t.expand(2, *t.shape),
        lambda t: t.chunk(2)[m % 2],
        lambda t: t.narrow(0, n % 2, 1),
        lambda t: t.select(0, n % 2),
        lambda t: t.unfold(0, 2, 1),
        lambda t: t.diagonal(),
        lambda t: t.detach(),
        lambda t: t.view(torch.int16) if t.dtype == torch.bfloat16 else t.detach(),
    ]


def in_place(n: int) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    return [
        lambda t: t.add_(n % 5),
        lambda t: t.mul_(2),
        lambda t: t.zero_(),
        lambda t: t.fill_(n % 3),
        lambda t: t.clamp_(max=n % 4),
        lambda t: t.neg_(),
        lambda t: t.t_(),
        lambda t: t.unsqueeze_(0),
        lambda t: t.resize_(n % 4, 2).zero_(),
    ]


def computed(n: int) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    return [
        lambda t: t + t,
        lambda t: t * 2.5,
        lambda t: t.sum(),
        lambda t: t.cumsum(0),
        lambda t: torch.cat([t, t]),
        lambda t: t.clone(),
        lambda t: t.contiguous(),
        lambda t: t.to(DTYPES[n % len(DTYPES)]),
        lambda t: t > n % 3,
        lambda t: torch.where(t > 1, t, 0),
        lambda t: t.float() @ t.float().transpose(-1, -2) if t.dim() > 1 else t.float(),
        lambda t: t.sort().values,
        lambda t: t[t.to(torch.bool)],
    ]


step = st.tuples(st.sampled_from(["create", "view", "in place", "compute", "copy", "free"]), *[st.integers(0, 60)] * 3)


def run(program: list[tuple[str, int, int, int]]) -> None:
    machine = Machine()
    machine.create(3, 0, 1)
    for kind, a, b, c in program:
        if kind == "create":
            machine.create(a, b, c)
        elif kind == "view":
            choices = views(b, c)
            machine.derive(a, choices[c % len(choices)])
        elif kind == "in place":
            choices = in_place(b)
            machine.derive(a, choices[c % len(choices)])
        elif kind == "compute":
            choices = computed(b)
            machine.derive(a, choices[c % len(choices)])
        elif kind == "copy":
            machine.copy_between(a, b)
        else:
            machine.free(a)
    machine.check()


@pytest.fixture(scope="module", autouse=True)
def _masks_index_on_the_host():
    before = policy.use(policy.Rulebook(profile("beta-2.10"), "warn"))
    yield
    policy.use(before)


@given(st.lists(step, max_size=25))
def test_random_programs(program):
    before = torch.neuron.memory_allocated(CORE)  # not 0 only while Hypothesis keeps a failure's frames
    run(program)
    assert settle(CORE, before) == before
