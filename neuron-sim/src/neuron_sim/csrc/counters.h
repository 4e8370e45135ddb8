// What a program did: host synchronisations by kind. Operators are counted in their OpFacts.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace neuron_sim {

// A point where the host must wait for the device. The names are those of bindings.cpp's sync_counts().
enum class Sync : uint8_t { kItem, kCopyToHost, kDynamicShape, kCast64, kDevice, kStream, kEvent, kKinds };

extern std::array<std::atomic<uint64_t>, static_cast<size_t>(Sync::kKinds)> g_syncs;

// Told of every synchronisation, when set: for reports that say at which line. Must not throw.
using SyncListener = void (*)(Sync) noexcept;
extern std::atomic<SyncListener> g_sync_listener;

inline void count_sync(Sync kind) noexcept {
  g_syncs[static_cast<size_t>(kind)].fetch_add(1, std::memory_order_relaxed);
  if (const auto listener = g_sync_listener.load(std::memory_order_relaxed)) {
    listener(kind);
  }
}

}  // namespace neuron_sim
