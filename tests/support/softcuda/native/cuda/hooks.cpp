// What torch asks of CUDA beyond what it asks of any accelerator.
#include "../hooks.h"
#include <ATen/detail/CUDAHooksInterface.h>

namespace softcuda {
namespace {
struct CUDAHooks final : Hooks<at::CUDAHooksInterface> {  // torch looks for a class of this name
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return device_count() > 0; }
  bool hasCUDART() const override { return true; }
  c10::DeviceIndex current_device() const override { return softcuda::current_device; }
  int getNumGPUs() const override { return device_count(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  long versionCUDART() const override { return 13000; }
  std::string showConfig() const override { return "an emulated CUDA device"; }
  void deviceSynchronize(c10::DeviceIndex device) const override { softcuda::synchronize({device, -1}, "device"); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace
}  // namespace softcuda
