// Adds the class `Program` to the core's Python module.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace neuron_sim {

void bind_program(pybind11::module_& m);

}  // namespace neuron_sim
