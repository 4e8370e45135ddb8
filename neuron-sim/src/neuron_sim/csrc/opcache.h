// Which operators the real device would have compiled by now: distinct shapes, dtypes and static arguments.
//
// A call that was seen before costs a hash and one look into a table of the thread's own. Whatever is new is described
// in words and handed to Python (neuron_sim.opcache), which keeps the cache on disk and applies the rules that need to
// look at a signature only once.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <string>

#include "opfacts.h"

namespace neuron_sim {

// A hash of the call whose arguments lie on top of the stack, or 0 when it was recorded before.
uint64_t unseen_signature(const OpFacts& facts, const torch::jit::Stack& stack, size_t arguments);
// The call in words: "aten::add.Tensor(float32[8, 64], float32[8, 64], #1)". The same in every process.
std::string describe_call(const c10::OperatorHandle& op, const OpFacts& facts, const torch::jit::Stack& stack);

// Before a call that was not seen runs: the rules' turn. Throws when one refuses.
void before_compile(const OpFacts& facts, const std::string& signature);
// After it ran.
void record_compile(OpFacts& facts, uint64_t hash, const std::string& signature);
// Every call is new again.
void forget_signatures();

using SignatureFn = void (*)(const std::string& op, const std::string& signature);
void set_signature_callbacks(SignatureFn before, SignatureFn compiled);

}  // namespace neuron_sim
