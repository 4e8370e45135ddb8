// Device memory: host memory with an owner, a core it is charged to, and a capacity.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <cstdint>

#include "runtime.h"

namespace neuron_sim {

struct MemoryStats {
  int64_t capacity, bytes, peak_bytes, allocated_bytes, freed_bytes;
  int64_t blocks, peak_blocks, allocated_blocks, freed_blocks, ooms;
};

c10::DeviceAllocator* allocator();
MemoryStats memory_stats(c10::DeviceIndex core);
void reset_peak_stats(c10::DeviceIndex core);
void reset_accumulated_stats(c10::DeviceIndex core);
void set_capacity(c10::DeviceIndex core, int64_t bytes);

// The host storage behind a storage of the device. Both share the bytes; the device's owns the host's.
c10::Storage host_storage(const c10::Storage& storage);
// A device storage that owns `host` and is charged to `core`. Throws a RuntimeError when the core is full.
c10::Storage device_storage(const c10::Storage& host, c10::DeviceIndex core);
// After the host storage behind `storage` was resized: makes the device's storage follow, and its charge too.
void follow_host(const c10::Storage& storage);
// Gives `storage` room for `bytes` bytes, keeping what it held.
void resize_storage(const c10::Storage& storage, size_t bytes);

}  // namespace neuron_sim
