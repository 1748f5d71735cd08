// The gradient of a cross entropy with respect to the scores, from the logarithms of probabilities: what ATen
// computes in two operations, with a tensor of zeros as large as the scores between them. Bits are ATen's:
// the sum of a row of that tensor is its one number.
#include <array>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "program/tiles/functions.h"

namespace tpurun::program {

namespace {

struct Given {
  const at::Tensor& grad;
  const at::Tensor& log_probabilities;
  const at::Tensor& target;
  int64_t reduction;
  int64_t ignored;
  const at::Tensor& total_weight;
};

// The gradient of the number that a row has chosen.
template <class T>
T chosen(const Given& given, int64_t row) {
  const T* grad = given.grad.const_data_ptr<T>();
  switch (given.reduction) {
    case at::Reduction::None:
      return -grad[row * given.grad.stride(0)];
    case at::Reduction::Mean:
      return -*grad / *given.total_weight.const_data_ptr<T>();
    default:
      return -*grad;
  }
}

template <class T>
void row(const Given& given, Kernel kernel, int64_t at, T* out) {
  const int64_t classes = given.log_probabilities.size(1);
  const T* log_probabilities = given.log_probabilities.const_data_ptr<T>() + at * classes;
  const int64_t target = given.target.const_data_ptr<int64_t>()[at];
  const auto compute = [&](T* to, const T* from, int64_t count, double grad, double sum) {
    const std::array<double, 2> numbers = {grad, sum};
    kernel(to, from, nullptr, nullptr, numbers.data(), count, count);
  };
  if (target == given.ignored) {
    return compute(out, log_probabilities, classes, 0, 0);
  }
  TORCH_CHECK_INDEX(target >= 0 && target < classes, "Target ", target, " is out of bounds.");
  const auto grad = static_cast<double>(chosen<T>(given, at));
  // The sum of it and of zeros: a negative zero becomes a zero.
  const double sum = grad + 0.0;
  // It may write where it reads, so the number is kept for the one that differs.
  const T before = log_probabilities[target];
  compute(out, log_probabilities, classes, 0, sum);
  compute(out + target, &before, 1, grad, sum);
}

at::Tensor& backward_out(const at::Tensor& grad, const at::Tensor& log_probabilities,
                         const at::Tensor& target, int64_t reduction, int64_t ignored,
                         const at::Tensor& total_weight, at::Tensor& out) {
  const Given given{grad, log_probabilities, target, reduction, ignored, total_weight};
  const auto dtype = log_probabilities.scalar_type();
  const Kernel kernel = tiles::find(tiles::Function::kLogSoftmaxBackward, dtype).kernel;
  TORCH_CHECK(log_probabilities.dim() == 2 && log_probabilities.is_contiguous() && out.is_contiguous() &&
                  target.is_contiguous() && kernel != nullptr,
              "expected two dimensions in order, of floating point");
  constexpr int64_t kGrain = 32768;
  const int64_t rows = std::max<int64_t>(kGrain / log_probabilities.size(1), 1);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "cross_entropy_backward", [&] {
    auto* to = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, log_probabilities.size(0), rows, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; ++at) {
        row<scalar_t>(given, kernel, at, to + at * log_probabilities.size(1));
      }
    });
  });
  return out;
}

at::Tensor backward(const at::Tensor& grad, const at::Tensor& log_probabilities, const at::Tensor& target,
                    int64_t reduction, int64_t ignored, const at::Tensor& total_weight) {
  at::Tensor out = at::empty_like(log_probabilities);
  return backward_out(grad, log_probabilities, target, reduction, ignored, total_weight, out);
}

TORCH_LIBRARY(tpurun_kernel, kernels) {
  kernels.def(
      "cross_entropy_backward(Tensor grad, Tensor log_probabilities, Tensor target, int reduction, "
      "int ignored, Tensor total_weight) -> Tensor");
  kernels.def(
      "cross_entropy_backward.out(Tensor grad, Tensor log_probabilities, Tensor target, int reduction, "
      "int ignored, Tensor total_weight, *, Tensor(a!) out) -> Tensor(a!)");
}

TORCH_LIBRARY_IMPL(tpurun_kernel, CPU, kernels) {
  kernels.impl("cross_entropy_backward", &backward);
  kernels.impl("cross_entropy_backward.out", &backward_out);
}

}  // namespace

}  // namespace tpurun::program
