// Device memory. A block is malloc'ed and freed at once: reuse by a stream that should have waited is found by clocks.
#include "softcuda.h"
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/GPUTrace.h>
#include <cstdlib>
#include <iomanip>
#include <set>
#include <sstream>

namespace softcuda {
namespace {
constexpr int64_t ROUND = 512, SEGMENT = 2 << 20;
constexpr int POISON = 0xFF;  // NaN in every floating-point format, -1 in integers

struct Block {
  int device;
  int64_t size, requested;
  StreamKey stream;
  std::set<StreamKey> recorded;
  std::vector<Access> accesses;
};
struct Unfinished { Access last; int64_t size; };  // of a block that was freed, by a stream that its own did not wait for

std::map<uintptr_t, Block> blocks;  // by address
std::map<StreamKey, std::vector<Unfinished>> unfinished;
std::vector<HistoryEntry> entries;
bool recording = false;
int64_t total[MAX_DEVICES] = {}, allowed[MAX_DEVICES] = {};
double fraction[MAX_DEVICES] = {};
Statistics of_device[MAX_DEVICES];
std::vector<MemoryObserver> observers;

int64_t up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }
std::string format(int64_t bytes) {  // as torch's allocator prints sizes
  std::ostringstream text;
  text << std::fixed << std::setprecision(2);
  if (bytes <= 1024) text << bytes << " bytes";
  else if (bytes <= 1048576) text << bytes / 1024.0 << " KiB";
  else if (bytes <= 1073741824) text << bytes / 1048576.0 << " MiB";
  else text << bytes / 1073741824.0 << " GiB";
  return text.str();
}
// What CUDA is asked for: torch takes 2 MiB for small blocks, 20 MiB for those below 10, and multiples of 2 MiB beyond.
int64_t segment_for(int64_t size) { return size <= 1 << 20 ? SEGMENT : size < 10 << 20 ? 20 << 20 : up(size, SEGMENT); }

// Reserved memory is taken in segments, as far as there is room.
int64_t reserved_for(int device) {
  auto current = of_device[device].allocated.current, segments = up(current, SEGMENT);
  return allowed[device] ? std::min(segments, std::max(allowed[device], current)) : segments;
}

[[noreturn]] void refuse(int device, int64_t size) {
  auto& is = of_device[device];
  auto limit = allowed[device], capacity = total[device];
  auto asked = segment_for(size), free = std::max<int64_t>(0, capacity - is.allocated.current);
  is.out_of_memory++;
  for (auto observer : observers) observer(device, asked, limit, free);
  std::string fraction_text = fraction[device] ? format(limit) + " allowed; " : "";
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, KIND, " out of memory. Tried to allocate ", format(asked), ". ", NOUN, " ", device, " has a total capacity of ",
      format(capacity), " of which ", format(free), " is free. Including non-PyTorch memory, this process has ",
      format(is.allocated.current), " memory in use. ", fraction_text, "Of the allocated memory ", format(is.allocated.current),
      " is allocated by PyTorch, and ", format(0), " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large "
      "try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  "
      "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)");
}

void release(void* address) {
  std::lock_guard guard(memory_lock());
  auto at = blocks.find(uintptr_t(address));
  auto& block = at->second;
  for (auto& last : block.accesses)
    if (!block.recorded.count(last.stream) && !happened_before(block.stream, last.stream, last.operation))
      unfinished[block.stream].push_back({last, block.size});
  auto& is = of_device[block.device];
  is.allocations.add(-1);
  is.allocated.add(-block.size);
  is.requested.add(-block.requested);
  if (recording) entries.push_back({false, block.device, uintptr_t(address), block.requested, block.stream.second});
  if (auto* trace = c10::impl::GPUTrace::get_trace()) (*trace)->trace_gpu_memory_deallocation(ACCELERATOR, uintptr_t(address));
  memset(address, POISON, block.size);
  free(address);
  blocks.erase(at);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    int device = current_device;
    require_context(device);
    if (!bytes) return {nullptr, nullptr, [](void*) {}, c10::Device(ACCELERATOR, device)};
    std::vector<std::string> races;
    auto stream = current_stream(device);
    void* address;
    {
      std::lock_guard guard(memory_lock());
      int64_t size = up(bytes, ROUND);
      auto& is = of_device[device];
      if (allowed[device] && is.allocated.current + size > allowed[device]) refuse(device, size);
      for (auto& [last, freed] : unfinished[stream])
        if (!happened_before(stream, last.stream, last.operation))
          races.push_back("memory of " + std::to_string(freed) + " bytes of " + describe(stream) + " was freed while " + last.name + " on " +
                          describe(last.stream) + " may still use it: it is handed out again without record_stream or a wait");
      unfinished.erase(stream);
      address = aligned_alloc(ROUND, size);
      TORCH_CHECK(address, "softcuda: the machine has no memory for ", size, " bytes");
      memset(address, POISON, size);
      auto& block = blocks[uintptr_t(address)] = {device, size, int64_t(bytes), stream, {}, {}};
      block.accesses.push_back({uintptr_t(address), uintptr_t(address) + size, true, stream, advance(stream), "the allocation"});
      is.allocations.add(1);
      is.allocated.add(size);
      is.requested.add(bytes);
      if (auto more = reserved_for(device) - is.reserved.current; more > 0) is.reserved.add(more);
      if (recording) entries.push_back({true, device, uintptr_t(address), int64_t(bytes), stream.second});
    }
    for (auto& race : races) report(Finding::race, race);
    if (auto* trace = c10::impl::GPUTrace::get_trace()) (*trace)->trace_gpu_memory_allocation(ACCELERATOR, uintptr_t(address));
    return {address, address, &release, c10::Device(ACCELERATOR, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
  bool initialized() override {
    for (int device = 0; device < MAX_DEVICES; device++)
      if (has_context(device)) return true;
    return false;
  }
  void emptyCache(c10::MempoolId_t = {0, 0}) override { empty_cache(); }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override { record_stream(pointer.get(), {stream.device_index(), stream.id()}); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats result;
    auto put = [](auto& to, const Counter& counter) {
      to[0].current = counter.current;
      to[0].peak = counter.peak;
      to[0].allocated = counter.allocated;
      to[0].freed = counter.freed;
    };
    auto& is = of_device[device];
    put(result.allocation, is.allocations);
    put(result.allocated_bytes, is.allocated);
    put(result.active_bytes, is.allocated);
    put(result.reserved_bytes, is.reserved);
    put(result.requested_bytes, is.requested);
    result.num_ooms = is.out_of_memory;
    return result;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peaks(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override { return memory_info(device); }
} allocator;
REGISTER_ALLOCATOR(ACCELERATOR, &allocator);
}  // namespace

std::recursive_mutex& memory_lock() { static auto* lock = new std::recursive_mutex; return *lock; }
c10::Allocator* device_allocator() { return &allocator; }
Statistics& statistics(int device) { return of_device[device]; }
void reset_peaks(int device) {
  auto& is = of_device[device];
  for (auto* counter : {&is.allocations, &is.allocated, &is.reserved, &is.requested}) counter->peak = counter->current;
}
void empty_cache() {
  std::lock_guard guard(memory_lock());
  unfinished.clear();
  for (int device = 0; device < MAX_DEVICES; device++) of_device[device].reserved.add(reserved_for(device) - of_device[device].reserved.current);
}
void set_capacity(int64_t bytes) { for (int i = 0; i < MAX_DEVICES; i++) total[i] = allowed[i] = bytes; }
void limit_memory(int device, double share) {
  fraction[device] = share;
  allowed[device] = int64_t(share * memory_info(device).second);
}
std::pair<int64_t, int64_t> memory_info(int device) {
  auto capacity = total[device] ? total[device] : int64_t(80) << 30;
  return {std::max<int64_t>(0, capacity - of_device[device].reserved.current), capacity};
}
void record_history(bool on) {
  std::lock_guard guard(memory_lock());
  recording = on;
  entries.clear();
}
std::vector<HistoryEntry> history() { std::lock_guard guard(memory_lock()); return entries; }
std::vector<LiveBlock> live_blocks() {
  std::lock_guard guard(memory_lock());
  std::vector<LiveBlock> result;
  for (auto& [address, block] : blocks) result.push_back({block.device, address, block.size, block.requested, block.stream.second});
  return result;
}
void observe_out_of_memory(MemoryObserver observer) { observers.push_back(observer); }
void record_stream(const void* address, StreamKey stream) {
  std::lock_guard guard(memory_lock());
  auto at = blocks.upper_bound(uintptr_t(address));
  if (at != blocks.begin() && uintptr_t(address) < std::prev(at)->first + std::prev(at)->second.size) std::prev(at)->second.recorded.insert(stream);
}
std::vector<Access>* accesses_on_device(const void* address) {
  auto at = blocks.upper_bound(uintptr_t(address));
  if (at == blocks.begin() || uintptr_t(address) >= std::prev(at)->first + std::prev(at)->second.size) return nullptr;
  return &std::prev(at)->second.accesses;
}
}  // namespace softcuda
