#pragma once

namespace neuron_sim {

// Registers the hooks, the allocator and the pinned allocator with PyTorch. Once a process.
void register_hooks();

}  // namespace neuron_sim
