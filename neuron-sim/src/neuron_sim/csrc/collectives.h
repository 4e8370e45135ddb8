#pragma once

#include <string>
#include <vector>

#include "runtime.h"

namespace neuron_sim {

// Registers the c10d operators named (without their namespace). Once a process, after c10d is loaded.
void register_collectives(const std::vector<std::string>& names);

}  // namespace neuron_sim
