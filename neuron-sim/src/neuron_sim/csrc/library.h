// A library that AOTInductor compiled for a graph, run on the host's memory under the device's tensors.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <vector>

namespace neuron_sim {

// The tensors of a list, which is empty afterwards: nothing else keeps alive what a graph no longer needs.
std::vector<at::Tensor> take_tensors(pybind11::list& inputs);

// Adds the class `Library` to the core's Python module.
void bind_library(pybind11::module_& m);

}  // namespace neuron_sim
