// What PyTorch's generic code asks of an accelerator.
#include "hooks.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "generator.h"
#include "memory.h"
#include "pinned.h"
#include "policy.h"
#include "runtime.h"

namespace neuron_sim {

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {
    ensure_ready();
  }

  bool hasPrimaryContext(c10::DeviceIndex /*core*/) const override {
    return is_started();
  }

  bool isBuilt() const override {
    return true;
  }

  bool isAvailable() const override {
    return core_count() > 0;
  }

  c10::DeviceIndex deviceCount() const override {
    return core_count();
  }

  void setCurrentDevice(c10::DeviceIndex core) const override {
    exchange_core(core);
  }

  c10::DeviceIndex getCurrentDevice() const override {
    return current_core();
  }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex core) const override {
    return exchange_core(core);
  }

  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex core) const override {
    return core < 0 || core >= core_count() ? current_core() : exchange_core(core);
  }

  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }

  bool isPinnedPtr(const void* pointer) const override {
    return is_pinned(pointer);
  }

  at::Device getDeviceFromPtr(void* /*pointer*/) const override {
    return {kNeuron, current_core()};
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex core) const override {
    return default_generator(core);
  }

  at::Generator getNewGenerator(c10::DeviceIndex core) const override {
    if (core >= 0) {
      check_core(core);
    }
    ensure_ready();
    if (is_on(Rule::kGenerator)) {
      report(Rule::kGenerator, "torch.Generator", "");
    }
    return new_generator(core);
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

}  // namespace

void register_hooks() {
  c10::SetAllocator(kNeuron, allocator());
  register_pinned_allocator();
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

}  // namespace neuron_sim
