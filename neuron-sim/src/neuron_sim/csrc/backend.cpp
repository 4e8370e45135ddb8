#include "backend.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "relabel.h"
#include "runtime.h"
#include "work.h"

namespace neuron_sim {

namespace {

using c10d::BarrierOptions;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<Work>;

const char* name_of(const c10d::ReduceOp& op) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM: return "SUM";
    case c10d::ReduceOp::AVG: return "AVG";
    case c10d::ReduceOp::PRODUCT: return "PRODUCT";
    case c10d::ReduceOp::MIN: return "MIN";
    case c10d::ReduceOp::MAX: return "MAX";
    case c10d::ReduceOp::BAND: return "BAND";
    case c10d::ReduceOp::BOR: return "BOR";
    case c10d::ReduceOp::BXOR: return "BXOR";
    case c10d::ReduceOp::PREMUL_SUM: return "PREMUL_SUM";
    default: return "UNUSED";
  }
}

at::Tensor relabelled(const at::Tensor& tensor) {
  return on_device(tensor) ? to_host_view(tensor) : tensor;
}

Tensors relabelled(const Tensors& tensors) {
  Tensors host;
  host.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    host.push_back(relabelled(tensor));
  }
  return host;
}

TensorLists relabelled(const TensorLists& lists) {
  TensorLists host;
  host.reserve(lists.size());
  for (const auto& list : lists) {
    host.push_back(relabelled(list));
  }
  return host;
}

Tensors flat(const TensorLists& lists) {
  Tensors all;
  for (const auto& list : lists) {
    all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}

int64_t bytes_of(const Tensors& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) {
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

bool all_of_one_size(const std::vector<int64_t>& sizes) {
  return std::adjacent_find(sizes.begin(), sizes.end(), std::not_equal_to<>()) == sizes.end();
}

class NeuronBackend final : public c10d::Backend {
 public:
  NeuronBackend(c10::intrusive_ptr<c10d::Backend> host, GroupWatch watch)
      : Backend(host->getRank(), host->getSize()), host_(std::move(host)), watch_(std::move(watch)) {}

  const std::string getBackendName() const override {
    return "neuron";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return host_->getBackendOptions();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    host_->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {
    host_->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return host_->getSequenceNumberForGroup();
  }
  void abort() override {
    host_->abort();
  }
  void shutdown() override {
    host_->shutdown();
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    start("all_reduce", tensors, {}, &options.reduceOp);
    auto host = relabelled(tensors);
    auto chosen = options;
    chosen.reduceOp = averaged(options.reduceOp, host);
    return device_work(host_->allreduce(host, chosen), tensors);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    start("all_reduce_coalesced", tensors, {}, &options.reduceOp);
    auto host = relabelled(tensors);
    auto chosen = options;
    chosen.reduceOp = averaged(options.reduceOp, host);
    return device_work(host_->allreduce_coalesced(host, chosen), tensors);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    start("broadcast", tensors, {}, nullptr, options.rootRank);
    auto host = relabelled(tensors);
    return device_work(host_->broadcast(host, options), tensors);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    start("reduce", tensors, {}, &options.reduceOp, options.rootRank);
    auto host = relabelled(tensors);
    auto chosen = options;
    chosen.reduceOp = averaged(options.reduceOp, host);
    return device_work(host_->reduce(host, chosen), tensors);
  }

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    start("all_gather", inputs, flat(outputs));
    auto host_outputs = relabelled(outputs);
    auto host_inputs = relabelled(inputs);
    return device_work(host_->allgather(host_outputs, host_inputs, options), flat(outputs));
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    start("all_gather_into_tensor", {input}, {output});
    auto host_output = relabelled(output);
    auto host_input = relabelled(input);
    return device_work(host_->_allgather_base(host_output, host_input, options), {output});
  }

  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    start("all_gather_coalesced", inputs, flat(outputs));
    auto host_outputs = relabelled(outputs);
    auto host_inputs = relabelled(inputs);
    return device_work(host_->allgather_coalesced(host_outputs, host_inputs, options), flat(outputs));
  }

  // The functional collectives come here with one tensor too.
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    start(outputs.size() == 1 ? "all_gather_into_tensor" : "all_gather_into_tensor_coalesced", inputs, outputs);
    auto host_outputs = relabelled(outputs);
    auto host_inputs = relabelled(inputs);
    return device_work(host_->allgather_into_tensor_coalesced(host_outputs, host_inputs, options), outputs);
  }

  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    start("gather", inputs, flat(outputs), nullptr, options.rootRank);
    auto host_outputs = relabelled(outputs);
    auto host_inputs = relabelled(inputs);
    return device_work(host_->gather(host_outputs, host_inputs, options), flat(outputs));
  }

  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    start("scatter", outputs, flat(inputs), nullptr, options.rootRank);
    auto host_outputs = relabelled(outputs);
    auto host_inputs = relabelled(inputs);
    return device_work(host_->scatter(host_outputs, host_inputs, options), outputs);
  }

  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override {
    start("reduce_scatter", outputs, flat(inputs), &options.reduceOp);
    auto chosen = options;
    TensorLists host_inputs = relabelled(inputs);
    if (options.reduceOp == c10d::ReduceOp::AVG) {
      for (auto& list : host_inputs) {
        chosen.reduceOp = averaged_copy(options.reduceOp, list);
      }
    }
    auto host_outputs = relabelled(outputs);
    return device_work(host_->reduce_scatter(host_outputs, host_inputs, chosen), outputs);
  }

  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    start("reduce_scatter_tensor", {output}, {input}, &options.reduceOp);
    auto chosen = options;
    Tensors host_input{relabelled(input)};
    chosen.reduceOp = averaged_copy(options.reduceOp, host_input);
    auto host_output = relabelled(output);
    return device_work(host_->_reduce_scatter_base(host_output, host_input[0], chosen), {output});
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    start(
        outputs.size() == 1 ? "reduce_scatter_tensor" : "reduce_scatter_tensor_coalesced", outputs, inputs,
        &options.reduceOp);
    auto chosen = options;
    auto host_inputs = relabelled(inputs);
    chosen.reduceOp = averaged_copy(options.reduceOp, host_inputs);
    auto host_outputs = relabelled(outputs);
    return device_work(host_->reduce_scatter_tensor_coalesced(host_outputs, host_inputs, chosen), outputs);
  }

  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    const bool uneven = !all_of_one_size(output_splits) || !all_of_one_size(input_splits);
    start("all_to_all_single", {input}, {output}, nullptr, -1, uneven);
    auto host_output = relabelled(output);
    auto host_input = relabelled(input);
    return device_work(host_->alltoall_base(host_output, host_input, output_splits, input_splits, options), {output});
  }

  // gloo exchanges one buffer only, so the lists are packed into one and unpacked when it is there.
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    std::vector<int64_t> output_splits, input_splits;
    Tensors packed;
    for (size_t i = 0; i < inputs.size(); i++) {
      output_splits.push_back(outputs[i].numel());
      input_splits.push_back(inputs[i].numel());
      packed.push_back(relabelled(inputs[i]).reshape(-1));
    }
    start(
        "all_to_all", inputs, outputs, nullptr, -1, !all_of_one_size(output_splits) || !all_of_one_size(input_splits));
    auto input = at::cat(packed);
    int64_t length = 0;
    for (const auto split : output_splits) {
      length += split;
    }
    auto output = at::empty({length}, input.options());
    host_->alltoall_base(output, input, output_splits, input_splits, options)->wait();
    int64_t offset = 0;
    for (const auto& target : outputs) {
      relabelled(target).copy_(output.narrow(0, offset, target.numel()).view(target.sizes()));
      offset += target.numel();
    }
    return done(outputs);
  }

  WorkPtr barrier(const BarrierOptions& options) override {
    start("barrier", {}, {});
    auto chosen = options;
    chosen.device = c10::Device(c10::kCPU);
    chosen.device_ids.clear();
    return device_work(host_->barrier(chosen), {});
  }

  void monitoredBarrier(const BarrierOptions& options, bool wait_all_ranks) override {
    start("monitored_barrier", {}, {});
    host_->monitoredBarrier(options, wait_all_ranks);
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    start("send", tensors, {});
    auto host = relabelled(tensors);
    return device_work(host_->send(host, to, tag), tensors);
  }

  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    start("recv", tensors, {});
    auto host = relabelled(tensors);
    return device_work(host_->recv(host, from, tag), tensors);
  }

  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    start("recv_anysource", tensors, {});
    auto host = relabelled(tensors);
    return device_work(host_->recvAnysource(host, tag), tensors);
  }

 private:
  // `part` is what every rank brings alike, `whole` the other side of the transfer.
  void start(
      const char* name, const Tensors& part, const Tensors& whole, const c10d::ReduceOp* reduce_op = nullptr,
      int64_t root = -1, bool uneven = false) {
    ensure_ready();
    Collective collective;
    collective.name = name;
    collective.reduce_op = reduce_op != nullptr ? name_of(*reduce_op) : "";
    if (!part.empty()) {
      collective.dtype = c10::getDtypeNames(part[0].scalar_type()).first;
    }
    for (const auto& tensor : part) {
      collective.elements += tensor.numel();
    }
    collective.bytes = std::max(bytes_of(part), bytes_of(whole));
    collective.root = root;
    collective.uneven = uneven;
    watch_(collective);
  }

  // gloo has no average: divide first, then add. In place, as the sum would be.
  c10d::ReduceOp averaged(const c10d::ReduceOp& op, Tensors& host) const {
    if (op != c10d::ReduceOp::AVG) {
      return op;
    }
    for (auto& tensor : host) {
      tensor.div_(getSize());
    }
    return c10d::ReduceOp::SUM;
  }

  // The same where the input is not the output, and so must stay as it is.
  c10d::ReduceOp averaged_copy(const c10d::ReduceOp& op, Tensors& host) const {
    if (op != c10d::ReduceOp::AVG) {
      return op;
    }
    for (auto& tensor : host) {
      tensor = tensor.div(getSize());
    }
    return c10d::ReduceOp::SUM;
  }

  c10::intrusive_ptr<c10d::Backend> host_;
  GroupWatch watch_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(c10::intrusive_ptr<c10d::Backend> host, GroupWatch watch) {
  return c10::make_intrusive<NeuronBackend>(std::move(host), std::move(watch));
}

}  // namespace neuron_sim
