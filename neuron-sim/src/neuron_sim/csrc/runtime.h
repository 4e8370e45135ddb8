// The runtime: which cores there are, which one is current, and whether this process may use them.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/macros/Macros.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace neuron_sim {

constexpr c10::DeviceType kNeuron = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKey kNeuronKey = c10::DispatchKey::PrivateUse1;
// The real runtime takes at most 128 devices; c10::DeviceIndex, a signed byte, holds 127 of them.
constexpr int kMaxCores = 127;

enum class RuntimeState : int { kCold, kReady, kForked };
extern std::atomic<RuntimeState> g_state;

void ensure_ready_slow();

// Starts the runtime on first use. Throws in a process forked from one that had started it, and whatever the
// configuration's reader throws (a malformed environment variable).
inline void ensure_ready() {
  if (C10_UNLIKELY(g_state.load(std::memory_order_relaxed) != RuntimeState::kReady)) {
    ensure_ready_slow();
  }
}

// The callbacks, set once from Python: `start` must call configure(); `count` says how many cores there would be.
using StartFn = void (*)();
using CountFn = int (*)() noexcept;
void set_callbacks(StartFn start, CountFn count);

// Fixes the number of cores and the bytes of each, and marks the runtime as started.
void configure(const std::vector<int64_t>& capacities);

bool in_bad_fork() noexcept;
bool is_started() noexcept;

// Cores this process sees; before the start, as many as it would see. Never throws.
c10::DeviceIndex core_count() noexcept;
c10::DeviceIndex current_core() noexcept;
// Makes `index` current and returns the one that was; a negative index changes nothing.
// Throws a ValueError for an index out of range.
c10::DeviceIndex exchange_core(c10::DeviceIndex index);
void set_core_unchecked(c10::DeviceIndex index) noexcept;
void check_core(int64_t index);

}  // namespace neuron_sim
