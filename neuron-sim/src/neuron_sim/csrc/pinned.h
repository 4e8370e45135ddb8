// Pinned host memory: plain host memory whose addresses are remembered, so that is_pinned() can tell.
#pragma once

#include <c10/core/Allocator.h>

namespace neuron_sim {

c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);
void register_pinned_allocator();

}  // namespace neuron_sim
