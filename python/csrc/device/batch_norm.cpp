#include "batch_norm.h"

#include <tuple>
#include <vector>

#include <ATen/AccumulateType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/var_mean.h>

namespace tpurun::device {

namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Statistics are kept in the type that sums are made in.
Tensor wide(const Tensor& tensor) {
  return tensor.to(at::toAccumulateType(tensor.scalar_type(), /*is_cuda=*/true));
}

std::vector<int64_t> all_but_channels(const Tensor& input) {
  std::vector<int64_t> dims;
  for (int64_t dim = 0; dim < input.dim(); ++dim) {
    if (dim != 1) {
      dims.push_back(dim);
    }
  }
  return dims;
}

// One number for each channel, against `input`.
Tensor per_channel(const Tensor& values, const Tensor& input) {
  std::vector<int64_t> shape(input.dim(), 1);
  shape[1] = values.numel();
  return values.view(shape);
}

std::tuple<Tensor, Tensor> stats(const Tensor& input, double eps) {
  auto [var, mean] = at::var_mean(wide(input), all_but_channels(input), /*unbiased=*/false);
  return {mean, at::rsqrt(var + eps)};
}

// Of the ranks' means and variances, by the law of total variance; the running ones are updated in place.
std::tuple<Tensor, Tensor> gather_stats(const Tensor& /*input*/, const Tensor& means, const Tensor& invstds,
                                        const MaybeTensor& running_mean, const MaybeTensor& running_var,
                                        double momentum, double eps, const Tensor& counts) {
  const Tensor weights = counts.to(means.scalar_type()).view({-1, 1});
  const Tensor total = weights.sum();
  const Tensor mean = (means * weights).sum(0) / total;
  const Tensor within = invstds.pow(-2) - eps;
  const Tensor var = ((within + (means - mean).pow(2)) * weights).sum(0) / total;
  if (running_mean && running_mean->defined()) {
    running_mean->mul_(1 - momentum).add_(mean.to(running_mean->scalar_type()), momentum);
  }
  if (running_var && running_var->defined()) {
    const Tensor unbiased = var * total / (total - 1);
    running_var->mul_(1 - momentum).add_(unbiased.to(running_var->scalar_type()), momentum);
  }
  return {mean, at::rsqrt(var + eps)};
}

Tensor normalize(const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias, const Tensor& mean,
                 const Tensor& invstd, double /*eps*/) {
  Tensor result = (wide(input) - per_channel(mean, input)) * per_channel(invstd, input);
  if (weight && weight->defined()) {
    result = result * per_channel(*weight, input);
  }
  if (bias && bias->defined()) {
    result = result + per_channel(*bias, input);
  }
  return result.to(input.scalar_type());
}

// The sums that the ranks add up for the gradient of the input, and the gradients of weight and bias.
std::tuple<Tensor, Tensor, Tensor, Tensor> reduce(const Tensor& grad, const Tensor& input, const Tensor& mean,
                                                  const Tensor& invstd, const MaybeTensor& weight,
                                                  bool for_input, bool for_weight, bool for_bias) {
  const auto dims = all_but_channels(input);
  const Tensor dy = wide(grad);
  const Tensor sum = dy.sum(dims);
  const Tensor sum_centred = (dy * (wide(input) - per_channel(mean, input))).sum(dims);
  const auto dtype = weight && weight->defined() ? weight->scalar_type() : sum.scalar_type();
  return {for_input ? sum : Tensor(), for_input ? sum_centred : Tensor(),
          for_weight ? (sum_centred * invstd).to(dtype) : Tensor(), for_bias ? sum.to(dtype) : Tensor()};
}

// Ioffe & Szegedy, "Batch Normalization" (2015), section 3, with the sums of all ranks.
Tensor gradient(const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& invstd,
                const MaybeTensor& weight, const Tensor& sum, const Tensor& sum_centred,
                const Tensor& counts) {
  const Tensor total = counts.sum().to(sum.scalar_type());
  const Tensor centred = wide(input) - per_channel(mean, input);
  const Tensor slope = sum_centred / total * invstd.pow(2);
  Tensor result = wide(grad) - per_channel(sum / total, input) - centred * per_channel(slope, input);
  result = result * per_channel(invstd, input);
  if (weight && weight->defined()) {
    result = result * per_channel(*weight, input);
  }
  return result.to(input.scalar_type());
}

}  // namespace

void register_batch_norm(torch::Library& aten) {
  aten.impl("batch_norm_stats", &stats);
  aten.impl("batch_norm_gather_stats_with_counts", &gather_stats);
  aten.impl("batch_norm_elemt", &normalize);
  aten.impl("batch_norm_backward_reduce", &reduce);
  aten.impl("batch_norm_backward_elemt", &gradient);
}

}  // namespace tpurun::device
