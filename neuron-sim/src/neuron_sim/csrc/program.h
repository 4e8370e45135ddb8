// A compiled graph at run time: its operators in order, with no Python between them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

#include "runtime.h"

namespace neuron_sim {

// Where an argument of an operator comes from: a value that is fixed, a slot, or a list of slots (-1: none).
struct Operand {
  enum class Kind : uint8_t { kFixed, kSlot, kTensors, kOptionalTensors } kind;
  c10::IValue fixed;
  std::vector<int64_t> slots;
};

struct Instruction {
  c10::OperatorHandle op;
  std::vector<Operand> operands;
  // Random numbers and collectives run as the device's own operators, which have its generator and process group.
  bool on_device;
  int64_t first_result, results;
  std::vector<int64_t> dead;  // slots that nothing reads after this
  // Of each result the strides that it was traced with; none where nothing is to be held to.
  std::vector<std::vector<int64_t>> strides;
  bool is_view;
};

// Which storage of the device belongs to which of the host: what shares memory on one side shares it on the other.
class Owners {
 public:
  explicit Owners(c10::DeviceIndex core) : core_(core) {}

  at::Tensor as_host(const at::Tensor& tensor);
  at::Tensor as_device(const at::Tensor& tensor);
  // A result of a graph, as the device's tensor or the host's. What the device does not have is converted.
  at::Tensor give(const at::Tensor& tensor, bool to_the_device);

 private:
  // The device's storages own the host's, so that no address here can belong to another.
  std::vector<std::pair<const c10::StorageImpl*, c10::Storage>> owners_;
  c10::DeviceIndex core_;
};

// Computes on the host's memory under the device's tensors: relabelled once a graph, not once an operator.
class Program {
 public:
  Program(int64_t slots, int64_t inputs, c10::DeviceIndex core) : slots_(slots), inputs_(inputs), core_(core) {}

  // Values that every run starts with, as the slots after the inputs.
  void add_constant(at::Tensor constant);
  void add(Instruction instruction);
  // A result of the graph: a slot, and whether it is the device's tensor or the host's.
  void add_output(int64_t slot, bool on_device);

  // Throws what the operators throw. Needs no lock of the interpreter's.
  std::vector<c10::IValue> run(std::vector<at::Tensor> inputs) const;

 private:
  int64_t slots_, inputs_;
  c10::DeviceIndex core_;
  std::vector<at::Tensor> constants_;
  std::vector<Instruction> instructions_;
  std::vector<std::pair<int64_t, bool>> outputs_;
};

}  // namespace neuron_sim
