#include "work.h"

#include <ATen/core/ivalue_inl.h>

namespace neuron_sim {

namespace {

using c10::ivalue::Future;

c10::intrusive_ptr<Future> future_of(const std::vector<at::Tensor>& results) {
  auto future = c10::make_intrusive<Future>(c10::ListType::ofTensors());
  future->markCompleted(c10::IValue(results));
  return future;
}

class DeviceWork final : public c10d::Work {
 public:
  DeviceWork(c10::intrusive_ptr<c10d::Work> host, std::vector<at::Tensor> results)
      : host_(std::move(host)), results_(std::move(results)) {}

  bool isCompleted() override {
    return host_ == nullptr || host_->isCompleted();
  }
  bool isSuccess() const override {
    return host_ == nullptr || host_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return host_ == nullptr ? nullptr : host_->exception();
  }
  std::vector<at::Tensor> result() override {
    return results_;
  }
  void synchronize() override {
    if (host_ != nullptr) {
      host_->synchronize();
    }
  }
  bool wait(std::chrono::milliseconds timeout) override {
    return host_ == nullptr || host_->wait(timeout);
  }
  void blockCurrentStream() override {
    wait(kNoTimeout);  // a stream of the device holds nothing back: its work runs when it is issued
  }
  void abort() override {
    if (host_ != nullptr) {
      host_->abort();
    }
  }
  uint64_t getSequencenumber() const override {
    return host_ == nullptr ? 0 : host_->getSequencenumber();
  }

  // What DDP and compiled graphs read: completed with the device's tensors when the host is done.
  c10::intrusive_ptr<Future> getFuture() override {
    if (host_ == nullptr) {
      return future_of(results_);
    }
    return host_->getFuture()->then(
        [results = results_](Future& host) {
          host.value();  // rethrows what went wrong
          return c10::IValue(results);
        },
        c10::ListType::ofTensors());
  }

 private:
  c10::intrusive_ptr<c10d::Work> host_;
  std::vector<at::Tensor> results_;
};

}  // namespace

c10::intrusive_ptr<c10d::Work> device_work(c10::intrusive_ptr<c10d::Work> host, std::vector<at::Tensor> results) {
  return c10::make_intrusive<DeviceWork>(std::move(host), std::move(results));
}

c10::intrusive_ptr<c10d::Work> done(std::vector<at::Tensor> results) {
  return c10::make_intrusive<DeviceWork>(nullptr, std::move(results));
}

}  // namespace neuron_sim
