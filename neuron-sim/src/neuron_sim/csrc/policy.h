// The rulebook's place in the dispatch: what is watched for, and the one way to report that it was seen.
//
// The rules' texts and what they lead to live in Python (neuron_sim.policy); here are only the questions that must be
// answered in nanoseconds. Nothing on this path touches Python unless a rule applies.
#pragma once

#include <ATen/core/stack.h>
#include <c10/core/ScalarType.h>

#include <atomic>
#include <string>

#include "opfacts.h"

namespace neuron_sim {

// The names are those of bindings.cpp's rule table and of the profiles' "rules".
enum class Rule : uint8_t {
  kFloat64, kComplex, kMixedDevices, kFallback, kFloat64Out, kDynamicShape, kMemoryFormat, kInt64, kCast64, kGenerator,
  kRules
};

struct OpClass {
  bool mixes_devices, falls_back, static_shape;
};

struct Watch {
  std::atomic<uint64_t> dtypes{0};  // a bit for each scalar type that no tensor of the device may have
  std::atomic<uint32_t> rules{0};   // a bit for each rule that is to be reported
};
extern Watch g_watch;

inline bool is_on(Rule rule) {
  return (g_watch.rules.load(std::memory_order_relaxed) >> static_cast<unsigned>(rule) & 1U) != 0;
}

using EventFn = void (*)(Rule, const std::string& op, const std::string& detail);
using ClassifyFn = OpClass (*)(const std::string& op);
void set_policy_callbacks(EventFn event, ClassifyFn classify);

// A rule applies. Throws when the rule refuses; returns when it only tells.
void report(Rule rule, const std::string& op, const std::string& detail);
OpClass classify_op(const std::string& op);

inline bool is_watched(c10::ScalarType dtype) {
  return (g_watch.dtypes.load(std::memory_order_relaxed) >> static_cast<unsigned>(dtype) & 1U) != 0;
}

// The dtype a new tensor of the device gets instead of `dtype`. Throws when the profile refuses it.
c10::ScalarType allowed_dtype_slow(c10::ScalarType dtype, const std::string& op);
inline c10::ScalarType allowed_dtype(c10::ScalarType dtype, const char* op) {
  return C10_LIKELY(!is_watched(dtype)) ? dtype : allowed_dtype_slow(dtype, op);
}

// The same for a view, whose bytes cannot be converted: throws for every dtype that is watched.
void check_view_dtype_slow(c10::ScalarType dtype, const std::string& op);
inline void check_view_dtype(c10::ScalarType dtype, const std::string& op) {
  if (C10_UNLIKELY(is_watched(dtype))) {
    check_view_dtype_slow(dtype, op);
  }
}

}  // namespace neuron_sim
