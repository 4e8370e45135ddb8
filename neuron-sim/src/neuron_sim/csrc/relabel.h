// Relabelling: the same bytes, seen as a tensor of the host or of the device. Nothing is copied.
#pragma once

#include <ATen/core/Tensor.h>

#include "memory.h"

namespace neuron_sim {

inline bool on_device(const at::Tensor& tensor) {
  return tensor.device().type() == kNeuron;
}

// The dense tensor of the device that `storage` holds, with the shape, dtype and views' bits of `like`.
at::Tensor make_tensor(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like);
// The host's tensor over the bytes of a device's tensor. Throws for layouts that the device does not have.
at::Tensor to_host_view(const at::Tensor& tensor);
// A device's tensor that takes over the storage of a host's tensor, charged to `core`.
at::Tensor to_device(const at::Tensor& tensor, c10::DeviceIndex core);

}  // namespace neuron_sim
