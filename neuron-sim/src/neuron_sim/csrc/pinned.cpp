#include "pinned.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <cstring>
#include <map>
#include <mutex>

#include "runtime.h"

namespace neuron_sim {

namespace {

struct Ranges {
  std::mutex lock;
  std::map<uintptr_t, size_t> by_start;
};

Ranges& ranges() {
  static auto* all = new Ranges();  // leaked: pinned tensors may be freed while the process ends
  return *all;
}

void free_pinned(void* pointer) {
  {
    const std::lock_guard<std::mutex> guard(ranges().lock);
    ranges().by_start.erase(reinterpret_cast<uintptr_t>(pointer));
  }
  c10::free_cpu(pointer);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = c10::alloc_cpu(bytes);
    if (pointer != nullptr) {
      const std::lock_guard<std::mutex> guard(ranges().lock);
      ranges().by_start[reinterpret_cast<uintptr_t>(pointer)] = bytes;
    }
    return {pointer, pointer, &free_pinned, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }

  void copy_data(void* destination, const void* source, std::size_t count) const override {
    std::memcpy(destination, source, count);
  }

  bool record_event(void* /*pointer*/, void* /*context*/, c10::Stream /*stream*/) override {
    return true;
  }

  void empty_cache() override {}

  at::HostStats get_stats() override {
    return {};
  }

  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedAllocator& instance() {
  static auto* allocator = new PinnedAllocator();
  return *allocator;
}

}  // namespace

c10::Allocator* pinned_allocator() {
  return &instance();
}

bool is_pinned(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const std::lock_guard<std::mutex> guard(ranges().lock);
  auto after = ranges().by_start.upper_bound(address);
  if (after == ranges().by_start.begin()) {
    return false;
  }
  --after;
  return address < after->first + after->second;
}

void register_pinned_allocator() {
  at::setHostAllocator(kNeuron, &instance());
}

}  // namespace neuron_sim
