// What torch asks of an accelerator that is not its own (PrivateUse1), beyond what it asks of any.
#include "../hooks.h"
#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace softcuda {
namespace {
struct NPUHooks final : Hooks<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};
[[maybe_unused]] const bool REGISTERED = [] {
  at::RegisterPrivateUse1HooksInterface(new NPUHooks());
  return true;
}();
}  // namespace
}  // namespace softcuda
