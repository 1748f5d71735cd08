#include "device/special/batch_norm.h"

#include <tuple>
#include <vector>

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/var_mean.h>

namespace tpurun::device {

namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// All dimensions but that of the channels.
std::vector<int64_t> within_channels(const Tensor& input) {
  std::vector<int64_t> dimensions;
  for (int64_t at = 0; at < input.dim(); ++at) {
    if (at != 1) {
      dimensions.push_back(at);
    }
  }
  return dimensions;
}

// One number for each channel, to be broadcast.
Tensor by_channel(const Tensor& numbers, const Tensor& input) {
  std::vector<int64_t> shape(input.dim(), 1);
  shape[1] = input.size(1);
  return numbers.reshape(shape);
}

bool has(const MaybeTensor& tensor) { return tensor && tensor->defined(); }

// 16-bit numbers are added up in 32 bits.
Tensor wide(const Tensor& tensor) { return tensor.to(at::toOpMathType(tensor.scalar_type())); }

Tensor centred(const Tensor& input, const Tensor& mean) { return wide(input) - by_channel(mean, input); }

std::tuple<Tensor, Tensor> stats(const Tensor& input, double eps) {
  const auto [variance, mean] = at::var_mean(wide(input), within_channels(input), at::Scalar(0), false);
  return {mean, at::rsqrt(variance + eps)};
}

// Combines the statistics of several ranks: a row of `means` and `invstds` is one rank, and `counts` says how
// many values of each channel that rank had.
std::tuple<Tensor, Tensor> gather_stats(const Tensor& /*input*/, const Tensor& means, const Tensor& invstds,
                                        const MaybeTensor& running_mean, const MaybeTensor& running_variance,
                                        double momentum, double eps, const Tensor& counts) {
  const Tensor weights = counts.to(means.scalar_type()).unsqueeze(1);
  const Tensor total = weights.sum();
  const Tensor mean = (means * weights).sum(0) / total;
  const Tensor variances = invstds.pow(-2) - eps + (means - mean).square();
  const Tensor variance = (variances * weights).sum(0) / total;
  if (has(running_mean)) {
    Tensor(*running_mean).mul_(1 - momentum).add_(mean, momentum);
  }
  if (has(running_variance)) {
    Tensor(*running_variance).mul_(1 - momentum).add_(variance * (total / (total - 1)), momentum);
  }
  return {mean, at::rsqrt(variance + eps)};
}

Tensor normalise(const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias, const Tensor& mean,
                 const Tensor& invstd, double /*eps*/) {
  Tensor result = centred(input, mean).mul_(by_channel(has(weight) ? invstd * *weight : invstd, input));
  if (has(bias)) {
    result.add_(by_channel(*bias, input));
  }
  return result.to(input.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_sums(const Tensor& gradient, const Tensor& input,
                                                         const Tensor& mean, const Tensor& invstd,
                                                         const MaybeTensor& weight, bool for_input,
                                                         bool for_weight, bool for_bias) {
  const auto dimensions = within_channels(input);
  const Tensor sum = wide(gradient).sum(dimensions);
  const Tensor sum_centred = (wide(gradient) * centred(input, mean)).sum(dimensions);
  const auto dtype = has(weight) ? weight->scalar_type() : input.scalar_type();
  return {for_input ? sum : Tensor(), for_input ? sum_centred : Tensor(),
          for_weight ? (sum_centred * invstd).to(dtype) : Tensor(), for_bias ? sum.to(dtype) : Tensor()};
}

Tensor backward_input(const Tensor& gradient, const Tensor& input, const Tensor& mean, const Tensor& invstd,
                      const MaybeTensor& weight, const Tensor& sum, const Tensor& sum_centred,
                      const Tensor& counts) {
  const Tensor total = counts.sum().to(mean.scalar_type());
  const Tensor slope = invstd.square() * (sum_centred / total);
  const Tensor scale = has(weight) ? invstd * *weight : invstd;
  const Tensor along = centred(input, mean).mul_(by_channel(slope, input));
  const Tensor result = wide(gradient) - by_channel(sum / total, input) - along;
  return (result * by_channel(scale, input)).to(input.scalar_type());
}

}  // namespace

void register_batch_norm(torch::Library& aten) {
  aten.impl("batch_norm_stats", &stats);
  aten.impl("batch_norm_gather_stats_with_counts", &gather_stats);
  aten.impl("batch_norm_elemt", &normalise);
  aten.impl("batch_norm_backward_reduce", &backward_sums);
  aten.impl("batch_norm_backward_elemt", &backward_input);
}

}  // namespace tpurun::device
