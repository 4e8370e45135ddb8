// The process-group backend `neuron`: collectives of the device, run by a backend of the host over the same bytes.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <string>

namespace neuron_sim {

// One collective, as it is about to run on this rank.
struct Collective {
  std::string name;          // as in torch.distributed: "all_reduce"
  std::string reduce_op;     // "SUM", ...; empty where nothing is reduced
  std::string dtype;         // of its tensors; empty where there are none
  int64_t elements = 0;      // what every rank must bring alike: elements of one rank's part
  int64_t bytes = 0;         // the larger of this rank's inputs and outputs
  int64_t root = -1;         // the group's rank that sends or receives, where one does
  bool uneven = false;       // splits that are not all of one size
};

// Called before every collective; throws what refuses it.
using GroupWatch = std::function<void(const Collective&)>;

// A backend that relabels the device's tensors and hands them to `host`, after `watch` has let the collective pass.
c10::intrusive_ptr<c10d::Backend> make_backend(c10::intrusive_ptr<c10d::Backend> host, GroupWatch watch);

}  // namespace neuron_sim
