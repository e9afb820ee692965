// Generators. Their numbers are the CPU's, of a seed made from this state; only the state is as CUDA's and an NPU's.
#include "softcuda.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>

namespace softcuda {
namespace {
struct DeviceGenerator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  explicit DeviceGenerator(int device) : GeneratorImpl(c10::Device(ACCELERATOR, device), c10::DispatchKeySet(DISPATCH_KEY)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed; offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { set_current_seed(c10::detail::getNonDeterministicRandom(true)); return seed_; }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK_TYPE(state.device().is_cpu() && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(), "RNG state must be a torch.ByteTensor");
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::TensorOptions().dtype(at::kByte));  // real memory under a FakeTensorMode, too
    auto* words = static_cast<uint64_t*>(state.mutable_data_ptr());
    words[0] = seed_;
    words[1] = offset_;
    return state.getIntrusivePtr();
  }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
};
}  // namespace

at::Generator new_generator(int device) { return at::make_generator<DeviceGenerator>(device); }
const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < MAX_DEVICES; i++) made->push_back(new_generator(i));
    return made;
  }();
  return (*all)[device];
}
at::Generator next_generator(const at::Generator& generator) {
  auto* is = static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl());
  is->offset_ += 4;
  return at::detail::createCPUGenerator((is->seed_ ^ (is->offset_ * 0x9E3779B97F4A7C15ull)) & 0xffffffffffffull);
}
}  // namespace softcuda
