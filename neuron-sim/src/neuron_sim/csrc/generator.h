// The device's random numbers: the host's generator behind the device's name, so that seeds give the host's numbers.
#pragma once

#include <ATen/core/Generator.h>

#include "runtime.h"

namespace neuron_sim {

at::Generator new_generator(c10::DeviceIndex core);
// `core` < 0 stands for the current one. Throws a ValueError for a core that is not there.
const at::Generator& default_generator(c10::DeviceIndex core);
// The host's generator that does the work of one of the device's.
at::Generator host_generator(const at::Generator& generator);

}  // namespace neuron_sim
