#include "opfacts.h"

#include <array>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "policy.h"

namespace neuron_sim {

namespace {

struct Registry {
  std::mutex lock;
  std::unordered_map<const void*, std::unique_ptr<OpFacts>> by_schema;
};

Registry& registry() {
  static auto* instance = new Registry();
  return *instance;
}

// A direct-mapped cache in front of the registry: a thread meets the same few hundred operators again and again.
constexpr size_t kCacheSize = 1024;
struct CacheEntry {
  const void* schema = nullptr;
  OpFacts* facts = nullptr;
};
thread_local std::array<CacheEntry, kCacheSize> t_cache;

bool shares_alias(const c10::AliasInfo& one, const c10::AliasInfo& other) {
  return !one.beforeSets().empty() && one.beforeSets() == other.beforeSets();
}

void classify(OpFacts& facts) {
  const auto answer = classify_op(facts.name);
  facts.mixes_devices = facts.collective || answer.mixes_devices;
  facts.falls_back = answer.falls_back;
  facts.static_shape = answer.static_shape;
  facts.compiles =
      !(facts.falls_back || facts.collective || facts.is_view || facts.to_scalar || facts.is_memory_only.load());
}

std::unique_ptr<OpFacts> work_out(const c10::OperatorHandle& op) {
  auto facts = std::make_unique<OpFacts>();
  const auto& schema = op.schema();
  facts->name = schema.overload_name().empty() ? schema.name() : schema.name() + "." + schema.overload_name();
  facts->collective = schema.name().rfind("c10d::", 0) == 0;
  facts->dynamic_shape = op.hasTag(at::Tag::dynamic_output_shape);
  facts->masks = schema.name() == "aten::index" || schema.name() == "aten::_unsafe_index";
  facts->to_scalar = schema.name() == "aten::_local_scalar_dense" || schema.name() == "aten::equal";
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      facts->written.push_back(static_cast<int16_t>(i));
    }
    if (arguments[i].name() == "generator") {
      facts->generator = static_cast<int16_t>(i);
    } else if (arguments[i].name() == "output_size" && facts->dynamic_shape) {
      facts->output_size = static_cast<int16_t>(i);
    }
  }
  for (const auto& result : schema.returns()) {
    int16_t argument = -1;
    const auto* alias = result.alias_info();
    facts->is_view = facts->is_view || (alias != nullptr && !alias->isWrite());
    if (alias != nullptr && alias->isWrite()) {
      for (const auto written : facts->written) {
        if (shares_alias(*alias, *arguments[static_cast<size_t>(written)].alias_info())) {
          argument = written;
        }
      }
    }
    facts->returns_arg.push_back(argument);
  }
  classify(*facts);
  return facts;
}

OpFacts& look_up(const c10::OperatorHandle& op) {
  const void* key = &op.schema();
  {
    const std::lock_guard<std::mutex> guard(registry().lock);
    const auto found = registry().by_schema.find(key);
    if (found != registry().by_schema.end()) {
      return *found->second;
    }
  }
  // Worked out without the lock: classifying asks Python, whose lock another thread may hold while it waits for ours.
  auto facts = work_out(op);
  const std::lock_guard<std::mutex> guard(registry().lock);
  return *registry().by_schema.emplace(key, std::move(facts)).first->second;
}

}  // namespace

OpFacts& facts_of(const c10::OperatorHandle& op) {
  const void* key = &op.schema();
  auto& entry = t_cache[(reinterpret_cast<uintptr_t>(key) >> 4) % kCacheSize];
  if (C10_UNLIKELY(entry.schema != key)) {
    entry.facts = &look_up(op);
    entry.schema = key;
  }
  return *entry.facts;
}

void count_call(std::atomic<OpFacts*>& cache, const char* name, const char* overload) {
  auto* facts = cache.load(std::memory_order_acquire);
  if (C10_UNLIKELY(facts == nullptr)) {
    facts = &look_up(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload));
    facts->is_memory_only.store(true);
    facts->compiles.store(false);
    cache.store(facts, std::memory_order_release);
  }
  facts->calls.fetch_add(1, std::memory_order_relaxed);
}

std::vector<OpFacts*> all_facts() {
  const std::lock_guard<std::mutex> guard(registry().lock);
  std::vector<OpFacts*> all;
  all.reserve(registry().by_schema.size());
  for (auto& entry : registry().by_schema) {
    all.push_back(entry.second.get());
  }
  return all;
}

void classify_again() {
  for (auto* facts : all_facts()) {
    classify(*facts);
  }
}

}  // namespace neuron_sim
