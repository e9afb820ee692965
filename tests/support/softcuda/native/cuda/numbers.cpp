// Numbers as CUDA's kernels have them: TF32 in products, atomics that add in another order each time, torch's alerts.
#include "../softcuda.h"
#include <ATen/CPUGeneratorImpl.h>
#include <random>
#include <set>

namespace softcuda {
namespace {
using at::Tensor;
const std::set<std::string> PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"};
// Added by atomics, unless deterministic algorithms are asked for.
const std::set<std::string> ATOMIC = {"aten::index_add", "aten::index_add_", "aten::scatter_add", "aten::scatter_add_"};
// Added by atomics in any case, by the name of CUDA's kernel.
const std::map<std::string, const char*> WITHOUT_ORDER = {
    {"aten::_adaptive_avg_pool2d_backward", "adaptive_avg_pool2d_backward_cuda"},
    {"aten::grid_sampler_2d_backward", "grid_sampler_2d_backward_cuda"},
    {"aten::nll_loss2d_forward", "nll_loss2d_forward_out_cuda_template"},
    {"aten::reflection_pad1d_backward", "reflection_pad1d_backward_out_cuda"},
    {"aten::upsample_bilinear2d_backward", "upsample_bilinear2d_backward_out_cuda"},
};

// The tensor without the last 13 bits of each mantissa.
Tensor in_tf32(const Tensor& tensor) {
  if (tensor.scalar_type() != at::kFloat) return tensor;
  auto host = host_view(tensor).contiguous().clone();
  auto* words = reinterpret_cast<uint32_t*>(host.mutable_data_ptr<float>());
  for (int64_t i = 0; i < host.numel(); i++) words[i] &= ~0x1FFFu;
  return on_device(host, tensor.device());
}
double last_place(at::ScalarType type) {
  return type == at::kDouble ? 0x1p-52 : type == at::kHalf ? 0x1p-10 : type == at::kBFloat16 ? 0x1p-7 : 0x1p-23;
}
// Only where a test asks for it: others compare two runs byte by byte.
bool atomics_differ() { return std::getenv("SOFTCUDA_ATOMICS") != nullptr; }
void check_workspace() {
  auto& torch = at::globalContext();
  auto* chosen = std::getenv("CUBLAS_WORKSPACE_CONFIG");
  if (!torch.deterministicAlgorithms() || (chosen && (!strcmp(chosen, ":4096:8") || !strcmp(chosen, ":16:8")))) return;
  auto text = "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
              "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses CuBLAS and you "
              "have CUDA >= 10.2.";
  TORCH_CHECK(torch.deterministicAlgorithmsWarnOnly(), text);
  TORCH_WARN(text);
}
}  // namespace

bool repeats_attention() { return !atomics_differ() || (at::globalContext().deterministicAlgorithms() && !at::globalContext().deterministicAlgorithmsWarnOnly()); }

void disturb(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_floating_point() || !tensor.numel()) return;
  static std::mt19937_64 order{std::random_device{}()};
  at::AutoDispatchBelowADInplaceOrView no_gradient;
  c10::impl::ExcludeDispatchKeyGuard no_modes(c10::python_ks);
  auto host = host_view(tensor);
  auto steps = at::randint(-8, 9, host.sizes(), at::detail::createCPUGenerator(order()), host.options());
  host.add_(host * steps, last_place(host.scalar_type()));
}

void before_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& name = op.schema().name();
  if (auto found = WITHOUT_ORDER.find(name); found != WITHOUT_ORDER.end()) at::globalContext().alertNotDeterministic(found->second);
  if (!PRODUCTS.count(name)) return;
  check_workspace();
  if (!at::globalContext().allowTF32CuBLAS()) return;
  auto& arguments = op.schema().arguments();
  for (size_t i = name.find("add") == name.npos ? 0 : 1; i < arguments.size(); i++) {  // what is added is no factor
    auto& value = (*stack)[stack->size() - arguments.size() + i];
    bool written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    if (!written && value.isTensor() && is_ours(value.toTensor())) value = in_tf32(value.toTensor());
  }
}

bool has_atomics(const std::string& op) {
  return atomics_differ() && (WITHOUT_ORDER.count(op) || (ATOMIC.count(op) && !at::globalContext().deterministicAlgorithms()));
}
}  // namespace softcuda
