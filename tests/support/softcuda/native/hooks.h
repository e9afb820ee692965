// What torch asks of any accelerator; `Interface` is what it asks of one kind.
#pragma once
#include "softcuda.h"

namespace softcuda {

template <class Interface> struct Hooks : Interface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return softcuda::device_count() > 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device = -1) const override { return default_generator(index_of(device)); }
  at::Generator getNewGenerator(c10::DeviceIndex device = -1) const override { return new_generator(index_of(device)); }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(ACCELERATOR, softcuda::current_device); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return has_context(device); }
  c10::DeviceIndex deviceCount() const override { return softcuda::device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return softcuda::current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { check_index(device); softcuda::current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = softcuda::current_device;
    if (device >= 0) setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }

 private:
  static int index_of(c10::DeviceIndex device) { return device < 0 ? softcuda::current_device : device; }
};
}  // namespace softcuda
