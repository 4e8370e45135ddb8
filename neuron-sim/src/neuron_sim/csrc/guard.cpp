// Devices, streams and events as c10's guards want them. Work runs when it is issued, so a stream is only an order's
// name and an event only a time stamp; what differs from a no-op is what a program can see: identity, time, counts.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <chrono>

#include "counters.h"
#include "runtime.h"

namespace neuron_sim {

namespace {

thread_local std::array<c10::StreamId, kMaxCores> t_streams{};
std::atomic<c10::StreamId> g_next_stream{1};  // 0 is every core's default stream

using Clock = std::chrono::steady_clock;

struct EventState {
  Clock::time_point recorded_at;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kNeuron;

  Guard() = default;
  explicit Guard(c10::DeviceType /*type*/) {}

  c10::DeviceType type() const override {
    return kNeuron;
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    return {kNeuron, exchange_core(device.index())};
  }

  c10::Device getDevice() const override {
    return {kNeuron, current_core()};
  }

  void setDevice(c10::Device device) const override {
    exchange_core(device.index());
  }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    set_core_unchecked(device.index());
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return core_count();
  }

  c10::Stream getStream(c10::Device device) const noexcept override {
    const auto core = resolve(device);
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kNeuron, core), t_streams[static_cast<size_t>(core)]);
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kNeuron, checked(device)), 0);
  }

  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kNeuron, checked(device)), g_next_stream.fetch_add(1));
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    return getNewStream(device, 0);
  }

  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    const auto previous = getStream(stream.device());
    t_streams[static_cast<size_t>(resolve(stream.device()))] = stream.id();
    return previous;
  }

  void* getStreamNativeHandle(const c10::Stream stream) const override {
    // c10 only hands the value on; two streams must not share it, and no stream's may be null.
    return reinterpret_cast<void*>(stream.id() + 1);
  }

  bool queryStream(const c10::Stream& /*stream*/) const override {
    return true;
  }

  void synchronizeStream(const c10::Stream& /*stream*/) const override {
    count_sync(Sync::kStream);
  }

  void synchronizeDevice(const c10::DeviceIndex core) const override {
    check_core(core);
    count_sync(Sync::kDevice);
  }

  void record(void** event, const c10::Stream& /*stream*/, const c10::DeviceIndex /*core*/, const c10::EventFlag /*flag*/)
      const override {
    ensure_ready();
    if (*event == nullptr) {
      *event = new EventState();
    }
    static_cast<EventState*>(*event)->recorded_at = Clock::now();
  }

  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}

  bool queryEvent(void* /*event*/) const override {
    return true;
  }

  void synchronizeEvent(void* /*event*/) const override {
    count_sync(Sync::kEvent);
  }

  void destroyEvent(void* event, const c10::DeviceIndex /*core*/) const noexcept override {
    delete static_cast<EventState*>(event);
  }

  double elapsedTime(void* first, void* second, const c10::DeviceIndex /*core*/) const override {
    const auto from = static_cast<EventState*>(first)->recorded_at;
    const auto to = static_cast<EventState*>(second)->recorded_at;
    return std::chrono::duration<double, std::milli>(to - from).count();
  }

  c10::DeviceCapability getDeviceCapability(c10::Device /*device*/) const override {
    c10::DeviceCapability capability;
    capability.capability_data.capability_bits = (1ULL << c10::kIndex_Byte) | (1ULL << c10::kIndex_Char) |
        (1ULL << c10::kIndex_Short) | (1ULL << c10::kIndex_Int) | (1ULL << c10::kIndex_Long) |
        (1ULL << c10::kIndex_Half) | (1ULL << c10::kIndex_BFloat16) | (1ULL << c10::kIndex_Float) |
        (1ULL << c10::kIndex_Bool);
    return capability;
  }

 private:
  static c10::DeviceIndex resolve(c10::Device device) noexcept {
    return device.index() < 0 ? current_core() : device.index();
  }

  static c10::DeviceIndex checked(c10::Device device) {
    const auto core = resolve(device);
    check_core(core);
    return core;
  }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace neuron_sim
