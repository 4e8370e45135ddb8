#include "counters.h"

namespace neuron_sim {

std::array<std::atomic<uint64_t>, static_cast<size_t>(Sync::kKinds)> g_syncs{};

}  // namespace neuron_sim
