// An emulated accelerator: what each file promises to the others. All of it lives in the memory of one process.
// It is CUDA, or with -DSOFTCUDA_NPU one that is not torch's own (PrivateUse1), by the name of Ascend's: npu.
//
// reports.cpp     findings (races, hangs, waits of the host, unpinned copies), counted and handed to Python by name
// order.cpp       happens-before of streams, events and the host; races on device and pinned memory; late host copies
// memory.cpp      device memory: limit, peaks, history, NaN in fresh and freed bytes, record_stream
// pinned.cpp      pinned host memory and its statistics
// device.cpp      devices, streams and events as torch's device guard, and what a fork forbids
// hooks.h         what torch asks of any accelerator; cuda/hooks.cpp, npu/hooks.cpp: what it asks of these
// random.cpp      generators with the state of CUDA's: seed and offset, 16 bytes
// operators.cpp   creation, copies and views; every other operator by the CPU, if all its tensors are on one device
// cuda/attention.cpp  attention kernels that only CUDA has, and histc of integers
// cuda/numbers.cpp    TF32, atomics, and what torch's deterministic mode says of them
// npu/autocast.cpp    operators that autocast casts
// collectives.cpp the process group "nccl" or "hccl"; bindings.cpp: what Python calls (these two know Python, the others do not)
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Stream.h>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#define SHARED __attribute__((visibility("default")))

namespace softcuda {

#ifdef SOFTCUDA_NPU
#define SOFTCUDA_KEY PrivateUse1
constexpr const char *NAME = "npu", *KIND = "NPU", *NOUN = "NPU", *TRANSPORT = "hccl";
#else
#define SOFTCUDA_KEY CUDA
constexpr const char *NAME = "cuda", *KIND = "CUDA", *NOUN = "GPU", *TRANSPORT = "nccl";
#endif
constexpr auto ACCELERATOR = c10::DeviceType::SOFTCUDA_KEY;
constexpr auto DISPATCH_KEY = c10::DispatchKey::SOFTCUDA_KEY;
constexpr int MAX_DEVICES = 16;

inline bool is_ours(const at::Tensor& tensor) { return tensor.device().type() == ACCELERATOR; }

// --- reports.cpp -----------------------------------------------------------------------------------------------

enum class Finding { race, hang, wait, unpinned };
using Listener = void (*)(const char* kind, const char* text);

// Count a finding, and hand it to the listener. Never called with a lock held: the listener runs Python.
SHARED void report(Finding, const std::string& text);
SHARED int64_t count_findings(Finding);
SHARED void listen(Listener);

// --- device.cpp ------------------------------------------------------------------------------------------------

SHARED extern thread_local int current_device;
// Number of devices, and the bytes that tensors may take on each; 0 for no limit.
SHARED void configure(int devices, int64_t bytes);
SHARED int device_count();
SHARED void check_index(int64_t device);
// Raise the driver's error in a process forked from one that has used a device.
SHARED void require_context(int device);
SHARED bool has_context(int device);
SHARED double elapsed_milliseconds(const void* first_event, const void* second_event);

// --- order.cpp -------------------------------------------------------------------------------------------------

using StreamKey = std::pair<int, int64_t>;     // device, id; id 0 is the default stream
using Clock = std::map<StreamKey, int64_t>;    // the last operation of each stream that is known to be done

std::string describe(StreamKey);
SHARED StreamKey current_stream(int device);
SHARED void set_stream(StreamKey);
SHARED StreamKey new_stream(int device);
// The number of a new operation on a stream.
SHARED int64_t advance(StreamKey);
SHARED Clock clock_of(StreamKey);
// Everything in `clock` comes before whatever the stream does from now on; `host_waits`: before whatever anything does.
SHARED void stream_waits(StreamKey, const Clock& clock);
SHARED void host_waits(const Clock& clock);
SHARED bool happened_before(StreamKey observer, StreamKey stream, int64_t operation);
// The host waits for a stream, or with id -1 for all of a device; counted under `reason`, unless an operator runs.
SHARED void synchronize(StreamKey, const char* reason);

// An operator on `stream` reads or writes a tensor: reported as a race if another stream's access of the same bytes is
// neither before nor after it.
SHARED void access(const at::Tensor&, bool write, StreamKey stream, const std::string& operation);
// Whether an operator of the CPU is being run for one of the device: what it copies is no copy between devices.
SHARED extern thread_local bool inside_operator;

// One access of a range of bytes; memory.cpp and pinned.cpp keep them with each block.
struct Access {
  uintptr_t begin, end;
  bool write;
  StreamKey stream;
  int64_t operation;
  std::string name;
};

// A copy to pinned memory happens when the host has waited for it, and the memory holds NaN until then. One from pinned
// memory is done at once, and a race is reported if the memory has changed before the host has waited for it.
SHARED void copy_later(const at::Tensor& pinned_target, at::Tensor value, StreamKey stream);
SHARED void watch_source(const at::Tensor& pinned_source, StreamKey stream);
// Late copies of these host bytes that are before `stream` happen now.
SHARED void settle(const at::Tensor& host, StreamKey stream);

// --- memory.cpp ------------------------------------------------------------------------------------------------

struct Counter {
  int64_t current = 0, peak = 0, allocated = 0, freed = 0;
  void add(int64_t by) {
    current += by;
    peak = std::max(peak, current);
    (by > 0 ? allocated : freed) += std::abs(by);
  }
};
struct Statistics { Counter allocations, allocated, reserved, requested; int64_t out_of_memory = 0; };
struct HistoryEntry { bool allocation; int device; uintptr_t address; int64_t size; int64_t stream; };
struct LiveBlock { int device; uintptr_t address; int64_t size, requested, stream; };
using MemoryObserver = void (*)(int device, int64_t requested, int64_t total, int64_t free);

// torch's allocator for the device. Blocks are multiples of 512 bytes, reserved memory of 2 MiB.
SHARED c10::Allocator* device_allocator();
SHARED Statistics& statistics(int device);
void set_capacity(int64_t bytes);
SHARED void reset_peaks(int device);
SHARED void empty_cache();
SHARED void limit_memory(int device, double fraction);
SHARED std::pair<int64_t, int64_t> memory_info(int device);  // free, total
SHARED void record_history(bool on);
SHARED std::vector<HistoryEntry> history();
SHARED std::vector<LiveBlock> live_blocks();
SHARED void observe_out_of_memory(MemoryObserver);
// The stream's use of a block is waited for before the block is handed out again.
SHARED void record_stream(const void* address, StreamKey);
SHARED std::vector<Access>* accesses_on_device(const void* address);  // nullptr if no block is there; lock held
SHARED std::recursive_mutex& memory_lock();

// --- pinned.cpp ------------------------------------------------------------------------------------------------

struct PinnedStatistics { Counter active, owned; };
SHARED c10::Allocator* pinned_allocator();
SHARED bool is_pinned(const void*);
SHARED std::vector<Access>* accesses_on_host(const void* address);  // nullptr if it is not pinned; lock held
SHARED PinnedStatistics& pinned_statistics();

// --- random.cpp ------------------------------------------------------------------------------------------------

SHARED const at::Generator& default_generator(int device);
SHARED at::Generator new_generator(int device);
// A CPU generator whose seed follows from the state of a device's; the state moves on.
at::Generator next_generator(const at::Generator&);

// --- operators.cpp ---------------------------------------------------------------------------------------------

// The same bytes as a tensor of the CPU, or a new device tensor with the values of one of the CPU.
SHARED at::Tensor host_view(const at::Tensor&, bool keeps = true);
at::Tensor on_device(const at::Tensor& host, c10::Device);
SHARED void resize_storage(c10::StorageImpl*, int64_t bytes);

// --- cuda/numbers.cpp ------------------------------------------------------------------------------------------

// Round arguments on the stack to TF32 where torch allows it; raise or warn where torch's deterministic mode says so.
void before_kernel(const c10::OperatorHandle&, torch::jit::Stack*);
// Whether results come from atomics: they differ in the last places each time, as `disturb` changes them.
bool has_atomics(const std::string& operation);
void disturb(const at::Tensor&);
// Whether attention gives the same gradients each time.
bool repeats_attention();

}  // namespace softcuda
