// The one place that every computing operator of the device passes: count, ask the rules, run the host's kernel.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace neuron_sim {

// Boxed kernel for any operator. Arguments on the device are relabelled as the host's, the operator is dispatched
// again, and its results become the device's: the same tensor for what was written, a view for what shares memory,
// a new tensor otherwise.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Registers run_on_host for the operators whose composite kernel would win over the backend's fallback although the
// host has a kernel of its own for them. Composites cost more dispatches, and some are less precise in bfloat16.
void prefer_host_kernels();

}  // namespace neuron_sim
