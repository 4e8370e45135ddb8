#include "library.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <string>

#include "program.h"
#include "relabel.h"

namespace py = pybind11;

namespace neuron_sim {

namespace {

class Library {
 public:
  // Loads the code in a package: whoever calls this trusts it.
  Library(const std::string& file, std::vector<bool> on_device, int64_t core)
      : loader_(file), on_device_(std::move(on_device)), core_(static_cast<c10::DeviceIndex>(core)) {}

  // Without the interpreter's lock: a collective inside waits for threads that may need it.
  std::vector<at::Tensor> run(py::list inputs) {
    auto given = take_tensors(inputs);
    const py::gil_scoped_release no_gil;
    ensure_ready();
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    Owners owners(core_);
    std::vector<at::Tensor> host;
    host.reserve(given.size());
    for (const auto& tensor : given) {
      host.push_back(on_device(tensor) ? owners.as_host(tensor) : tensor);
    }
    auto results = loader_.boxed_run(std::move(host));
    TORCH_CHECK(results.size() == on_device_.size(), "a library returned ", results.size(), " results");
    for (size_t i = 0; i < results.size(); i++) {
      results[i] = owners.give(results[i], on_device_[i]);
    }
    return results;
  }

 private:
  torch::inductor::AOTIModelPackageLoader loader_;
  std::vector<bool> on_device_;
  c10::DeviceIndex core_;
};

}  // namespace

std::vector<at::Tensor> take_tensors(py::list& inputs) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(inputs.size());
  for (const auto& input : inputs) {
    TORCH_CHECK_TYPE(THPVariable_Check(input.ptr()), "a compiled graph takes tensors only");
    tensors.push_back(THPVariable_Unpack(input.ptr()));
  }
  inputs.attr("clear")();
  return tensors;
}

void bind_library(py::module_& m) {
  py::class_<Library>(m, "Library")
      .def(py::init<const std::string&, std::vector<bool>, int64_t>())
      .def("run", &Library::run);
}

}  // namespace neuron_sim
