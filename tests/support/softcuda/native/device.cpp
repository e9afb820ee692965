// Devices as torch sees them: its device guard (streams, events), and contexts that do not survive a fork.
#include "softcuda.h"
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/GPUTrace.h>
#include <chrono>
#include <pthread.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace softcuda {
thread_local int current_device = 0;

namespace {
int count = 0;
bool context[MAX_DEVICES] = {};
bool context_of_parent = false;
int64_t last_event = 0;

[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] {
  for (bool has : context) context_of_parent |= has;
});
int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }
StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
c10::Stream stream_of(StreamKey key) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(ACCELERATOR, key.first), key.second); }
auto* tracer() { return c10::impl::GPUTrace::get_trace(); }

struct Event {
  int64_t id;
  Clock clock;
  std::chrono::steady_clock::time_point time;
};

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return ACCELERATOR; }
  c10::Device getDevice() const override { return c10::Device(ACCELERATOR, current_device); }
  void setDevice(c10::Device device) const override { check_index(device.index()); current_device = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    if (device.has_index()) setDevice(device);
    return before;
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return count; }

  c10::Stream getStream(c10::Device device) const override { return stream_of(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of({index_of(device), 0}); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    auto stream = new_stream(index_of(device));
    if (auto* trace = tracer()) (*trace)->trace_gpu_stream_creation(ACCELERATOR, stream.second);
    return stream_of(stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = stream_of(current_stream(stream.device_index()));
    set_stream(key_of(stream));
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream& stream) const override { host_waits(clock_of(key_of(stream))); return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    softcuda::synchronize(key_of(stream), "stream");
    if (auto* trace = tracer()) (*trace)->trace_gpu_stream_synchronization(ACCELERATOR, stream.id());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    softcuda::synchronize({device < 0 ? current_device : device, -1}, "device");
    if (auto* trace = tracer()) (*trace)->trace_gpu_device_synchronization(ACCELERATOR);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) {
      *event = new Event{++last_event};
      if (auto* trace = tracer()) (*trace)->trace_gpu_event_creation(ACCELERATOR, uintptr_t(*event));
    }
    auto* is = static_cast<Event*>(*event);
    is->clock = clock_of(key_of(stream));
    is->time = std::chrono::steady_clock::now();
    if (auto* trace = tracer()) (*trace)->trace_gpu_event_record(ACCELERATOR, uintptr_t(*event), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    stream_waits(key_of(stream), static_cast<Event*>(event)->clock);
    if (auto* trace = tracer()) (*trace)->trace_gpu_event_wait(ACCELERATOR, uintptr_t(event), stream.id());
  }
  bool queryEvent(void* event) const override {
    if (event) host_waits(static_cast<Event*>(event)->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    if (!inside_operator) report(Finding::wait, "event");
    host_waits(static_cast<Event*>(event)->clock);
    if (auto* trace = tracer()) (*trace)->trace_gpu_event_synchronization(ACCELERATOR, uintptr_t(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return elapsed_milliseconds(first, second);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override { record_stream(pointer.get(), key_of(stream)); }
};
C10_REGISTER_GUARD_IMPL(SOFTCUDA_KEY, DeviceGuard);

}  // namespace

void configure(int devices, int64_t bytes) {
  count = devices;
  set_capacity(bytes);
  c10::SetAllocator(ACCELERATOR, device_allocator(), 9);
}
int device_count() { return count; }
void check_index(int64_t device) {
  if (device < 0 || device >= count) throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 101, std::string(KIND) + " error: invalid device ordinal");
}
void require_context(int device) {
  if (context_of_parent) throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 3, std::string(KIND) + " error: initialization error");
  context[device] = true;
}
double elapsed_milliseconds(const void* first, const void* second) {
  return std::chrono::duration<double, std::milli>(static_cast<const Event*>(second)->time - static_cast<const Event*>(first)->time).count();
}
bool has_context(int device) { return device >= 0 && device < MAX_DEVICES && context[device]; }
}  // namespace softcuda

// Called before torch's own library is initialised, which asks once whether there is a device.
extern "C" SHARED void softcuda_configure(int devices, int64_t bytes) { softcuda::configure(devices, bytes); }

namespace c10d {
namespace {
struct DeviceTimer final : c10d::Timer {
  explicit DeviceTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimeRef(start), to = getTimeRef(end);
    return to >= from ? std::optional<int64_t>(to - from) : std::nullopt;
  }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, softcuda::ACCELERATOR, DeviceTimer);
}  // namespace
}  // namespace c10d
