// Copies between host and cores, and the small questions about where a tensor lives.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/library.h>

#include "counters.h"
#include "opfacts.h"
#include "pinned.h"
#include "relabel.h"

namespace neuron_sim {

namespace {

at::Tensor host_side(const at::Tensor& tensor) {
  return on_device(tensor) ? to_host_view(tensor) : tensor;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  ensure_ready();
  static std::atomic<OpFacts*> facts{nullptr};
  count_call(facts, "aten::_copy_from", "");
  if (destination.is_cpu() && on_device(self) && !(non_blocking && is_pinned(destination.const_data_ptr()))) {
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
