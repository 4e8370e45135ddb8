#include "memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

namespace neuron_sim {

namespace {

// What one core holds. Every number is only ever changed by charge() and release().
struct Ledger {
  std::atomic<int64_t> capacity{0}, bytes{0}, peak_bytes{0}, allocated_bytes{0};
  std::atomic<int64_t> blocks{0}, peak_blocks{0}, allocated_blocks{0}, ooms{0};
};

std::array<Ledger, kMaxCores>& ledgers() {
  // Leaked: tensors may be freed while the process ends.
  static auto* all = new std::array<Ledger, kMaxCores>();
  return *all;
}

Ledger& ledger(c10::DeviceIndex core) {
  return ledgers()[static_cast<size_t>(core)];
}

void raise_to(std::atomic<int64_t>& peak, int64_t value) {
  auto seen = peak.load(std::memory_order_relaxed);
  while (value > seen && !peak.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

void charge(c10::DeviceIndex core, int64_t bytes) {
  constexpr auto relaxed = std::memory_order_relaxed;
  auto& entry = ledger(core);
  const auto now = entry.bytes.fetch_add(bytes, relaxed) + bytes;
  if (C10_UNLIKELY(now > entry.capacity.load(relaxed))) {
    entry.bytes.fetch_sub(bytes, relaxed);
    entry.ooms.fetch_add(1, relaxed);
    TORCH_CHECK(false, "NRT allocation failed for size ", bytes, " (OOM)");
  }
  raise_to(entry.peak_bytes, now);
  entry.allocated_bytes.fetch_add(bytes, relaxed);
  if (bytes > 0) {
    raise_to(entry.peak_blocks, entry.blocks.fetch_add(1, relaxed) + 1);
    entry.allocated_blocks.fetch_add(1, relaxed);
  }
}

void release(c10::DeviceIndex core, int64_t bytes) noexcept {
  auto& entry = ledger(core);
  entry.bytes.fetch_sub(bytes, std::memory_order_relaxed);
  if (bytes > 0) {
    entry.blocks.fetch_sub(1, std::memory_order_relaxed);
  }
}

// The context of every device pointer: it owns the host storage and remembers what was charged.
struct Block {
  c10::Storage host;
  int64_t bytes;
  c10::DeviceIndex core;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  release(block->core, block->bytes);
  delete block;
}

c10::Storage new_host_storage(size_t bytes) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, c10::GetCPUAllocator(), /*resizable=*/true));
}

c10::DataPtr own(c10::Storage host, c10::DeviceIndex core) {
  const auto bytes = static_cast<int64_t>(host.nbytes());
  void* data = host.mutable_data();
  charge(core, bytes);
  return {data, new Block{std::move(host), bytes, core}, &free_block, c10::Device(kNeuron, core)};
}

struct NeuronAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const auto core = current_core();
    check_core(core);
    // Charged before the host is asked, so that a tensor larger than the device never touches host memory.
    charge(core, static_cast<int64_t>(bytes));
    c10::Storage host;
    try {
      host = new_host_storage(bytes);
    } catch (...) {
      release(core, static_cast<int64_t>(bytes));
      throw;
    }
    void* data = host.mutable_data();
    return {data, new Block{std::move(host), static_cast<int64_t>(bytes), core}, &free_block, c10::Device(kNeuron, core)};
  }

  void copy_data(void* destination, const void* source, std::size_t count) const override {
    std::memcpy(destination, source, count);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;  // the context is not the data, so raw allocation is not offered
  }

  bool initialized() override {
    return is_started();
  }

  void emptyCache(c10::MempoolId_t /*pool*/) override {}  // nothing is cached

  void recordStream(const c10::DataPtr& /*pointer*/, c10::Stream /*stream*/) override {}  // execution is synchronous

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex core) override {
    check_core(core);
    const auto now = memory_stats(core);
    c10::CachingDeviceAllocator::DeviceStats stats;
    constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto fill = [](auto& stat, int64_t current, int64_t peak, int64_t allocated, int64_t freed) {
      stat.current = current;
      stat.peak = peak;
      stat.allocated = allocated;
      stat.freed = freed;
    };
    fill(stats.allocation[all], now.blocks, now.peak_blocks, now.allocated_blocks, now.freed_blocks);
    fill(stats.active[all], now.blocks, now.peak_blocks, now.allocated_blocks, now.freed_blocks);
    fill(stats.allocated_bytes[all], now.bytes, now.peak_bytes, now.allocated_bytes, now.freed_bytes);
    fill(stats.active_bytes[all], now.bytes, now.peak_bytes, now.allocated_bytes, now.freed_bytes);
    fill(stats.requested_bytes[all], now.bytes, now.peak_bytes, now.allocated_bytes, now.freed_bytes);
    stats.num_ooms = now.ooms;
    stats.num_device_alloc = now.allocated_blocks;
    stats.num_device_free = now.freed_blocks;
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex core) override {
    reset_accumulated_stats(core);
  }

  void resetPeakStats(c10::DeviceIndex core) override {
    reset_peak_stats(core);
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex core) override {
    check_core(core);
    const auto now = memory_stats(core);
    return {static_cast<size_t>(std::max<int64_t>(now.capacity - now.bytes, 0)), static_cast<size_t>(now.capacity)};
  }
};

}  // namespace

c10::DeviceAllocator* allocator() {
  static auto* instance = new NeuronAllocator();
  return instance;
}

MemoryStats memory_stats(c10::DeviceIndex core) {
  auto& e = ledger(core);
  // What was freed is what was allocated and is no longer there: no counter of its own can disagree.
  return {e.capacity, e.bytes, e.peak_bytes, e.allocated_bytes, e.allocated_bytes - e.bytes,
          e.blocks, e.peak_blocks, e.allocated_blocks, e.allocated_blocks - e.blocks, e.ooms};
}

void reset_peak_stats(c10::DeviceIndex core) {
  auto& entry = ledger(core);
  entry.peak_bytes.store(entry.bytes.load());
  entry.peak_blocks.store(entry.blocks.load());
}

void reset_accumulated_stats(c10::DeviceIndex core) {
  auto& entry = ledger(core);
  entry.allocated_bytes.store(entry.bytes.load());
  entry.allocated_blocks.store(entry.blocks.load());
  entry.ooms.store(0);
}

void set_capacity(c10::DeviceIndex core, int64_t bytes) {
  TORCH_CHECK_VALUE(bytes > 0, "the capacity of a neuron core must be positive, not ", bytes, " bytes");
  ledger(core).capacity.store(bytes);
}

c10::Storage host_storage(const c10::Storage& storage) {
  const auto& pointer = storage.data_ptr();
  if (C10_LIKELY(pointer.get_deleter() == &free_block)) {
    return static_cast<Block*>(pointer.get_context())->host;
  }
  // Not made by this allocator (a zero tensor, a blob): a host storage that borrows the bytes and keeps them alive.
  auto* keep = new c10::Storage(storage);
  c10::DataPtr borrowed(
      storage.mutable_data(), keep, [](void* kept) { delete static_cast<c10::Storage*>(kept); }, c10::Device(c10::kCPU));
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(borrowed), c10::GetCPUAllocator(),
      /*resizable=*/false));
}

c10::Storage device_storage(const c10::Storage& host, c10::DeviceIndex core) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), host.nbytes(), own(host, core), allocator(), /*resizable=*/true));
}

void follow_host(const c10::Storage& storage) {
  const auto host = host_storage(storage);
  auto* impl = storage.unsafeGetStorageImpl();
  if (host.data() == impl->data() && host.nbytes() == impl->nbytes()) {
    return;
  }
  const auto bytes = host.nbytes();
  impl->set_data_ptr_noswap(own(host, storage.device().index()));
  impl->set_nbytes(bytes);
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  const auto core = storage.device().index();
  auto host = new_host_storage(bytes);
  const auto kept = std::min(bytes, storage.nbytes());
  if (kept > 0) {
    std::memcpy(host.mutable_data(), storage.data(), kept);
  }
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(own(std::move(host), core));
  impl->set_nbytes(bytes);
}

}  // namespace neuron_sim
