// All of libsoftcuda.so in one unit: torch's headers take most of the time, and are read once.
#include "reports.cpp"
#include "order.cpp"
#include "memory.cpp"
#include "pinned.cpp"
#include "random.cpp"
#include "device.cpp"
#include "operators.cpp"
#ifdef SOFTCUDA_NPU
#include "npu/hooks.cpp"
#include "npu/autocast.cpp"
#else
#include "cuda/hooks.cpp"
#include "cuda/attention.cpp"
#endif
