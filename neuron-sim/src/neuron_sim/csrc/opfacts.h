// What is known of an operator, worked out the first time it is dispatched and found again in nanoseconds.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <string>
#include <vector>

namespace neuron_sim {

struct OpFacts {
  std::string name;                          // "aten::add.Tensor"
  c10::SmallVector<int16_t, 4> written;      // arguments the operator writes to (in-place, out=)
  c10::SmallVector<int16_t, 4> returns_arg;  // for each result: the argument it is, or -1
  int16_t generator = -1;                    // the argument named `generator`, or -1
  bool collective = false;                   // c10d's operators: they take process groups and mix devices
  bool dynamic_shape = false;                // the result's shape depends on values: the host must wait
  bool to_scalar = false;                    // the result is a number on the host: the host must wait
  bool is_view = false;                      // a result shares memory with an argument that is not written
  bool masks = false;                        // indexing: its shape depends on values only where an index is a mask
  int16_t output_size = -1;                  // the argument that makes a dynamic shape static when it is given, or -1
  std::atomic<bool> is_memory_only{false};   // creation, views, copies: it does not pass run_on_host
  // From the profile, by classify():
  std::atomic<bool> mixes_devices{false};    // takes tensors of the host beside the device's
  std::atomic<bool> falls_back{false};       // the real device has no kernel for it
  std::atomic<bool> static_shape{false};     // static on the device, whatever PyTorch's tag says
  std::atomic<bool> compiles{false};         // the real device compiles a program for it
  std::atomic<uint64_t> calls{0};
  std::atomic<uint64_t> signatures{0};       // distinct shapes, dtypes and static arguments seen
  std::atomic<uint64_t> bytes{0};            // collectives: bytes of the larger side
};

// The facts of an operator. The reference stays valid for the life of the process.
OpFacts& facts_of(const c10::OperatorHandle& op);
// Counts a call of an operator that does not pass run_on_host. Each call site has a cache of its own: an atomic one,
// because a function's static reference would hold the compiler's lock while its initialiser waits for Python's.
void count_call(std::atomic<OpFacts*>& cache, const char* name, const char* overload);
// Every operator dispatched so far, for reports.
std::vector<OpFacts*> all_facts();
// Asks the profile again about the operators known so far.
void classify_again();

}  // namespace neuron_sim
