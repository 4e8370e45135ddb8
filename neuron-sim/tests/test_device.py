"""torch.neuron and torch.accelerator: cores, memory, streams, events, random numbers."""

import copy
import pickle
import time

import pytest
import torch
from conftest import settle

import neuron_sim

D = "neuron"


def test_cores():
    assert torch.neuron.is_available()
    assert torch.neuron.device_count() == 64
    assert torch.neuron.get_device_name(3) == "neuron:3"
    assert torch.neuron.get_device_properties().name == "trn2"
    assert torch.neuron.get_device_properties().total_memory == 24 << 30
    assert torch.neuron.get_amp_supported_dtype() == [torch.float32, torch.float16, torch.bfloat16]
    assert torch.neuron.is_bf16_supported()
    with torch.neuron.device(2):
        assert torch.neuron.current_device() == 2
        assert torch.ones(1, device=D).device.index == 2
        with torch.neuron.device("neuron:1"), torch.neuron.device(None):
            assert torch.neuron.current_device() == 1
    with torch.neuron.device_of(torch.ones(1, device="neuron:3")):
        assert torch.neuron.current_device() == 3
    assert torch.neuron.current_device() == 0
    assert torch.neuron.is_initialized()


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.neuron.set_device(64),
        lambda: torch.neuron.set_device("neuron:99"),
        lambda: torch.neuron.get_device_name(64),
        lambda: torch.neuron.get_device_properties(-1),
        lambda: torch.neuron.memory_allocated(64),
        lambda: torch.neuron.synchronize(64),
        lambda: torch.neuron.current_stream(64),
        lambda: torch.neuron.Stream(64),
        lambda: torch.empty(1, device="neuron:99"),
        lambda: torch.neuron.get_rng_state(64),
        lambda: torch.neuron.set_device("cpu"),
        lambda: torch.Generator("neuron:99"),
    ],
)
def test_out_of_range_is_a_value_error(call):
    with pytest.raises(ValueError, match="neuron"):
        call()
    assert torch.neuron.current_device() == 0


def test_threads_have_current_cores_of_their_own():
    from threading import Thread

    seen = []

    def work():
        torch.neuron.set_device(5)
        seen.append(torch.ones(1, device=D).device.index)

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [5]
    assert torch.neuron.current_device() == 0


def test_accelerator():
    a = torch.accelerator
    assert a.current_accelerator().type == D
    assert (a.device_count(), a.is_available(), a.current_device_index()) == (64, True, 0)
    with a.device_index(1):
        x = torch.ones(1000, device=D)
        assert a.memory_allocated() == x.nbytes
        free, total = a.get_memory_info()
        assert total - free == x.nbytes
    assert torch.bfloat16 in a.get_device_capability()["supported_dtypes"]
    assert torch.float64 not in a.get_device_capability()["supported_dtypes"]
    a.set_device_index(2)
    assert torch.neuron.current_device() == 2
    a.set_device_index(0)
    a.synchronize()
    a.empty_cache()
    assert a.memory_stats()["allocated_bytes.all.current"] == torch.neuron.memory_allocated()


def test_memory_is_accounted_for_each_core():
    core = 7
    x = torch.empty(1 << 20, dtype=torch.uint8, device=f"neuron:{core}")
    view = x[10:]
    assert torch.neuron.memory_allocated(core) == 1 << 20
    assert torch.neuron.memory_allocated(8) == 0
    del x
    assert torch.neuron.memory_allocated(core) == 1 << 20
    del view
    assert settle(core) == 0
    assert torch.neuron.max_memory_allocated(core) == 1 << 20
    torch.neuron.reset_peak_memory_stats(core)
    assert torch.neuron.max_memory_allocated(core) == 0
    stats = torch.neuron.memory_stats(core)
    assert stats["allocated_bytes.all.freed"] == 1 << 20
    assert (
        stats["reserved_bytes.all.current"]
        == torch.neuron.memory_reserved(core)
        == torch.neuron.max_memory_reserved(core)
        == 0
    )
    torch.neuron.reset_accumulated_memory_stats(core)
    assert torch.neuron.memory_stats(core)["allocated_bytes.all.freed"] == 0
    assert "neuron:7" in torch.neuron.memory_summary(core)
    torch.neuron.empty_cache()


def test_out_of_memory():
    neuron_sim.set_memory_capacity("1MiB", 9)
    x = torch.empty(1 << 19, dtype=torch.uint8, device="neuron:9")
    with pytest.raises(RuntimeError, match=r"^NRT allocation failed for size 1048576 \(OOM\)$") as failure:
        torch.empty(1 << 20, dtype=torch.uint8, device="neuron:9")
    assert not isinstance(failure.value, torch.OutOfMemoryError)
    with pytest.raises(RuntimeError, match=r"NRT allocation failed for size 2097152 \(OOM\)"):
        x.float() + 1
    assert torch.neuron.memory_stats(9)["num_ooms"] == 2
    del x
    assert settle(9) == 0
    with pytest.raises(ValueError, match="positive"):
        neuron_sim.set_memory_capacity(0, 9)


def test_nothing_is_left_after_training():
    core = 11
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1)).to(f"neuron:{core}")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(4, 8, device=f"neuron:{core}")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    del model, optimizer
    assert settle(core) == 0


def test_streams():
    first, second = torch.neuron.Stream(), torch.neuron.Stream(device=1, priority=-1)
    assert isinstance(first, torch.neuron.Stream)
    assert isinstance(first, torch.Stream)
    assert first != torch.neuron.default_stream()
    assert torch.neuron.current_stream() == torch.neuron.default_stream()
    with torch.neuron.stream(second):
        assert torch.neuron.current_device() == 1
        assert torch.neuron.current_stream() == second
        assert torch.accelerator.current_stream() == second
    assert torch.neuron.current_device() == 0
    with torch.neuron.stream(None):
        pass
    torch.neuron.set_stream(first)
    assert torch.neuron.current_stream() == first
    torch.neuron.set_stream(torch.neuron.default_stream())
    event = first.record_event()
    second.wait_event(event)
    second.wait_stream(first)
    assert first.query()
    torch.ones(1, device=D).record_stream(first)


def test_events():
    start, end = torch.neuron.Event(enable_timing=True), torch.neuron.Event(enable_timing=True)
    start.record()
    time.sleep(0.01)
    end.record(torch.neuron.current_stream())
    end.synchronize()
    assert 10 <= start.elapsed_time(end) < 1000
    assert end.query()
    assert isinstance(start, torch.neuron.Event)


@pytest.mark.parametrize(
    "timed, recorded, words", [(False, True, "enable_timing=True"), (True, False, "must be recorded")]
)
def test_elapsed_time_needs_timing_and_records(timed, recorded, words):
    start, end = torch.neuron.Event(enable_timing=True), torch.neuron.Event(enable_timing=timed)
    start.record()
    if recorded:
        end.record()
    with pytest.raises(ValueError, match=words):
        start.elapsed_time(end)


def test_host_synchronisations_are_counted(rules):
    rules("beta-2.10")  # which runs nonzero on the host
    x = torch.arange(4.0, device=D)
    neuron_sim.reset_counts()
    x.sum().item()
    x.cpu()
    torch.nonzero(x)
    torch.neuron.synchronize()
    torch.neuron.current_stream().synchronize()
    torch.empty(4).pin_memory().copy_(x, non_blocking=True)
    bool((x > 0).any())
    assert neuron_sim.counts().host_syncs == {
        "item": 2, "copy_to_host": 1, "dynamic_shape": 1, "cast64": 0, "device": 1, "stream": 1, "event": 0,
    }  # fmt: skip


def test_seeds_give_the_hosts_numbers():
    for draw in (torch.randn, torch.rand):
        torch.manual_seed(3)
        expected = draw(7)
        torch.manual_seed(3)
        assert torch.equal(draw(7, device=D).cpu(), expected)
    generator, host = torch.Generator(D).manual_seed(5), torch.Generator().manual_seed(5)
    assert generator.device.type == D
    assert torch.equal(torch.randn(7, generator=generator, device=D).cpu(), torch.randn(7, generator=host))
    assert torch.equal(torch.randperm(9, generator=generator, device=D).cpu(), torch.randperm(9, generator=host))


def test_generator_states():
    generator = torch.Generator(D)
    state = generator.get_state()
    first = torch.rand(3, generator=generator, device=D)
    for other in (pickle.loads(pickle.dumps(generator)), generator.set_state(state)):
        assert other.device.type == D
    assert torch.equal(torch.rand(3, generator=generator, device=D), first)
    assert copy.deepcopy(torch.neuron.get_rng_state()).device.type == "cpu"
    torch.neuron.manual_seed(1)
    state = torch.neuron.get_rng_state()
    first = torch.rand(2, device=D)
    torch.neuron.set_rng_state(state)
    assert torch.equal(torch.rand(2, device=D), first)
    assert torch.neuron.initial_seed() == 1
    states = torch.neuron.get_rng_state_all()
    torch.neuron.manual_seed_all(2)
    torch.neuron.set_rng_state_all(states)
    torch.neuron.seed()
    torch.neuron.seed_all()
    with torch.random.fork_rng(device_type=D, devices=[0]):
        torch.rand(3, device=D)


def test_checkpointing_restores_the_random_state():
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(100, device=D, requires_grad=True)
    y = checkpoint(lambda t: torch.nn.functional.dropout(t, 0.5), x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("index", [128, 200, 255 - 1])
def test_an_index_that_does_not_fit_in_eight_bits_is_no_current_core(index):
    # PyTorch keeps eight bits of an index: 128 arrives as -128.
    with pytest.raises(ValueError, match=f"invalid neuron device index {index - 256}: this process sees"):
        torch.ones(1, device=f"neuron:{index}")
