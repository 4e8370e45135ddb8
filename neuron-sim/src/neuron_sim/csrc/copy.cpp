// Copies between host and cores, and the small questions about where a tensor lives.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/library.h>

#include <algorithm>

#include "counters.h"
#include "opcache.h"
#include "opfacts.h"
#include "pinned.h"
#include "policy.h"
#include "relabel.h"

namespace neuron_sim {

namespace {

at::Tensor host_side(const at::Tensor& tensor) {
  return on_device(tensor) ? to_host_view(tensor) : tensor;
}

bool is_64_bit(c10::ScalarType type) {
  return type == c10::ScalarType::Long || type == c10::ScalarType::Double || type == c10::ScalarType::UInt64;
}

// int64 is computed as int32. A value that does not fit is silently another one there.
void check_int64(const at::Tensor& host) {
  const auto values = host.contiguous();
  const auto* data = values.const_data_ptr<int64_t>();
  uint64_t beyond = 0;
  for (int64_t i = 0; i < values.numel(); i++) {
    beyond |= (static_cast<uint64_t>(data[i]) + (uint64_t{1} << 31U)) >> 32U;
  }
  if (C10_UNLIKELY(beyond != 0)) {
    const auto* found = std::find_if(data, data + values.numel(), [](int64_t value) { return value != int32_t(value); });
    report(Rule::kInt64, "aten::copy_", std::to_string(*found));
  }
}

// A cast on the device is an operator like any other, but for those that it leaves to the host.
void cast(const at::Tensor& self, const at::Tensor& destination) {
  if (is_64_bit(self.scalar_type()) || is_64_bit(destination.scalar_type())) {
    count_sync(Sync::kCast64);
    if (is_on(Rule::kCast64)) {
      report(
          Rule::kCast64, "aten::copy_",
          std::string(c10::toString(self.scalar_type())) + " to " + c10::toString(destination.scalar_type()));
    }
    return;
  }
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_copy_from", "");
  auto& facts = facts_of(op);
  const torch::jit::Stack stack{self, destination, false};
  if (const auto unseen = unseen_signature(facts, stack, stack.size()); C10_UNLIKELY(unseen != 0)) {
    const auto signature = describe_call(op, facts, stack);
    before_compile(facts, signature);
    record_compile(facts, unseen, signature);
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  ensure_ready();
  static std::atomic<OpFacts*> facts{nullptr};
  count_call(facts, "aten::_copy_from", "");
  if (on_device(self) && on_device(destination)) {
    if (self.scalar_type() != destination.scalar_type()) {
      cast(self, destination);
    }
  } else if (self.scalar_type() == c10::ScalarType::Long && destination.scalar_type() == c10::ScalarType::Long &&
             on_device(destination) && is_on(Rule::kInt64)) {
    check_int64(self);
  } else if (destination.is_cpu() && on_device(self) && !(non_blocking && is_pinned(destination.const_data_ptr()))) {
    count_sync(Sync::kCopyToHost);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  host_side(destination).copy_(host_side(self));
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& destination) {
  if (destination.sizes() != self.sizes()) {
    destination.resize_(self.sizes());
  }
  return copy_from(self, destination, /*non_blocking=*/false);
}

void record_stream(at::Tensor& /*self*/, c10::Stream /*stream*/) {}  // execution is synchronous

// Whether `.data = other` may change a parameter's device in place, as it may between the host and CUDA.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& other) {
  const auto is_dense = [](const at::Tensor& tensor) {
    return tensor.layout() == c10::kStrided && (tensor.is_cpu() || on_device(tensor)) &&
        !tensor.unsafeGetTensorImpl()->is_python_dispatch();
  };
  return (is_dense(self) && is_dense(other)) ||
      self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(other.key_set());
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
}

// Copying out of a negative or conjugate view would otherwise materialise it by copying, without end.
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace neuron_sim
