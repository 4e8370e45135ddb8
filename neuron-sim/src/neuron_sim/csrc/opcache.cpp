#include "opcache.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstring>
#include <iomanip>
#include <mutex>
#include <sstream>
#include <unordered_set>

namespace neuron_sim {

namespace {

// 64 bits of a mixing hash are taken for the signature itself: among a million distinct calls of one process, two
// share a hash with a chance of one in thirty million, and then one compilation goes uncounted.
struct Hash {
  uint64_t state;

  void add(uint64_t word) {
    state = (state ^ word) * 0x9E3779B97F4A7C15ULL;
    state ^= state >> 32;
  }
};

struct Seen {
  std::mutex lock;
  std::unordered_set<uint64_t> hashes;
};

Seen& seen() {
  static auto* instance = new Seen();
  return *instance;
}

// Part of every hash, so that forgetting reaches the tables of all threads.
std::atomic<uint64_t> g_epoch{0};
SignatureFn g_before = nullptr;
SignatureFn g_compiled = nullptr;

constexpr size_t kTableSize = 4096;
thread_local std::array<uint64_t, kTableSize> t_table{};

void add_tensor(Hash& hash, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    hash.add(1);
    return;
  }
  const auto sizes = tensor.sizes();
  hash.add(2U | static_cast<uint64_t>(tensor.scalar_type()) << 8U | sizes.size() << 16U);
  for (const auto size : sizes) {
    hash.add(static_cast<uint64_t>(size));
  }
}

void add_value(Hash& hash, const c10::IValue& value) {
  if (value.isTensor()) {
    add_tensor(hash, value.toTensor());
  } else if (value.isInt()) {
    hash.add(3);
    hash.add(static_cast<uint64_t>(value.toInt()));
  } else if (value.isNone()) {
    hash.add(4);
  } else if (value.isBool()) {
    hash.add(value.toBool() ? 5 : 6);
  } else if (value.isDouble()) {
    uint64_t bits = 0;
    const double number = value.toDouble();
    std::memcpy(&bits, &number, sizeof(bits));
    hash.add(7);
    hash.add(bits);
  } else if (value.isList()) {
    const auto items = value.toListRef();
    hash.add(8U | items.size() << 8U);
    for (const auto& item : items) {
      add_value(hash, item);
    }
  } else if (value.isString()) {
    hash.add(std::hash<std::string>()(value.toStringRef()));
  } else {
    hash.add(9);  // devices, generators: the program compiled is the same for all of them
  }
}

void describe(std::ostream& out, const c10::IValue& value, bool is_number) {
  if (value.isTensor()) {
    if (const auto& tensor = value.toTensor(); tensor.defined()) {
      out << c10::toString(tensor.scalar_type()) << tensor.sizes();
    } else {
      out << "-";
    }
  } else if (value.isInt()) {
    out << (is_number ? "#" : "") << value.toInt();
  } else if (value.isNone()) {
    out << "-";
  } else if (value.isBool()) {
    out << (value.toBool() ? "true" : "false");
  } else if (value.isDouble()) {
    out << (is_number ? "#" : "") << std::setprecision(17) << value.toDouble();
  } else if (value.isList()) {
    out << "{";
    const char* separator = "";
    for (const auto& item : value.toListRef()) {
      out << separator;
      describe(out, item, is_number);
      separator = ", ";
    }
    out << "}";
  } else if (value.isString()) {
    out << std::quoted(value.toStringRef());
  } else {
    out << "*";
  }
}

}  // namespace

void set_signature_callbacks(SignatureFn before, SignatureFn compiled) {
  g_before = before;
  g_compiled = compiled;
}

uint64_t unseen_signature(const OpFacts& facts, const torch::jit::Stack& stack, size_t arguments) {
  Hash hash{reinterpret_cast<uintptr_t>(&facts) ^ g_epoch.load(std::memory_order_relaxed)};
  for (size_t i = stack.size() - arguments; i < stack.size(); i++) {
    add_value(hash, stack[i]);
  }
  const auto key = hash.state | 1U;  // never 0, which is an empty place and the answer for what was seen
  auto& place = t_table[(key >> 20U) % kTableSize];
  if (C10_LIKELY(place == key)) {
    return 0;
  }
  const std::lock_guard<std::mutex> guard(seen().lock);
  if (seen().hashes.count(key) == 0) {
    return key;
  }
  place = key;
  return 0;
}

std::string describe_call(const c10::OperatorHandle& op, const OpFacts& facts, const torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const auto first = stack.size() - arguments.size();
  std::ostringstream out;
  out.imbue(std::locale::classic());
  out << facts.name << "(";
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto kind = arguments[i].type()->kind();
    bool is_number = kind == c10::TypeKind::NumberType;
    if (kind == c10::TypeKind::OptionalType) {
      is_number = arguments[i].type()->expectRef<c10::OptionalType>().getElementType()->kind() ==
          c10::TypeKind::NumberType;
    }
    out << (i > 0 ? ", " : "");
    describe(out, stack[first + i], is_number);
  }
  out << ")";
  return out.str();
}

void before_compile(const OpFacts& facts, const std::string& signature) {
  if (g_before != nullptr) {
    g_before(facts.name, signature);
  }
}

void record_compile(OpFacts& facts, uint64_t hash, const std::string& signature) {
  {
    const std::lock_guard<std::mutex> guard(seen().lock);
    if (!seen().hashes.insert(hash).second) {
      return;  // another thread was faster
    }
  }
  facts.signatures.fetch_add(1, std::memory_order_relaxed);
  if (g_compiled != nullptr) {
    g_compiled(facts.name, signature);
  }
}

void forget_signatures() {
  const std::lock_guard<std::mutex> guard(seen().lock);
  seen().hashes.clear();
  g_epoch.fetch_add(0x100000001ULL);
}

}  // namespace neuron_sim
