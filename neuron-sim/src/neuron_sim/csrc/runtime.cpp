#include "runtime.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include "memory.h"

namespace neuron_sim {

std::atomic<RuntimeState> g_state{RuntimeState::kCold};

namespace {

std::atomic<int> g_count{0};
StartFn g_start = nullptr;
CountFn g_would_count = nullptr;
thread_local c10::DeviceIndex t_current = 0;

void mark_forked() {
  if (g_state.load() == RuntimeState::kReady) {
    g_state.store(RuntimeState::kForked);
  }
}

const int g_fork_handler = pthread_atfork(nullptr, nullptr, &mark_forked);

}  // namespace

void set_callbacks(StartFn start, CountFn count) {
  g_start = start;
  g_would_count = count;
}

void ensure_ready_slow() {
  TORCH_CHECK(
      g_state.load() != RuntimeState::kForked,
      "Cannot re-initialize Neuron runtime in forked subprocess. The parent process had used the device before it "
      "forked; start this process with the 'spawn' or 'forkserver' method instead, or use the device only here.");
  TORCH_CHECK(g_start != nullptr, "the neuron device was loaded but not registered; import torch_neuronx registers it");
  g_start();
}

void configure(const std::vector<int64_t>& capacities) {
  TORCH_CHECK_VALUE(
      !capacities.empty() && capacities.size() <= static_cast<size_t>(kMaxCores),
      "a process sees between 1 and ", kMaxCores, " neuron cores, not ", capacities.size());
  for (size_t core = 0; core < capacities.size(); core++) {
    set_capacity(static_cast<c10::DeviceIndex>(core), capacities[core]);
  }
  g_count.store(static_cast<int>(capacities.size()));
  g_state.store(RuntimeState::kReady);
}

bool in_bad_fork() noexcept {
  return g_state.load() == RuntimeState::kForked;
}

bool is_started() noexcept {
  return g_state.load() == RuntimeState::kReady;
}

c10::DeviceIndex core_count() noexcept {
  if (g_state.load() != RuntimeState::kCold) {
    return static_cast<c10::DeviceIndex>(g_count.load());
  }
  return static_cast<c10::DeviceIndex>(g_would_count != nullptr ? g_would_count() : 0);
}

c10::DeviceIndex current_core() noexcept {
  return t_current;
}

void check_core(int64_t index) {
  ensure_ready();
  TORCH_CHECK_VALUE(
      index >= 0 && index < g_count.load(std::memory_order_relaxed),
      "invalid neuron device index ", index, ": this process sees ", g_count.load(), " core(s), numbered from 0");
}

c10::DeviceIndex exchange_core(c10::DeviceIndex index) {
  const auto previous = t_current;
  if (index != -1) {  // -1 stands for the current core; PyTorch keeps 8 bits of an index, so that 128 arrives as -128
    check_core(index);
    t_current = index;
  }
  return previous;
}

void set_core_unchecked(c10::DeviceIndex index) noexcept {
  if (index >= 0) {
    t_current = index;
  }
}

}  // namespace neuron_sim
