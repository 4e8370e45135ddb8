#include "policy.h"

#include <c10/util/Exception.h>

namespace neuron_sim {

Watch g_watch;

namespace {

EventFn g_event = nullptr;
ClassifyFn g_classify = nullptr;

}  // namespace

void set_policy_callbacks(EventFn event, ClassifyFn classify) {
  g_event = event;
  g_classify = classify;
}

void report(Rule rule, const std::string& op, const std::string& detail) {
  TORCH_CHECK(g_event != nullptr, "the neuron device's rulebook was not loaded; import torch_neuronx loads it");
  g_event(rule, op, detail);
}

OpClass classify_op(const std::string& op) {
  return g_classify != nullptr ? g_classify(op) : OpClass{false, false, false};
}

c10::ScalarType allowed_dtype_slow(c10::ScalarType dtype, const std::string& op) {
  if (c10::isComplexType(dtype)) {
    report(Rule::kComplex, op, c10::toString(dtype));
    return dtype;
  }
  if (dtype == c10::ScalarType::Double && is_on(Rule::kFloat64)) {
    report(Rule::kFloat64, op, "");
    return c10::ScalarType::Float;
  }
  return dtype;
}

void check_view_dtype_slow(c10::ScalarType dtype, const std::string& op) {
  TORCH_CHECK_TYPE(
      allowed_dtype_slow(dtype, op) == dtype, op, ": a tensor on neuron cannot be viewed as ", dtype,
      ", which the device does not have; view it on the host");
}

}  // namespace neuron_sim
