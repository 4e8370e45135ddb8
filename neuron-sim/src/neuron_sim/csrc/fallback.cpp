#include "fallback.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include "counters.h"
#include "generator.h"
#include "opcache.h"
#include "policy.h"
#include "relabel.h"

namespace neuron_sim {

namespace {

// Everything about one call: what was relabelled, for which core, and what the rules must hear of.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : facts_(facts_of(op)), op_(op), stack_(stack), arguments_(op.schema().arguments().size()) {}

  void run() {
    facts_.calls.fetch_add(1, std::memory_order_relaxed);
    take_arguments();
    check();
    // Once the rules let it pass, and recorded only once it has run: an operator that fails compiles nothing.
    uint64_t unseen = 0;
    std::string signature;
    if (facts_.compiles.load(std::memory_order_relaxed)) {
      unseen = unseen_signature(facts_, *stack_, arguments_);
      if (C10_UNLIKELY(unseen != 0)) {
        signature = describe_call(op_, facts_, *stack_);
        before_compile(facts_, signature);
      }
    }
    {
      // Below autograd already: the host's tensors must not grow histories or view chains of their own.
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      op_.callBoxed(stack_);
    }
    if (!facts_.written.empty()) {
      follow_written();
    }
    give_results();
    if (C10_UNLIKELY(unseen != 0)) {
      record_compile(facts_, unseen, signature);
    }
  }

 private:
  struct Relabelled {
    at::Tensor device, host;
    int16_t argument;
  };

  void take_arguments() {
    const auto first = stack_->size() - arguments_;
    for (size_t i = 0; i < arguments_; i++) {
      argument_ = static_cast<int16_t>(i);
      auto& value = (*stack_)[first + i];
      if (value.isTensor()) {
        if (const auto& tensor = value.toTensor(); tensor.defined()) {
          take(value, tensor);
        }
      } else if (value.isList()) {
        take_list(value);
      } else if (value.isDevice()) {
        take_device(value);
      } else if (value.isGenerator()) {
        if (const auto generator = value.toGenerator(); generator.device().type() == kNeuron) {
          value = host_generator(generator);
        }
      }
    }
    if (C10_UNLIKELY(facts_.generator >= 0)) {
      auto& generator = (*stack_)[first + static_cast<size_t>(facts_.generator)];
      if (generator.isNone()) {
        generator = host_generator(default_generator(core()));
      }
    }
  }

  void take(c10::IValue& value, const at::Tensor& tensor) {
    if (on_device(tensor)) {
      value = relabel(tensor);
    } else {
      notice_host(tensor);
    }
  }

  void take_list(c10::IValue& value) {
    if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) {
        tensor = relabel_any(tensor);
      }
      value = c10::IValue(c10::List<at::Tensor>(tensors));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        tensors.push_back(tensor.has_value() ? std::optional<at::Tensor>(relabel_any(*tensor)) : std::nullopt);
      }
      value = std::move(tensors);
    } else if (is_list_of_tensor_lists(value)) {
      c10::impl::GenericList lists(c10::ListType::ofTensors());
      for (const c10::IValue& inner : value.toListRef()) {
        auto tensors = inner.toTensorVector();
        for (auto& tensor : tensors) {
          tensor = relabel_any(tensor);
        }
        lists.push_back(c10::List<at::Tensor>(tensors));
      }
      value = std::move(lists);
    }
  }

  void take_device(c10::IValue& value) {
    const auto device = value.toDevice();
    if (device.type() == kNeuron) {
      if (core_ < 0) {
        core_ = device.index() < 0 ? current_core() : device.index();
        check_core(core_);
      }
      value = c10::Device(c10::kCPU);
    }
  }

  static bool is_list_of_tensor_lists(const c10::IValue& value) {
    const auto items = value.toListRef();
    return !items.empty() && items[0].isTensorList();
  }

  at::Tensor relabel_any(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (on_device(tensor)) {
      return relabel(tensor);
    }
    notice_host(tensor);
    return tensor;
  }

  const at::Tensor& relabel(const at::Tensor& tensor) {
    for (const auto& known : relabelled_) {
      if (known.device.is_same(tensor)) {
        return known.host;
      }
    }
    const auto core = tensor.device().index();
    if (core_ < 0 || relabelled_.empty()) {
      core_ = core;
    } else if (C10_UNLIKELY(core != core_ && !facts_.collective)) {
      TORCH_CHECK(
          false, "Expected all tensors to be on the same device, but found at least two devices, neuron:",
          static_cast<int>(core_), " and neuron:", static_cast<int>(core), "! (", facts_.name, ")");
    }
    relabelled_.push_back({tensor, to_host_view(tensor), argument_});
    return relabelled_.back().host;
  }

  void notice_host(const at::Tensor& tensor) {
    if (host_argument_ < 0 && tensor.is_cpu() && tensor.dim() > 0) {
      host_argument_ = argument_;
    }
  }

  void check() {
    if (C10_UNLIKELY(!facts_.written.empty()) && is_on(Rule::kFloat64Out)) {
      check_written();
    }
    if (C10_UNLIKELY(host_argument_ >= 0 && !relabelled_.empty() && !facts_.mixes_devices)) {
      const auto where = std::to_string(host_argument_);
      report(Rule::kMixedDevices, facts_.name, where);
      TORCH_CHECK(
          false, "Expected all tensors to be on the same device, but argument ", where, " of ", facts_.name,
          " is on cpu beside tensors on neuron:", static_cast<int>(core_));
    }
    if (C10_UNLIKELY(facts_.falls_back) && is_on(Rule::kFallback)) {
      report(Rule::kFallback, facts_.name, "");
    }
    if (C10_UNLIKELY(facts_.collective)) {
      count_bytes();
    } else if (C10_UNLIKELY(facts_.dynamic_shape) && is_dynamic()) {
      count_sync(Sync::kDynamicShape);
      if (is_on(Rule::kDynamicShape) && !facts_.static_shape.load(std::memory_order_relaxed)) {
        report(Rule::kDynamicShape, facts_.name, "");
      }
    } else if (C10_UNLIKELY(facts_.to_scalar)) {
      count_sync(Sync::kItem);
    }
  }

  const c10::IValue& argument(int16_t index) const {
    return (*stack_)[stack_->size() - arguments_ + static_cast<size_t>(index)];
  }

  // Converting is for results; what the caller provides to be written to cannot be converted.
  void check_written() {
    for (const auto index : facts_.written) {
      const auto& value = argument(index);
      if (value.isTensor() && value.toTensor().defined() && value.toTensor().scalar_type() == c10::ScalarType::Double) {
        report(Rule::kFloat64Out, facts_.name, std::to_string(index));
      }
    }
  }

  // Whether this very call's result has a shape that depends on values, as its operator's may.
  bool is_dynamic() const {
    if (facts_.output_size >= 0) {
      return argument(facts_.output_size).isNone();
    }
    if (!facts_.masks) {
      return true;
    }
    for (const auto& index : argument(1).toListRef()) {
      if (index.isTensor() && index.toTensor().defined()) {
        const auto dtype = index.toTensor().scalar_type();
        if (dtype == c10::ScalarType::Bool || dtype == c10::ScalarType::Byte) {
          return true;
        }
      }
    }
    return false;
  }

  // A collective moves as much as its larger side: the gathered result, the input to be scattered.
  void count_bytes() {
    uint64_t largest = 0, bytes = 0;
    int16_t argument = -1;
    for (const auto& known : relabelled_) {
      bytes = known.argument == argument ? bytes : 0;
      argument = known.argument;
      bytes += known.host.nbytes();
      largest = std::max(largest, bytes);
    }
    facts_.bytes.fetch_add(largest, std::memory_order_relaxed);
  }

  // What the operator resized or restrided on the host has the same storage, shape and strides on the device.
  void follow_written() {
    for (const auto& known : relabelled_) {
      bool is_written = false;
      for (const auto argument : facts_.written) {
        is_written = is_written || argument == known.argument;
      }
      if (!is_written || known.host._is_zerotensor()) {
        continue;
      }
      follow_host(known.device.storage());
      if (C10_UNLIKELY(known.host.is_conj() != known.device.is_conj())) {
        known.device._set_conj(known.host.is_conj());
      }
      if (C10_UNLIKELY(known.host.is_neg() != known.device.is_neg())) {
        known.device._set_neg(known.host.is_neg());
      }
      auto* impl = known.device.unsafeGetTensorImpl();
      if (known.host.sizes() != known.device.sizes() || known.host.strides() != known.device.strides() ||
          known.host.storage_offset() != known.device.storage_offset()) {
        impl->set_sizes_and_strides(known.host.sizes(), known.host.strides(), known.host.storage_offset());
      }
    }
  }

  void give_results() {
    const auto results = facts_.returns_arg.size();
    const auto first = stack_->size() - results;
    for (size_t i = 0; i < results; i++) {
      auto& value = (*stack_)[first + i];
      if (value.isTensor()) {
        give(value, facts_.returns_arg[i]);
      } else if (value.isTensorList()) {
        auto tensors = value.toTensorVector();
        for (auto& tensor : tensors) {
          tensor = give_back(tensor);
        }
        value = c10::IValue(c10::List<at::Tensor>(tensors));
      } else if (value.isList() && is_list_of_tensor_lists(value)) {
        c10::impl::GenericList lists(c10::ListType::ofTensors());
        for (const c10::IValue& inner : value.toListRef()) {
          auto tensors = inner.toTensorVector();
          for (auto& tensor : tensors) {
            tensor = give_back(tensor);
          }
          lists.push_back(c10::List<at::Tensor>(tensors));
        }
        value = std::move(lists);
      }
    }
  }

  void give(c10::IValue& value, int16_t argument) {
    if (argument >= 0) {
      for (const auto& known : relabelled_) {
        if (known.argument == argument) {
          value = known.device;
          return;
        }
      }
    }
    const auto& tensor = value.toTensor();
    if (tensor.defined() && tensor.is_cpu()) {
      value = give_back(tensor);
    }
  }

  at::Tensor give_back(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) {
      return tensor;
    }
    auto* const storage = tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
    for (const auto& known : relabelled_) {
      if (known.host.is_same(tensor)) {
        return known.device;
      }
      if (storage != nullptr && known.host.storage().unsafeGetStorageImpl() == storage) {
        check_view_dtype(tensor.scalar_type(), facts_.name);
        return make_tensor(known.device.storage(), kNeuronKey, tensor);
      }
    }
    const auto dtype = tensor.scalar_type();
    if (C10_UNLIKELY(is_watched(dtype))) {
      const auto allowed = allowed_dtype_slow(dtype, facts_.name);
      if (allowed != dtype) {
        return to_device(tensor.to(allowed), core());
      }
    }
    // Several results may share one new buffer on the host; they must share one on the device.
    for (const auto& given : given_) {
      if (given.first == storage) {
        return make_tensor(given.second, kNeuronKey, tensor);
      }
    }
    auto result = to_device(tensor, core());
    if (facts_.returns_arg.size() > 1 || !(*stack_).back().isTensor()) {
      given_.emplace_back(storage, result.storage());
    }
    return result;
  }

  c10::DeviceIndex core() const {
    return core_ < 0 ? current_core() : core_;
  }

  OpFacts& facts_;
  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  size_t arguments_;
  c10::SmallVector<Relabelled, 6> relabelled_;
  c10::SmallVector<std::pair<c10::StorageImpl*, c10::Storage>, 2> given_;
  c10::DeviceIndex core_ = -1;
  int16_t argument_ = 0;
  int16_t host_argument_ = -1;
};

}  // namespace

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ensure_ready();
  Call(op, stack).run();
}

void prefer_host_kernels() {
  static auto* registrations = new std::vector<c10::RegistrationHandleRAII>();
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) {
      continue;
    }
    const auto op = dispatcher.findOp(name);
    if (!op.has_value() || !op->hasSchema() || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        op->hasKernelForDispatchKey(kNeuronKey)) {
      continue;
    }
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional)) {
      registrations->push_back(dispatcher.registerImpl(
          name, kNeuronKey, c10::KernelFunction::makeFromBoxedFunction<&run_on_host>(), std::nullopt, nullptr,
          "neuron_sim: the host's kernel rather than the composite"));
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

}  // namespace neuron_sim
