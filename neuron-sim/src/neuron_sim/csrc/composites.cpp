// Operators that PyTorch routes past the fallback for devices outside its tree, brought back to the host's kernels.
#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/SDPBackend.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "fallback.h"
#include "relabel.h"

namespace neuron_sim {

namespace {

using IntList = c10::SymIntArrayRef;

torch::jit::Stack call(const char* name, torch::jit::Stack stack) {
  run_on_host(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), &stack);
  return stack;
}

std::vector<int64_t> ints(IntList values) {
  return C10_AS_INTARRAYREF_SLOW(values).vec();
}

// aten::convolution sends devices outside the tree to these two, which have no fallback of their own.
at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, IntList stride,
    IntList padding, IntList dilation, bool transposed, IntList output_padding, c10::SymInt groups) {
  auto stack = call(
      "aten::convolution",
      {input, weight, bias, ints(stride), ints(padding), ints(dilation), transposed, ints(output_padding),
       groups.guard_int(__FILE__, __LINE__)});
  return stack[0].toTensor();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight, IntList stride, IntList padding,
    IntList dilation, bool transposed, IntList output_padding, c10::SymInt groups, std::array<bool, 3> output_mask) {
  const auto group_count = groups.guard_int(__FILE__, __LINE__);
  const auto bias_size = transposed ? weight.size(1) * group_count : weight.size(0);
  auto stack = call(
      "aten::convolution_backward",
      {grad_output, input, weight, std::vector<int64_t>{bias_size}, ints(stride), ints(padding), ints(dilation), transposed,
       ints(output_padding), group_count,
       c10::List<bool>({output_mask[0], output_mask[1], output_mask[2]})});
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}

at::Tensor without_memory(const at::Tensor& tensor) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, c10::kCPU), nullptr, false);
  auto seen = at::detail::make_tensor<c10::TensorImpl>(std::move(none), c10::DispatchKey::CPU, tensor.dtype());
  seen.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return seen;
}

}  // namespace

// The host's own choice, so that attention takes the same kernel on both and large pictures do not pay for the maths.
int64_t sdp_choice(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  if (mask.has_value() && mask->requires_grad()) {
    return static_cast<int64_t>(at::SDPBackend::math);  // the host would say so too, but its view of a mask needs none
  }
  const auto host = [](const at::Tensor& tensor) {
    if (!on_device(tensor)) {
      return tensor;
    }
    // A tensor that is only traced has no memory; the choice needs none.
    return tensor.key_set().has(c10::DispatchKey::Python) ? without_memory(tensor) : to_host_view(tensor);
  };
  const auto host_mask = mask.has_value() ? std::optional<at::Tensor>(host(*mask)) : std::nullopt;
  // While a graph is traced, a mode would see these tensors, which are none of its own.
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  return at::_fused_sdp_choice(
      host(query), host(key), host(value), host_mask, dropout, is_causal, scale, enable_gqa);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_fused_sdp_choice", &sdp_choice);
  // A composite in name only: it looks for a kernel of the device inside.
  m.impl("conj_physical_", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

}  // namespace neuron_sim

namespace at::native {

// scaled_dot_product_attention asks this table, not the dispatcher.
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &neuron_sim::sdp_choice)

}  // namespace at::native
