#include "program.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "policy.h"
#include "relabel.h"

namespace neuron_sim {

namespace {

// One run: the slots and their storages.
class Run {
 public:
  Run(int64_t slots, c10::DeviceIndex core) : slots_(static_cast<size_t>(slots)), owners(core) {}

  c10::IValue& operator[](int64_t slot) {
    return slots_[static_cast<size_t>(slot)];
  }

  // The value for an operator on the host (or on the device), relabelled at most once.
  const c10::IValue& read(int64_t slot, bool for_device) {
    auto& value = (*this)[slot];
    if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      if (tensor.defined() && on_device(tensor) != for_device) {
        value = for_device ? owners.as_device(tensor) : owners.as_host(tensor);
      }
    }
    return value;
  }

 private:
  std::vector<c10::IValue> slots_;

 public:
  Owners owners;
};

void push(torch::jit::Stack& stack, const Operand& operand, Run& run, bool on_device) {
  switch (operand.kind) {
    case Operand::Kind::kFixed:
      stack.push_back(operand.fixed);
      return;
    case Operand::Kind::kSlot:
      stack.push_back(run.read(operand.slots[0], on_device));
      return;
    case Operand::Kind::kTensors: {
      c10::List<at::Tensor> tensors;
      tensors.reserve(operand.slots.size());
      for (const auto slot : operand.slots) {
        tensors.push_back(run.read(slot, on_device).toTensor());
      }
      stack.emplace_back(std::move(tensors));
      return;
    }
    case Operand::Kind::kOptionalTensors: {
      c10::List<std::optional<at::Tensor>> tensors;
      tensors.reserve(operand.slots.size());
      for (const auto slot : operand.slots) {
        tensors.push_back(
            slot < 0 ? std::nullopt : std::optional<at::Tensor>(run.read(slot, on_device).toTensor()));
      }
      stack.emplace_back(std::move(tensors));
      return;
    }
  }
}

// The host's kernels choose layouts of their own (a convolution gives channels last), and what follows in the graph was
// traced with others: a view of it, or a kernel that asks for one layout, would fail. Kernels tell channels last from
// contiguous by the strides of dimensions of one element too, which views are free to choose.
void lay_out(c10::IValue& value, const std::vector<int64_t>& strides, bool is_view) {
  const auto& tensor = value.toTensor();
  const auto sizes = tensor.sizes();
  if (strides.size() != sizes.size() || tensor.layout() != c10::kStrided) {
    return;
  }
  if (tensor.strides() == c10::IntArrayRef(strides)) {
    return;
  }
  bool is_same = true;
  int64_t extent = 1;
  for (size_t dim = 0; dim < sizes.size(); dim++) {
    is_same = is_same && (sizes[dim] <= 1 || tensor.stride(static_cast<int64_t>(dim)) == strides[dim]);
    extent += (sizes[dim] - 1) * strides[dim];
  }
  if (is_same) {
    value = tensor.as_strided(sizes, strides);
    return;
  }
  // An entry of the cache may say anything: only dense layouts are made.
  if (is_view || extent != tensor.numel()) {
    return;
  }
  auto laid_out = at::empty_strided(sizes, strides, tensor.options());
  laid_out.copy_(tensor);
  value = std::move(laid_out);
}

void take_results(torch::jit::Stack& stack, const Instruction& instruction, Run& run) {
  const auto returned = instruction.op.schema().returns().size();
  const auto first = stack.size() - returned;
  if (returned == 1 && stack[first].isTensorList()) {
    const auto tensors = stack[first].toTensorList();
    TORCH_CHECK(
        static_cast<int64_t>(tensors.size()) == instruction.results, instruction.op.operator_name(), " returned ",
        tensors.size(), " tensors, and the graph was compiled for ", instruction.results);
    for (size_t i = 0; i < tensors.size(); i++) {
      run[instruction.first_result + static_cast<int64_t>(i)] = tensors.get(i);
    }
  } else {
    for (size_t i = 0; i < returned; i++) {
      run[instruction.first_result + static_cast<int64_t>(i)] = std::move(stack[first + i]);
    }
  }
  stack.clear();
  for (size_t i = 0; i < instruction.strides.size(); i++) {
    auto& value = run[instruction.first_result + static_cast<int64_t>(i)];
    if (value.isTensor() && value.toTensor().defined()) {
      lay_out(value, instruction.strides[i], instruction.is_view);
    }
  }
}

}  // namespace

at::Tensor Owners::as_host(const at::Tensor& tensor) {
  auto host = to_host_view(tensor);
  owners_.emplace_back(host.storage().unsafeGetStorageImpl(), tensor.storage());
  return host;
}

at::Tensor Owners::as_device(const at::Tensor& tensor) {
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  for (const auto& [host, device] : owners_) {
    if (host == storage) {
      return make_tensor(device, kNeuronKey, tensor);
    }
  }
  auto made = to_device(tensor, core_);
  owners_.emplace_back(storage, made.storage());
  return made;
}

at::Tensor Owners::give(const at::Tensor& tensor, bool to_the_device) {
  if (!tensor.defined() || on_device(tensor) == to_the_device) {
    return tensor;
  }
  if (!to_the_device) {
    return as_host(tensor);
  }
  const auto dtype = tensor.scalar_type();
  const auto allowed = allowed_dtype(dtype, "a result of a compiled graph");
  return as_device(allowed == dtype ? tensor : tensor.to(allowed));
}

void Program::add_constant(at::Tensor constant) {
  constants_.push_back(std::move(constant));
}

void Program::add(Instruction instruction) {
  instructions_.push_back(std::move(instruction));
}

void Program::add_output(int64_t slot, bool on_device) {
  outputs_.emplace_back(slot, on_device);
}

std::vector<c10::IValue> Program::run(std::vector<at::Tensor> inputs) const {
  ensure_ready();
  TORCH_CHECK(
      static_cast<int64_t>(inputs.size()) == inputs_, "a compiled graph of ", inputs_, " inputs was given ",
      inputs.size());
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  // Autocast was applied when the graph was traced.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  Run run(slots_, core_);
  int64_t next = 0;
  for (auto& input : inputs) {
    run[next++] = std::move(input);
  }
  inputs.clear();
  for (const auto& constant : constants_) {
    run[next++] = constant;
  }
  torch::jit::Stack stack;
  for (const auto& instruction : instructions_) {
    for (const auto& operand : instruction.operands) {
      push(stack, operand, run, instruction.on_device);
    }
    instruction.op.callBoxed(&stack);
    take_results(stack, instruction, run);
    for (const auto slot : instruction.dead) {
      run[slot] = c10::IValue();
    }
  }
  std::vector<c10::IValue> results;
  results.reserve(outputs_.size());
  for (const auto& [slot, on_device] : outputs_) {
    const auto value = slot < 0 ? c10::IValue() : run[slot];
    results.push_back(value.isTensor() ? c10::IValue(run.owners.give(value.toTensor(), on_device)) : value);
  }
  return results;
}

}  // namespace neuron_sim
