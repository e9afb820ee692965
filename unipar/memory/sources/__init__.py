"""Sources of memory events: malloc, the device's allocator, a profiler, pinned memory, NVML."""
