// Attention kernels that torch has on CUDA alone: efficient, flash and cudnn, by plain products. And histc of integers.
// Each gives its log-sum-exp and takes that of all keys for the backward, as a ring of ranks needs it.
#include "../softcuda.h"
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

namespace softcuda {
namespace {
using at::Tensor;
using c10::SymInt;
template <class T> using Maybe = std::optional<T>;

struct Shape { double scale; bool causal; double dropout; };
double scale_of(const Tensor& query, Maybe<double> scale) { return scale ? *scale : 1 / std::sqrt(double(query.size(-1))); }

// fp32 copies on the host, keys and values repeated for each query head that shares them.
Tensor wide(const Tensor& tensor) { auto host = host_view(tensor); return host.scalar_type() == at::kDouble ? host : host.to(at::kFloat); }
Tensor repeated(const Tensor& tensor, int64_t heads) {
  return tensor.size(1) == heads ? tensor : tensor.repeat_interleave(heads / tensor.size(1), 1);
}
Tensor summed(const Tensor& gradient, int64_t heads) {
  if (gradient.size(1) == heads) return gradient;
  return gradient.reshape({gradient.size(0), heads, gradient.size(1) / heads, gradient.size(2), gradient.size(3)}).sum(2);
}
Tensor scores_of(const Tensor& query, const Tensor& key, const Tensor& bias, const Shape& shape) {
  auto scores = at::matmul(query * shape.scale, key.transpose(-1, -2));
  if (bias.defined()) scores = bias.scalar_type() == at::kBool ? scores.masked_fill(host_view(bias).logical_not(), -INFINITY) : scores + wide(bias);
  if (shape.causal) scores = scores.masked_fill(at::ones({scores.size(-2), scores.size(-1)}, at::kBool).triu(1), -INFINITY);
  return scores;
}
Tensor weights_of(const Tensor& scores, const Tensor& lse) {
  return (scores - lse.masked_fill(lse.isinf(), 0.0).unsqueeze(-1)).exp();
}
struct Dropout {  // the same mask in the forward and the backward, by a seed that travels with the result
  Tensor mask;
  Dropout(const Tensor& like, double p, int64_t seed) {
    if (p > 0) mask = at::empty_like(like).bernoulli_(1 - p, at::detail::createCPUGenerator(seed)) / (1 - p);
  }
  Tensor operator()(const Tensor& weights) const { return mask.defined() ? weights * mask : weights; }
};

struct Forward { Tensor out, lse, seed; };
Forward attend(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, const Shape& shape) {
  at::AutoDispatchBelowAutograd no_gradient;
  auto device = query.device();
  for (auto* other : {&key, &value, &bias})
    TORCH_CHECK(!other->defined() || other->device() == device, "Expected all tensors to be on the same device, but found at least two devices, ", device, " and ", other->device(), "!");
  auto stream = current_stream(device.index());
  for (auto* read : {&query, &key, &value}) access(*read, false, stream, "attention");
  auto heads = query.size(1);
  auto scores = scores_of(wide(query), repeated(wide(key), heads), bias, shape);
  auto lse = at::logsumexp(scores, -1);
  int64_t seed = 0;
  if (shape.dropout > 0) seed = int64_t(next_generator(default_generator(device.index())).current_seed());
  auto out = at::matmul(Dropout(scores, shape.dropout, seed)(weights_of(scores, lse)), repeated(wide(value), heads));
  out = out.to(query.scalar_type()).transpose(1, 2).contiguous();  // as the kernels lay it out: heads beside the width
  return {on_device(out, device).transpose(1, 2), lse, on_device(at::full({}, seed, at::kLong), device)};
}
struct Backward { Tensor query, key, value, bias; };
Backward attend_backward(const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, const Tensor& out,
                         const Tensor& lse, const Tensor& seed, const Shape& shape) {
  at::AutoDispatchBelowAutograd no_gradient;
  auto device = query.device();
  auto stream = current_stream(device.index());
  for (auto* read : {&grad, &query, &key, &value, &out, &lse}) access(*read, false, stream, "attention backward");
  auto heads = query.size(1);
  auto q = wide(query), k = repeated(wide(key), heads), v = repeated(wide(value), heads), g = wide(grad);
  auto weights = weights_of(scores_of(q, k, bias, shape), wide(lse).reshape({q.size(0), heads, -1}).narrow(-1, 0, q.size(2)));
  Dropout dropout(weights, shape.dropout, shape.dropout > 0 ? host_view(seed).reshape({-1})[0].item<int64_t>() : 0);
  auto towards = dropout(at::matmul(g, v.transpose(-1, -2)));
  auto scores = weights * (towards - (g * wide(out)).sum(-1, true));
  auto back = [&](const Tensor& gradient, const Tensor& like) {
    return on_device(summed(gradient, like.size(1)).to(like.scalar_type()).contiguous(), device);
  };
  Tensor of_bias;
  if (bias.defined() && bias.scalar_type() != at::kBool) of_bias = on_device(at::sum_to(scores, bias.sizes()).to(bias.scalar_type()), device);
  return {back(at::matmul(scores, k) * shape.scale, query), back(at::matmul(scores.transpose(-1, -2), q) * shape.scale, key),
          back(at::matmul(dropout(weights).transpose(-1, -2), g), value), of_bias};
}

Tensor or_none(const Maybe<Tensor>& tensor) { return tensor ? *tensor : Tensor(); }
Tensor zeros(c10::Device device, at::IntArrayRef size, at::ScalarType dtype) { return on_device(at::zeros(size, dtype), device); }

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& q, const Tensor& k, const Tensor& v, const Maybe<Tensor>& bias, bool log_sum_exp, double dropout,
                                                     bool causal, Maybe<double> scale) {
  auto [out, lse, seed] = attend(q, k, v, or_none(bias), {scale_of(q, scale), causal, dropout});
  auto rows = q.size(2), padded = log_sum_exp ? (rows + 31) / 32 * 32 : 0;  // the kernel pads rows to a multiple of 32
  auto all = at::full({lse.size(0), lse.size(1), padded}, INFINITY, lse.scalar_type());
  if (padded) all.narrow(-1, 0, rows).copy_(lse);
  return {out, on_device(all, q.device()), seed, zeros(q.device(), {}, at::kLong)};
}
std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, const Tensor& out,
                                                              const Tensor& lse, const Tensor& seed, const Tensor&, double dropout, std::array<bool, 4>, bool causal,
                                                              Maybe<double> scale) {
  auto [gq, gk, gv, gb] = attend_backward(grad, q, k, v, bias, out, lse, seed, {scale_of(q, scale), causal, dropout});
  return {gq, gk, gv, gb};
}
void refuse_wide(const char* name, const Tensor& q) {
  TORCH_CHECK(q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16, name, " only supports fp16 and bf16 data type");
}
std::tuple<Tensor, Tensor, Tensor, Tensor, SymInt, SymInt, Tensor, Tensor, Tensor> flash(const Tensor& q, const Tensor& k, const Tensor& v, double dropout, bool causal,
                                                                                         bool, Maybe<double> scale) {
  refuse_wide("FlashAttention", q);
  auto [out, lse, seed] = attend(q, k, v, {}, {scale_of(q, scale), causal, dropout});
  return {out, on_device(lse, q.device()), Tensor(), Tensor(), q.size(2), k.size(2), seed, zeros(q.device(), {}, at::kLong), zeros(q.device(), {0}, q.scalar_type())};
}
std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse, const Tensor&,
                                                  const Tensor&, SymInt, SymInt, double dropout, bool causal, const Tensor& seed, const Tensor&, Maybe<double> scale) {
  auto [gq, gk, gv, none] = attend_backward(grad, q, k, v, {}, out, lse, seed, {scale_of(q, scale), causal, dropout});
  return {gq, gk, gv};
}
std::tuple<Tensor, Tensor, Tensor, Tensor, SymInt, SymInt, Tensor, Tensor, Tensor> cudnn(const Tensor& q, const Tensor& k, const Tensor& v, const Maybe<Tensor>& bias, bool,
                                                                                         double dropout, bool causal, bool, Maybe<double> scale) {
  refuse_wide("cuDNN attention", q);
  auto [out, lse, seed] = attend(q, k, v, or_none(bias), {scale_of(q, scale), causal, dropout});
  return {out, on_device(lse, q.device()), Tensor(), Tensor(), q.size(2), k.size(2), seed, zeros(q.device(), {}, at::kLong), Tensor()};
}
std::tuple<Tensor, Tensor, Tensor> cudnn_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                                                  const Tensor& seed, const Tensor&, const Tensor& bias, const Tensor&, const Tensor&, SymInt, SymInt, double dropout,
                                                  bool causal, Maybe<double> scale) {
  auto [gq, gk, gv, none] = attend_backward(grad, q, k, v, bias, out, lse, seed, {scale_of(q, scale), causal, dropout});
  return {gq, gk, gv};
}

// Which kernel CUDA takes: flash for 16 bits without a mask, efficient otherwise, products if the user has switched both off.
int64_t choose(const Tensor& q, const Tensor& k, const Tensor& v, const Maybe<Tensor>& mask, double, bool, Maybe<double>, bool) {
  auto& context = at::globalContext();
  bool half = q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16;
  bool fits = q.dim() == 4 && q.size(-1) == v.size(-1) && q.size(-1) % 8 == 0 && q.size(-1) <= 256 && !q.is_nested();
  if (fits && half && !mask && context.userEnabledFlashSDP()) return int64_t(at::SDPBackend::flash_attention);
  if (fits && q.scalar_type() != at::kDouble && q.size(1) == k.size(1) && context.userEnabledMemEfficientSDP()) return int64_t(at::SDPBackend::efficient_attention);
  if (fits && half && !mask && context.userEnabledCuDNNSDP()) return int64_t(at::SDPBackend::cudnn_attention);
  TORCH_CHECK(context.userEnabledMathSDP(), "No available kernel. Aborting execution.");
  return int64_t(at::SDPBackend::math);
}
[[maybe_unused]] const bool CHOICE = [] {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose);
  return true;
}();

Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  auto stream = current_stream(self.device().index());
  access(self, false, stream, "histc");
  auto host = host_view(self);
  auto counts = at::histc(host.is_floating_point() ? host : host.to(at::kDouble), bins, low, high);
  return on_device(counts.to(self.scalar_type()), self.device());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("_scaled_dot_product_efficient_attention", efficient);
  m.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward);
  m.impl("_scaled_dot_product_flash_attention", flash);
  m.impl("_scaled_dot_product_flash_attention_backward", flash_backward);
  m.impl("_scaled_dot_product_cudnn_attention", cudnn);
  m.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward);
  m.impl("_fused_sdp_choice", choose);
  m.impl("histc", histc);
}
}  // namespace
}  // namespace softcuda
