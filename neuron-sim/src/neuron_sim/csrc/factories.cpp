// Creation, views and resizing: what needs no computing, done on the device's own storage.
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/TensorOptions.h>
#include <torch/library.h>

#include <sstream>

#include "memory.h"
#include "opfacts.h"
#include "policy.h"

namespace neuron_sim {

namespace {

#define NEURON_SIM_COUNT(name, overload)              \
  do {                                                \
    ensure_ready();                                   \
    static std::atomic<OpFacts*> facts{nullptr};      \
    count_call(facts, name, overload);                \
  } while (false)

c10::ScalarType checked_dtype(std::optional<c10::ScalarType> dtype, const char* op) {
  return allowed_dtype(c10::dtype_or_default(dtype), op);
}

void check_layout(std::optional<c10::Layout> layout) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      c10::layout_or_default(layout) == c10::kStrided, "the neuron device has strided tensors only, not ", *layout);
}

void check_format(std::optional<c10::MemoryFormat> format, const char* op) {
  if (C10_UNLIKELY(
          format.has_value() && *format != c10::MemoryFormat::Contiguous && *format != c10::MemoryFormat::Preserve) &&
      is_on(Rule::kMemoryFormat)) {
    std::ostringstream name;
    name << *format;
    report(Rule::kMemoryFormat, op, name.str());
  }
}

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> /*pin_memory*/, std::optional<c10::MemoryFormat> format) {
  NEURON_SIM_COUNT("aten::empty", "memory_format");
  check_layout(layout);
  check_format(format, "aten::empty");
  const auto type = checked_dtype(dtype, "aten::empty");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), allocator(), c10::DispatchKeySet(kNeuronKey), type, format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout, std::optional<c10::Device> device, std::optional<bool> /*pin_memory*/) {
  NEURON_SIM_COUNT("aten::empty_strided", "");
  check_layout(layout);
  const auto type = checked_dtype(dtype, "aten::empty_strided");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), allocator(), c10::DispatchKeySet(kNeuronKey),
      type);
}

// Through the fallback a zero tensor would lose its key, and the next operator would read a null pointer.
at::Tensor efficient_zero_tensor(
    c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> /*pin_memory*/) {
  NEURON_SIM_COUNT("aten::_efficientzerotensor", "");
  check_layout(layout);
  const c10::DeviceGuard guard(c10::device_or_default(device));
  struct NoMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t /*bytes*/) override {
      return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(kNeuron, current_core())};
    }
    void copy_data(void* /*to*/, const void* /*from*/, std::size_t /*count*/) const override {}
  };
  static auto* no_memory = new NoMemory();
  const auto keys = c10::DispatchKeySet(kNeuronKey).add(c10::DispatchKey::ZeroTensor);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), no_memory, keys, checked_dtype(dtype, "aten::_efficientzerotensor"), std::nullopt);
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  NEURON_SIM_COUNT("aten::as_strided", "");
  return at::cpu::as_strided_symint(self, size, stride, std::move(offset));
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  NEURON_SIM_COUNT("aten::view", "");
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor view_dtype(const at::Tensor& self, c10::ScalarType dtype) {
  NEURON_SIM_COUNT("aten::view", "dtype");
  check_view_dtype(dtype, "aten::view.dtype");
  return at::native::view_dtype(self, dtype);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  NEURON_SIM_COUNT("aten::_reshape_alias", "");
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  NEURON_SIM_COUNT("aten::resize_", "");
  check_format(format, "aten::resize_");
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_source_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_source_storage(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, std::move(source));
}

at::Tensor& set_source_storage_offset(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::set__symint(self, std::move(source), std::move(offset), size, stride);
}

at::Tensor& set_empty(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  return set_source_storage_offset(
      self, c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator(), /*resizable=*/true), 0, {0}, {1});
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &efficient_zero_tensor);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("view.dtype", &view_dtype);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_", &set_empty);
  m.impl("set_.source_Tensor", &set_source_tensor);
  m.impl("set_.source_Storage", &set_source_storage);
  m.impl("set_.source_Storage_storage_offset", &set_source_storage_offset);
}

}  // namespace neuron_sim
