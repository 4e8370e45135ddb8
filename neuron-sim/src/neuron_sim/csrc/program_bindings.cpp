// The compiled graph as Python sees it. What a cache entry says arrives here, so everything is checked.
#include "program_bindings.h"

#include <torch/csrc/jit/python/pybind_utils.h>

#include "library.h"
#include "program.h"

namespace py = pybind11;

namespace neuron_sim {

namespace {

bool is_list_of(const c10::TypePtr& type, const c10::TypePtr& element) {
  const auto list = type->cast<c10::ListType>();
  return list != nullptr && *list->getElementType() == *element;
}

bool takes_tensor(const c10::TypePtr& type) {
  return type->isSubtypeOf(*c10::OptionalType::ofTensor());
}

Operand read_operand(const py::tuple& given, const c10::Argument& argument, int64_t slots) {
  TORCH_CHECK_VALUE(given.size() == 2, "an operand is a kind and a value");
  const auto kind = given[0].cast<std::string>();
  Operand operand;
  if (kind == "fixed") {
    operand.kind = Operand::Kind::kFixed;
    operand.fixed = torch::jit::toIValue(given[1], argument.real_type());
    return operand;
  }
  if (kind == "slot") {
    TORCH_CHECK_VALUE(takes_tensor(argument.type()), argument.name(), " takes no tensor");
    operand.kind = Operand::Kind::kSlot;
    operand.slots = {given[1].cast<int64_t>()};
  } else {
    operand.slots = given[1].cast<std::vector<int64_t>>();
    auto type = argument.type();
    if (const auto optional = type->cast<c10::OptionalType>()) {
      type = optional->getElementType();
    }
    if (kind == "tensors" && is_list_of(type, c10::TensorType::get())) {
      operand.kind = Operand::Kind::kTensors;
    } else if (kind == "optional_tensors" && is_list_of(type, c10::OptionalType::ofTensor())) {
      operand.kind = Operand::Kind::kOptionalTensors;
    } else {
      TORCH_CHECK_VALUE(false, argument.name(), " does not take ", kind);
    }
  }
  const auto least = operand.kind == Operand::Kind::kOptionalTensors ? -1 : 0;
  for (const auto slot : operand.slots) {
    TORCH_CHECK_VALUE(slot >= least && slot < slots, "there is no slot ", slot);
  }
  return operand;
}

class CheckedProgram {
 public:
  CheckedProgram(int64_t slots, int64_t inputs, int64_t core)
      : slots_(slots), program_(slots, inputs, static_cast<c10::DeviceIndex>(core)), next_(inputs) {
    TORCH_CHECK_VALUE(inputs >= 0 && slots >= inputs && slots < (1 << 24), "a graph cannot have ", slots, " slots");
  }

  void add_constant(at::Tensor constant) {
    TORCH_CHECK_VALUE(next_++ < slots_, "more constants than slots");
    program_.add_constant(std::move(constant));
  }

  void add(
      const std::string& name, const std::string& overload, const py::list& operands, bool on_device,
      int64_t first_result, int64_t results, std::vector<int64_t> dead, std::vector<std::vector<int64_t>> strides) {
    const auto op = c10::Dispatcher::singleton().findSchema({name, overload});
    TORCH_CHECK_VALUE(op.has_value(), "this PyTorch has no operator ", name, ".", overload);
    const auto& schema = op->schema();
    TORCH_CHECK_VALUE(!schema.is_mutable(), name, ".", overload, " writes to its arguments");
    TORCH_CHECK_VALUE(
        operands.size() == schema.arguments().size(), name, ".", overload, " takes ", schema.arguments().size(),
        " arguments, not ", operands.size());
    const auto returns = static_cast<int64_t>(schema.returns().size());
    const bool is_list = returns == 1 && is_list_of(schema.returns()[0].type(), c10::TensorType::get());
    TORCH_CHECK_VALUE(
        first_result >= 0 && results >= 0 && first_result + results <= slots_ && (is_list || results == returns), name,
        ".", overload, " has other results");
    for (const auto slot : dead) {
      TORCH_CHECK_VALUE(slot >= 0 && slot < slots_, "there is no slot ", slot);
    }
    TORCH_CHECK_VALUE(
        strides.empty() || static_cast<int64_t>(strides.size()) == results, name, ".", overload, " has other results");
    bool is_view = false;
    for (const auto& returned : schema.returns()) {
      is_view = is_view || returned.alias_info() != nullptr;
    }
    Instruction instruction{*op, {}, on_device, first_result, results, std::move(dead), std::move(strides), is_view};
    const torch::jit::ToIValueAllowNumbersAsTensors numbers(true);
    for (size_t i = 0; i < operands.size(); i++) {
      instruction.operands.push_back(read_operand(operands[i].cast<py::tuple>(), schema.arguments()[i], slots_));
    }
    program_.add(std::move(instruction));
  }

  void add_output(int64_t slot, bool on_device) {
    TORCH_CHECK_VALUE(slot >= -1 && slot < slots_, "there is no slot ", slot);
    program_.add_output(slot, on_device);
  }

  // Empties the list, so that the graph holds the only references to inputs that nobody else needs.
  py::list run(py::list inputs) const {
    auto tensors = take_tensors(inputs);
    std::vector<c10::IValue> results;
    {
      const py::gil_scoped_release no_gil;
      results = program_.run(std::move(tensors));
    }
    py::list given(results.size());
    for (size_t i = 0; i < results.size(); i++) {
      given[i] = torch::jit::toPyObject(std::move(results[i]));
    }
    return given;
  }

 private:
  int64_t slots_;
  Program program_;
  int64_t next_;
};

}  // namespace

void bind_program(py::module_& m) {
  py::class_<CheckedProgram>(m, "Program")
      .def(py::init<int64_t, int64_t, int64_t>())
      .def("add_constant", &CheckedProgram::add_constant)
      .def("add", &CheckedProgram::add)
      .def("add_output", &CheckedProgram::add_output)
      .def("run", &CheckedProgram::run);
  bind_library(m);
}

}  // namespace neuron_sim
