// PyTorch gives devices outside its tree fused LSTM and GRU cells to implement. Here they are compositions of
// differentiable operators, registered for autograd too, so that first and higher derivatives follow by themselves.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace neuron_sim {

namespace {

using OptionalTensor = std::optional<at::Tensor>;

at::Tensor with_bias(const at::Tensor& gates, const OptionalTensor& bias) {
  return bias.has_value() && bias->defined() ? gates + *bias : gates;
}

// Gates in the order input, forget, cell, output. Returns the hidden state, the cell state and the activated gates.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cell,
    const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  const auto gates = with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias);
  const auto parts = gates.chunk(4, 1);
  const auto input = parts[0].sigmoid();
  const auto forget = parts[1].sigmoid();
  const auto candidate = parts[2].tanh();
  const auto output = parts[3].sigmoid();
  auto next_cell = forget * cell + input * candidate;
  auto hidden = output * next_cell.tanh();
  return {hidden, next_cell, gates};
}

// Gates in the order reset, input, new. Returns the hidden state and a workspace that only a fused backward would read.
std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& hidden,
    const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  const auto from_input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto from_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const auto reset = (from_input[0] + from_hidden[0]).sigmoid();
  const auto input = (from_input[1] + from_hidden[1]).sigmoid();
  const auto candidate = (from_input[2] + reset * from_hidden[2]).tanh();
  auto next = candidate + input * (hidden - candidate);
  return {next, candidate};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
}

}  // namespace neuron_sim
