// What Python sees of the core, and what the core asks of Python.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "backend.h"
#include "counters.h"
#include "fallback.h"
#include "generator.h"
#include "hooks.h"
#include "memory.h"
#include "opcache.h"
#include "opfacts.h"
#include "policy.h"
#include "program_bindings.h"
#include "relabel.h"
#include "runtime.h"

namespace py = pybind11;

namespace neuron_sim {

namespace {

// Owned references that are never released: they may be called while the interpreter ends.
struct Callbacks {
  PyObject* start = nullptr;
  PyObject* count = nullptr;
  PyObject* event = nullptr;
  PyObject* classify = nullptr;
  PyObject* before_compile = nullptr;
  PyObject* compiled = nullptr;
  PyObject* sync = nullptr;
};
Callbacks g_callbacks;

constexpr std::array<const char*, static_cast<size_t>(Rule::kRules)> kRuleNames{
    "float64", "complex", "mixed_devices", "fallback", "float64_out", "dynamic_shape", "memory_format", "int64",
    "cast64", "generator"};
constexpr std::array<const char*, static_cast<size_t>(Sync::kKinds)> kSyncNames{
    "item", "copy_to_host", "dynamic_shape", "cast64", "device", "stream", "event"};

[[noreturn]] void throw_python_error() {
  python_error error;
  error.persist();
  throw error;
}

void start() {
  const py::gil_scoped_acquire gil;
  const auto result = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(g_callbacks.start));
  if (!result) {
    throw_python_error();
  }
}

int would_count() noexcept {
  const py::gil_scoped_acquire gil;
  // A configuration that cannot be read is reported when the device is first used; whoever only counts sees none.
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  auto* result = PyObject_CallNoArgs(g_callbacks.count);
  const int count = result != nullptr ? static_cast<int>(PyLong_AsLong(result)) : 0;
  Py_XDECREF(result);
  PyErr_Clear();
  PyErr_Restore(type, value, trace);
  return count;
}

void event(Rule rule, const std::string& op, const std::string& detail) {
  const py::gil_scoped_acquire gil;
  const auto result = py::reinterpret_steal<py::object>(PyObject_CallFunction(
      g_callbacks.event, "sss", kRuleNames[static_cast<size_t>(rule)], op.c_str(), detail.c_str()));
  if (!result) {
    throw_python_error();
  }
}

OpClass classify(const std::string& op) {
  const py::gil_scoped_acquire gil;
  const auto result = py::reinterpret_steal<py::object>(PyObject_CallFunction(g_callbacks.classify, "s", op.c_str()));
  if (!result) {
    throw_python_error();
  }
  const auto [mixes, falls_back, static_shape] = result.cast<std::tuple<bool, bool, bool>>();
  return {mixes, falls_back, static_shape};
}

void tell_signature(PyObject* callback, const std::string& op, const std::string& signature) {
  const py::gil_scoped_acquire gil;
  // Strings of a program (a reduction's name, say) may hold any bytes.
  const auto result = py::reinterpret_steal<py::object>(PyObject_CallFunction(
      callback, "sN", op.c_str(),
      PyUnicode_DecodeUTF8(signature.data(), static_cast<Py_ssize_t>(signature.size()), "backslashreplace")));
  if (!result) {
    throw_python_error();
  }
}

void tell_before(const std::string& op, const std::string& signature) {
  tell_signature(g_callbacks.before_compile, op, signature);
}

void tell_compiled(const std::string& op, const std::string& signature) {
  tell_signature(g_callbacks.compiled, op, signature);
}

void tell_sync(Sync kind) noexcept {
  if (Py_IsInitialized() == 0) {
    return;
  }
  const py::gil_scoped_acquire gil;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  auto* result = PyObject_CallFunction(g_callbacks.sync, "s", kSyncNames[static_cast<size_t>(kind)]);
  if (result == nullptr) {
    PyErr_WriteUnraisable(g_callbacks.sync);
  }
  Py_XDECREF(result);
  PyErr_Restore(type, value, trace);
}

void connect(
    py::object start_fn, py::object count_fn, py::object event_fn, py::object classify_fn, py::object before_fn,
    py::object compiled_fn, py::object sync_fn) {
  g_callbacks = {start_fn.release().ptr(),    count_fn.release().ptr(),  event_fn.release().ptr(),
                 classify_fn.release().ptr(), before_fn.release().ptr(), compiled_fn.release().ptr(),
                 sync_fn.release().ptr()};
  set_callbacks(&start, &would_count);
  set_policy_callbacks(&event, &classify);
  set_signature_callbacks(&tell_before, &tell_compiled);
}

// The rules named are reported from now on.
void watch(const std::vector<std::string>& names) {
  uint32_t rules = 0;
  for (const auto& name : names) {
    const auto* found = std::find(kRuleNames.begin(), kRuleNames.end(), name);
    TORCH_CHECK_VALUE(found != kRuleNames.end(), "the core knows no rule ", name);
    rules |= uint32_t{1} << static_cast<unsigned>(found - kRuleNames.begin());
  }
  const auto has = [rules](Rule rule) { return (rules >> static_cast<unsigned>(rule) & 1U) != 0; };
  uint64_t dtypes = 0;
  const auto bit = [](c10::ScalarType type) { return uint64_t{1} << static_cast<unsigned>(type); };
  if (has(Rule::kFloat64)) {
    dtypes |= bit(c10::ScalarType::Double);
  }
  if (has(Rule::kComplex)) {
    dtypes |= bit(c10::ScalarType::ComplexHalf) | bit(c10::ScalarType::ComplexFloat) |
        bit(c10::ScalarType::ComplexDouble);
  }
  g_watch.rules.store(rules);
  g_watch.dtypes.store(dtypes);
  classify_again();
}

py::dict stats_dict(c10::DeviceIndex core) {
  check_core(core);
  const auto s = memory_stats(core);
  py::dict out;
  out["capacity"] = s.capacity;
  out["bytes"] = s.bytes;
  out["peak_bytes"] = s.peak_bytes;
  out["allocated_bytes"] = s.allocated_bytes;
  out["freed_bytes"] = s.freed_bytes;
  out["blocks"] = s.blocks;
  out["peak_blocks"] = s.peak_blocks;
  out["allocated_blocks"] = s.allocated_blocks;
  out["freed_blocks"] = s.freed_blocks;
  out["ooms"] = s.ooms;
  return out;
}

py::list op_counts() {
  py::list out;
  for (const auto* facts : all_facts()) {
    if (const auto calls = facts->calls.load(); calls > 0) {
      py::dict one;
      one["name"] = facts->name;
      one["calls"] = calls;
      one["falls_back"] = facts->falls_back.load();
      one["compiles"] = facts->compiles.load();
      one["signatures"] = facts->signatures.load();
      one["collective"] = facts->collective;
      one["bytes"] = facts->bytes.load();
      out.append(one);
    }
  }
  return out;
}

py::dict sync_counts() {
  py::dict out;
  for (size_t i = 0; i < kSyncNames.size(); i++) {
    out[kSyncNames[i]] = g_syncs[i].load();
  }
  return out;
}

// How many threads this interpreter knows.
size_t thread_states() {
  size_t count = 0;
  for (auto* state = PyInterpreterState_ThreadHead(PyInterpreterState_Get()); state != nullptr;
       state = PyThreadState_Next(state)) {
    count++;
  }
  return count;
}

// The watch is never released: the group may be taken down while the interpreter ends.
c10::intrusive_ptr<c10d::Backend> make_watched_backend(c10::intrusive_ptr<c10d::Backend> host, py::object watch) {
  PyObject* call = watch.release().ptr();
  return make_backend(std::move(host), [call](const Collective& c) {
    const py::gil_scoped_acquire gil;
    const auto result = py::reinterpret_steal<py::object>(PyObject_CallFunction(
        call, "sssLLLO", c.name.c_str(), c.reduce_op.c_str(), c.dtype.c_str(), static_cast<long long>(c.elements),
        static_cast<long long>(c.bytes), static_cast<long long>(c.root), c.uneven ? Py_True : Py_False));
    if (!result) {
      throw_python_error();
    }
  });
}

void reset_counts() {
  for (auto* facts : all_facts()) {
    facts->calls.store(0);
    facts->signatures.store(0);
    facts->bytes.store(0);
  }
  for (auto& count : g_syncs) {
    count.store(0);
  }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register_device", [] {
    register_hooks();
    prefer_host_kernels();
  });
  m.def("connect", &connect);
  m.def("watch", &watch);
  m.def("configure", &configure);
  m.def("ensure_ready", &ensure_ready);
  m.def("is_started", &is_started);
  m.def("in_bad_fork", &in_bad_fork);
  m.def("core_count", [] { return static_cast<int>(core_count()); });
  m.def("current_core", [] { return static_cast<int>(current_core()); });
  m.def("exchange_core", [](int64_t index) {
    if (index >= 0) {
      check_core(index);
    }
    return static_cast<int>(exchange_core(static_cast<c10::DeviceIndex>(index)));
  });
  m.def("default_generator", [](int64_t core) {
    check_core(core);
    return default_generator(static_cast<c10::DeviceIndex>(core));
  });
  m.def("memory_stats", &stats_dict);
  m.def("reset_peak_stats", &reset_peak_stats);
  m.def("reset_accumulated_stats", &reset_accumulated_stats);
  m.def("set_capacity", &set_capacity);
  m.def("op_counts", &op_counts);
  m.def("sync_counts", &sync_counts);
  m.def("reset_counts", &reset_counts);
  m.def("make_backend", &make_watched_backend);
  m.def("forget_signatures", &forget_signatures);
  m.def("locate_syncs", [](bool on) { g_sync_listener.store(on ? &tell_sync : nullptr); });
  m.def("thread_states", &thread_states);
  m.def("to_host_view", &to_host_view);
  m.def("to_device", &to_device);
  bind_program(m);
}

}  // namespace neuron_sim
