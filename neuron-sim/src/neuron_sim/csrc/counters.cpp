#include "counters.h"

namespace neuron_sim {

std::array<std::atomic<uint64_t>, static_cast<size_t>(Sync::kKinds)> g_syncs{};
std::atomic<SyncListener> g_sync_listener{nullptr};

}  // namespace neuron_sim
