// c10d's operators for the device: run on the same bytes, relabelled as the host's, by the host's process group.
#include "collectives.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <memory>
#include <mutex>

#include "fallback.h"

namespace neuron_sim {

namespace {

// c10d registers kernels of its own for the device, which look for a backend that moves device memory. Replacing them
// is meant, so the dispatcher's warning about it is not for the user.
class Quiet final : public c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

}  // namespace

void register_collectives(const std::vector<std::string>& names) {
  static std::unique_ptr<torch::Library> library;
  if (library != nullptr) {
    return;
  }
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  library = std::make_unique<torch::Library>(torch::Library::IMPL, "c10d", kNeuronKey, __FILE__, __LINE__);
  for (const auto& name : names) {
    library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

}  // namespace neuron_sim
