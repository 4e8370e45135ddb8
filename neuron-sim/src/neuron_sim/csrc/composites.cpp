// Operators that PyTorch routes past the fallback for devices outside its tree, brought back to the host's kernels.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "fallback.h"

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
  const c10::IValue bias_sizes(std::vector<int64_t>{weight.size(transposed ? 1 : 0) * (transposed ? groups.guard_int(__FILE__, __LINE__) : 1)});
  auto stack = call(
      "aten::convolution_backward",
      {grad_output, input, weight, bias_sizes, ints(stride), ints(padding), ints(dilation), transposed,
       ints(output_padding), groups.guard_int(__FILE__, __LINE__),
       c10::List<bool>({output_mask[0], output_mask[1], output_mask[2]})});
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}

// The host's own choice, so that attention takes the same kernel on both and large pictures do not pay for the maths.
int64_t sdp_choice(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  auto stack = call("aten::_fused_sdp_choice", {query, key, value, mask, dropout, is_causal, scale, enable_gqa});
  return stack[0].toInt();
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_fused_sdp_choice", &sdp_choice);
}

}  // namespace neuron_sim
