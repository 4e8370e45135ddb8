// The handle of a collective that runs on the host, whose results are tensors of the device.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace neuron_sim {

// Waits for `host`, and answers with `results`, the device's tensors over the bytes that `host` writes.
c10::intrusive_ptr<c10d::Work> device_work(c10::intrusive_ptr<c10d::Work> host, std::vector<at::Tensor> results);

// A collective that is done already.
c10::intrusive_ptr<c10d::Work> done(std::vector<at::Tensor> results);

}  // namespace neuron_sim
