// Happens-before. Operators run at once, in the order of the program; clocks keep which order the program has asked for.
#include "softcuda.h"
#include <set>

namespace softcuda {
thread_local bool inside_operator = false;

namespace {
struct HostCopy {  // to or from pinned memory, until the host has waited for it
  StreamKey stream;
  int64_t operation;
  at::Tensor host;
  at::Tensor value;  // undefined if the device has read: then `digest` is of what it read
  uint64_t digest;
};
std::recursive_mutex lock;
std::map<StreamKey, Clock> clocks;
Clock host_clock;
std::vector<HostCopy> copies;
std::set<std::string> reported_races;
int64_t last_stream = 0;
thread_local int64_t streams[MAX_DEVICES] = {};

void join(Clock& into, const Clock& from) {
  for (auto& [stream, operation] : from) {
    auto& known = into[stream];
    known = std::max(known, operation);
  }
}
uint64_t digest_of(const at::Tensor& host) {
  auto dense = host.contiguous();
  auto* bytes = static_cast<const unsigned char*>(dense.const_data_ptr());
  uint64_t digest = 1469598103934665603ull;
  for (size_t i = 0; i < dense.nbytes(); i++) digest = (digest ^ bytes[i]) * 1099511628211ull;
  return digest;
}
std::pair<uintptr_t, uintptr_t> bytes_of(const at::Tensor& tensor) {
  auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); i++) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {begin, begin + (last + 1) * tensor.itemsize()};
}
void finish(std::vector<HostCopy> due) {
  at::AutoDispatchBelowADInplaceOrView no_gradient;
  c10::impl::ExcludeDispatchKeyGuard no_modes(c10::python_ks);
  for (auto& copy : due) {
    if (copy.value.defined()) copy.host.copy_(copy.value);
    else if (digest_of(copy.host) != copy.digest)
      report(Finding::race, "pinned memory changed before the copy from it on " + describe(copy.stream) + " was waited for");
  }
}
template <class Test> std::vector<HostCopy> take_copies(Test test) {
  std::vector<HostCopy> due;
  for (size_t i = 0; i < copies.size();) {
    if (test(copies[i])) { due.push_back(copies[i]); copies.erase(copies.begin() + i); }
    else i++;
  }
  return due;
}
}  // namespace

std::string describe(StreamKey stream) {
  return (stream.second ? "stream " + std::to_string(stream.second) : "the default stream") + " of " + NAME + ":" + std::to_string(stream.first);
}
StreamKey current_stream(int device) { return {device, streams[device]}; }
void set_stream(StreamKey stream) { streams[stream.first] = stream.second; }
StreamKey new_stream(int device) { std::lock_guard guard(lock); return {device, ++last_stream}; }
int64_t advance(StreamKey stream) { std::lock_guard guard(lock); return ++clocks[stream][stream]; }
Clock clock_of(StreamKey stream) {
  std::lock_guard guard(lock);
  Clock clock = clocks[stream];
  join(clock, host_clock);
  return clock;
}
void stream_waits(StreamKey stream, const Clock& clock) { std::lock_guard guard(lock); join(clocks[stream], clock); }
void host_waits(const Clock& clock) {
  std::vector<HostCopy> due;
  {
    std::lock_guard guard(lock);
    join(host_clock, clock);
    due = take_copies([](const HostCopy& copy) { return host_clock[copy.stream] >= copy.operation; });
  }
  finish(std::move(due));
}
bool happened_before(StreamKey observer, StreamKey stream, int64_t operation) {
  if (observer == stream) return true;
  std::lock_guard guard(lock);
  return clocks[observer][stream] >= operation || host_clock[stream] >= operation;
}
void synchronize(StreamKey stream, const char* reason) {
  if (inside_operator) return;
  report(Finding::wait, reason);
  Clock known;
  {
    std::lock_guard guard(lock);
    for (auto& [other, clock] : clocks)
      if (other == stream || (stream.second < 0 && other.first == stream.first)) join(known, clock);
  }
  host_waits(known);
}

void access(const at::Tensor& tensor, bool write, StreamKey stream, const std::string& operation) {
  if (!tensor.defined() || !tensor.numel() || !tensor.has_storage()) return;
  auto [begin, end] = bytes_of(tensor);
  std::vector<std::string> races;
  {
    std::lock_guard memory(memory_lock());
    auto* accesses = is_ours(tensor) ? accesses_on_device(tensor.const_data_ptr()) : accesses_on_host(tensor.const_data_ptr());
    if (!accesses) return;
    std::vector<Access> kept;
    for (auto& other : *accesses) {
      bool overlaps = other.begin < end && begin < other.end;
      bool ordered = happened_before(stream, other.stream, other.operation);
      if (overlaps && !ordered && (write || other.write))
        races.push_back(operation + " on " + describe(stream) + (write ? " writes" : " reads") + " memory that " + other.name + " on " +
                        describe(other.stream) + (other.write ? " wrote" : " read") + ", and has not waited for it");
      bool replaced = ordered && begin <= other.begin && other.end <= end && (write || (!other.write && other.stream == stream));
      if (!replaced) kept.push_back(std::move(other));
    }
    kept.push_back({begin, end, write, stream, advance(stream), operation});
    *accesses = std::move(kept);
  }
  for (auto& race : races) {
    { std::lock_guard guard(lock); if (!reported_races.insert(race).second) continue; }
    report(Finding::race, race);
  }
}

void copy_later(const at::Tensor& pinned_target, at::Tensor value, StreamKey stream) {
  auto operation = advance(stream);
  if (pinned_target.is_non_overlapping_and_dense()) memset(pinned_target.mutable_data_ptr(), 0xFF, pinned_target.nbytes());
  std::lock_guard guard(lock);
  copies.push_back({stream, operation, pinned_target, std::move(value), 0});
}
void watch_source(const at::Tensor& pinned_source, StreamKey stream) {
  auto digest = digest_of(pinned_source);
  auto operation = advance(stream);
  std::lock_guard guard(lock);
  copies.push_back({stream, operation, pinned_source, {}, digest});
}
void settle(const at::Tensor& host, StreamKey stream) {
  if (inside_operator || !host.numel()) return;
  auto [begin, end] = bytes_of(host);
  std::vector<HostCopy> due;
  {
    std::lock_guard guard(lock);
    due = take_copies([&, begin = begin, end = end](const HostCopy& copy) {
      auto [low, high] = bytes_of(copy.host);
      return low < end && begin < high && happened_before(stream, copy.stream, copy.operation);
    });
  }
  finish(std::move(due));
}
}  // namespace softcuda
