"""Sources of memory events: malloc, the CUDA allocator, a profiler, pinned memory, NVML."""
