// Pinned host memory: rounded up to powers of two, as torch's host allocator does.
#include "softcuda.h"
#include <cstdlib>

namespace softcuda {
namespace {
struct PinnedBlock { int64_t size; std::vector<Access> accesses; };
std::map<uintptr_t, PinnedBlock> pinned_blocks;
PinnedStatistics pinned;

PinnedBlock* find_pinned(const void* address) {
  auto at = pinned_blocks.upper_bound(uintptr_t(address));
  if (at == pinned_blocks.begin() || uintptr_t(address) >= std::prev(at)->first + std::prev(at)->second.size) return nullptr;
  return &std::prev(at)->second;
}
void release_pinned(void* address) {
  std::lock_guard guard(memory_lock());
  auto at = pinned_blocks.find(uintptr_t(address));
  pinned.active.add(-at->second.size);
  pinned.owned.add(-at->second.size);
  pinned_blocks.erase(at);
  free(address);
}
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    require_context(current_device);
    std::lock_guard guard(memory_lock());
    int64_t size = 1;
    while (size < int64_t(bytes)) size <<= 1;
    void* address = aligned_alloc(512, std::max<int64_t>(size, 512));
    TORCH_CHECK(address, "softcuda: the machine has no memory for ", size, " bytes");
    pinned_blocks[uintptr_t(address)] = {size, {}};
    pinned.active.add(size);
    pinned.owned.add(size);
    return {address, address, &release_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} allocator_of_pinned;
}  // namespace

c10::Allocator* pinned_allocator() { return &allocator_of_pinned; }
bool is_pinned(const void* address) { std::lock_guard guard(memory_lock()); return find_pinned(address) != nullptr; }
std::vector<Access>* accesses_on_host(const void* address) { auto* block = find_pinned(address); return block ? &block->accesses : nullptr; }
PinnedStatistics& pinned_statistics() { return pinned; }
}  // namespace softcuda
