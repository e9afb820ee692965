// Operators. Creation, copies and views are here; all others run on the CPU, if CUDA would run them on these tensors.
#include "softcuda.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <set>
#include <torch/library.h>

namespace softcuda {

at::Tensor host_view(const at::Tensor& tensor, bool keeps) {
  if (tensor.is_cpu()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto data = const_cast<void*>(tensor.const_data_ptr());
  auto view = keeps ? at::from_blob(data, tensor.sizes(), tensor.strides(), [storage = tensor.storage()](void*) {}, options)
                    : at::from_blob(data, tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

void resize_storage(c10::StorageImpl* storage, int64_t bytes) {
  c10::DeviceGuard guard(storage->device());
  auto pointer = device_allocator()->allocate(bytes);
  if (auto kept = std::min<size_t>(bytes, storage->nbytes())) memcpy(pointer.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(pointer));
  storage->set_nbytes(size_t(bytes));
}

namespace {
using at::Tensor;
using Sizes = at::IntArrayRef;
template <class T> using Maybe = std::optional<T>;

struct InsideOperator {
  bool before = inside_operator;
  InsideOperator() { inside_operator = true; }
  ~InsideOperator() { inside_operator = before; }
};
c10::Device device_for(Maybe<c10::Device> asked) {
  auto device = asked && asked->has_index() ? *asked : c10::Device(ACCELERATOR, current_device);
  check_index(device.index());
  return device;
}

// --- creation and storage ---------------------------------------------------------------------------------------

constexpr c10::DispatchKeySet DEVICE_KEY(DISPATCH_KEY);

Tensor empty(Sizes size, Maybe<at::ScalarType> dtype, Maybe<at::Layout>, Maybe<c10::Device> device, Maybe<bool>, Maybe<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device_for(device));
  return at::detail::empty_generic(size, device_allocator(), DEVICE_KEY, at::dtype_or_default(dtype), format);
}
Tensor empty_strided(Sizes size, Sizes stride, Maybe<at::ScalarType> dtype, Maybe<at::Layout>, Maybe<c10::Device> device, Maybe<bool>) {
  c10::DeviceGuard guard(device_for(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), DEVICE_KEY, at::dtype_or_default(dtype));
}
const Tensor& resize_(const Tensor& self, Sizes size, Maybe<at::MemoryFormat> format) {
  auto* is = self.unsafeGetTensorImpl();
  is->set_sizes_contiguous(size);
  size_t bytes = (is->storage_offset() + is->numel()) * is->itemsize();
  if (bytes > is->unsafe_storage().nbytes()) resize_storage(is->unsafe_storage().unsafeGetStorageImpl(), bytes);
  if (format && *format != at::MemoryFormat::Preserve) is->empty_tensor_restride(*format);
  return self;
}
Tensor& set_(Tensor& self, at::Storage storage, int64_t offset, Sizes size, Sizes stride) {
  auto* is = self.unsafeGetTensorImpl();
  is->set_storage_keep_dtype(std::move(storage));
  is->set_storage_offset(offset);
  is->set_sizes_and_strides(size, stride.data() || size.empty() ? stride : Sizes(c10::contiguous_strides(size)));
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage storage) {
  int64_t numel = storage.nbytes() / self.itemsize();
  return set_(self, std::move(storage), 0, {numel}, {1});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_empty(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  return set_(self, at::Storage(at::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true), 0, {0}, {1});
}
void record_stream_(Tensor& self, c10::Stream stream) { record_stream(self.storage().data(), {stream.device_index(), stream.id()}); }

// --- copies -----------------------------------------------------------------------------------------------------

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source) || !self.numel()) return self;
  auto target = host_view(self), values = host_view(source);
  if (inside_operator) return target.copy_(values), self;
  auto stream = current_stream(is_ours(self) ? self.device().index() : source.device().index());
  require_context(stream.first);
  bool to_host = self.is_cpu(), to_device = source.is_cpu();
  bool pinned = to_host ? is_pinned(self.const_data_ptr()) : to_device && is_pinned(source.const_data_ptr());
  if (to_host) settle(target, stream);
  if (to_device) settle(values, stream);
  bool late = non_blocking && pinned && (to_host || to_device);
  auto from = to_device ? stream : current_stream(source.device().index());  // CUDA copies on the source's, and both wait
  if (from.first != stream.first) stream_waits(from, clock_of(stream));
  if ((to_host || to_device) && non_blocking && !pinned) report(Finding::unpinned, to_host ? "to the host" : "to the device");
  access(source, false, from, "a copy");
  if (from.first != stream.first) stream_waits(stream, clock_of(from));
  access(self, true, stream, "a copy");
  if (to_host && late) return copy_later(self, values.clone(), stream), self;
  target.copy_(values);
  if (from.first != stream.first) stream_waits(from, clock_of(stream));
  if (to_device && late) watch_source(source, stream);
  else if (to_host) synchronize(stream, "copy to the host");
  else if (to_device) synchronize(stream, pinned ? "copy from the host" : "copy from pageable memory");
  return self;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  at::native::resize_output(target, self.sizes());
  const_cast<Tensor&>(target).copy_(self);
  return target;
}
at::Scalar item(const Tensor& self) {
  auto stream = current_stream(self.device().index());
  access(self, false, stream, "item");
  synchronize(stream, "item");
  return at::_local_scalar_dense(host_view(self));
}

// --- every other operator ---------------------------------------------------------------------------------------

// CUDA kernels whose result has a size that depends on values: the host waits for it.
const std::set<std::string> WAITS = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::equal",
                                     "aten::repeat_interleave"};

bool waits(const std::string& op, const torch::jit::Stack* stack) {
  bool size_given = op == "aten::repeat_interleave" && !stack->back().isNone();
  return WAITS.count(op) && !size_given;
}

struct Argument { std::string name; bool written; std::vector<Tensor> tensors; };

std::vector<Argument> tensor_arguments(const c10::OperatorHandle& op, const torch::jit::Stack* stack) {
  std::vector<Argument> result;
  auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& value = (*stack)[stack->size() - arguments.size() + i];
    auto* alias = arguments[i].alias_info();
    Argument argument{arguments[i].name(), alias && alias->isWrite(), {}};
    if (value.isTensor()) argument.tensors.push_back(value.toTensor());
    else if (value.isTensorList()) argument.tensors = value.toTensorVector();
    else if (value.isOptionalTensorList())
      for (const Maybe<Tensor>& tensor : value.toOptionalTensorList()) argument.tensors.push_back(tensor ? *tensor : Tensor());
    else continue;
    result.push_back(std::move(argument));
  }
  return result;
}

[[noreturn]] void refuse(const std::string& op, c10::Device one, c10::Device other, const std::string& argument) {
  if (other.is_cpu())
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but got ", argument, " is on cpu, different from other tensors on ", one,
                " (when checking argument in method wrapper_", KIND, "_", op, ")");
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ", other, "! (", op, ")");
}

// Tensors of one call must be on one device. Exceptions that CUDA makes: a tensor of the CPU without dimensions is a
// number; indices may be on the CPU. (Those of _foreach without a kernel here are torch's own loops over their lists.)
void check_devices(const std::string& op, const std::vector<Argument>& arguments) {
  bool indexes = op == "aten::index" || op == "aten::index_put_" || op == "aten::index_put" || op == "aten::_index_put_impl_";
  bool numbers = op.find("_fused_adam") == op.npos && op.find("_fused_sgd") == op.npos && op.find("_amp_") == op.npos;
  Maybe<c10::Device> device;
  for (int pass = 0; pass < 2; pass++)  // first those of the device, which say where the kernel runs
    for (auto& argument : arguments)
      for (auto& tensor : argument.tensors) {
        if (!tensor.defined() || argument.name == "lr" || (indexes && argument.name == "indices" && tensor.is_cpu())) continue;
        if (is_ours(tensor) && pass == 0) {
          if (device && *device != tensor.device()) refuse(op, *device, tensor.device(), argument.name);
          device = tensor.device();
        } else if (tensor.is_cpu() && pass == 1 && device && (tensor.dim() > 0 || !numbers))
          refuse(op, *device, tensor.device(), argument.name);
      }
}

// The CPU's default generator in the state that follows from the device's, while an operator without one of its own runs.
struct SeededOperator {
  Tensor before;
  SeededOperator(const c10::OperatorHandle& op, torch::jit::Stack* stack, int device) {
    if (!op.hasTag(at::Tag::nondeterministic_seeded)) return;
    size_t count = op.schema().arguments().size();
    for (size_t i = 0; i < count; i++) {
      auto& value = (*stack)[stack->size() - count + i];
      if (!value.isGenerator()) continue;
      auto generator = value.toGenerator();
      TORCH_CHECK(generator.device().type() == ACCELERATOR, "Expected a '", NAME, "' device type for generator but found 'cpu'");
      value = next_generator(generator);
      return;
    }
    auto cpu = at::detail::getDefaultCPUGenerator();
    before = cpu.get_state();
    cpu.set_state(next_generator(default_generator(device)).get_state());
  }
  ~SeededOperator() {
    if (!before.defined()) return;
    auto cpu = at::detail::getDefaultCPUGenerator();
    cpu.set_state(before);
  }
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& name = op.schema().name();
  auto arguments = tensor_arguments(op, stack);
  if (name.find("_copy_from") == name.npos) check_devices(name, arguments);
  int device = current_device;
  for (auto& argument : arguments)
    for (auto& tensor : argument.tensors)
      if (tensor.defined() && is_ours(tensor)) device = tensor.device().index();
  require_context(device);
  auto stream = current_stream(device);
  bool traced = !inside_operator;
  if (traced)
    for (auto& argument : arguments)
      for (auto& tensor : argument.tensors) access(tensor, argument.written, stream, name);
  if (traced && waits(name, stack)) synchronize(stream, name.c_str() + 6);
  {
    InsideOperator inside;
    SeededOperator seeded(op, stack, device);
    before_kernel(op, stack);
    at::native::cpu_fallback(op, stack, false);
  }
  size_t results = op.schema().returns().size();
  if (has_atomics(name))
    for (size_t i = 0; i < results; i++)
      if (auto& value = (*stack)[stack->size() - results + i]; value.isTensor()) disturb(value.toTensor());
  if (!traced) return;
  for (size_t i = 0; i < results; i++) {
    auto& value = (*stack)[stack->size() - results + i];
    if (value.isTensor()) access(value.toTensor(), true, stream, name);
    else if (value.isTensorList())
      for (auto& tensor : value.toTensorVector()) access(tensor, true, stream, name);
  }
}

TORCH_LIBRARY_IMPL(_, SOFTCUDA_KEY, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }
TORCH_LIBRARY_IMPL(aten, SOFTCUDA_KEY, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_", set_empty);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream_);
  m.impl("copy_", copy_);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
}
}  // namespace

at::Tensor on_device(const at::Tensor& host, c10::Device device) {
  InsideOperator inside;
  auto result = at::empty(host.sizes(), host.options().device(device));
  host_view(result).copy_(host);
  return result;
}
}  // namespace softcuda
