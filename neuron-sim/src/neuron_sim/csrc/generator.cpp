#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GeneratorImpl.h>

#include <mutex>
#include <vector>

namespace neuron_sim {

namespace {

class NeuronGenerator final : public c10::GeneratorImpl {
 public:
  NeuronGenerator(c10::DeviceIndex core, at::Generator host)
      : c10::GeneratorImpl(c10::Device(kNeuron, core), c10::DispatchKeySet(kNeuronKey)), host_(std::move(host)) {}

  void set_current_seed(uint64_t seed) override {
    host_.set_current_seed(seed);
  }

  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset == 0, "a neuron generator has no offset; found ", offset, ", only 0 can be set");
  }

  uint64_t get_offset() const override {
    return 0;  // Python pickles the offset of every generator that is not the host's
  }

  uint64_t current_seed() const override {
    return host_.current_seed();
  }

  uint64_t seed() override {
    return host_.seed();
  }

  void set_state(const c10::TensorImpl& state) override {
    host_.unsafeGetGeneratorImpl()->set_state(state);
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host_.unsafeGetGeneratorImpl()->get_state();
  }

  static c10::DeviceType device_type() {
    return kNeuron;
  }

  at::Generator host_;

 private:
  NeuronGenerator* clone_impl() const override {
    return new NeuronGenerator(device_.index(), host_.clone());
  }
};

}  // namespace

at::Generator new_generator(c10::DeviceIndex core) {
  return at::make_generator<NeuronGenerator>(core < 0 ? current_core() : core, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(c10::DeviceIndex core) {
  static std::mutex lock;
  static auto* all = new std::vector<at::Generator>(kMaxCores);
  if (core < 0) {
    core = current_core();
  }
  check_core(core);
  const std::lock_guard<std::mutex> guard(lock);
  auto& generator = (*all)[static_cast<size_t>(core)];
  if (!generator.defined()) {
    generator = new_generator(core);
  }
  return generator;
}

at::Generator host_generator(const at::Generator& generator) {
  return static_cast<NeuronGenerator*>(generator.unsafeGetGeneratorImpl())->host_;
}

}  // namespace neuron_sim
