// Products of matrices by the routine of BLAS that ATen calls for them, with the arguments that ATen gives
// it, and so with ATen's bits. ATen's own checks before that call take longer than a small product.
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/core/operator_name.h>
#include <ATen/core/stack.h>

namespace tpurun::program {

class Product {
 public:
  // For the arguments of an operation that is told where to put its result. Nothing where ATen may do
  // something else than one call: other types, dimensions of less than two elements, operands that it copies
  // first.
  static std::optional<Product> of(const c10::OperatorName& op, const torch::jit::Stack& arguments);

  // Multiplies what the tensors hold now. False, and nothing is done, where ATen is asked for faster products
  // with fewer bits, or a tensor has no memory.
  bool run() const;

 private:
  // A matrix as BLAS sees it: by columns, `leading` elements apart, or transposed.
  struct Matrix {
    at::Tensor tensor;
    bool is_transposed = false;
    int leading = 0;
  };
  static std::optional<Matrix> matrix(const at::Tensor& tensor);

  template <class T, class Gemm>
  void multiply(const Gemm& gemm) const;
  void copy_bias() const;

  at::Tensor bias_;  // of one row, or undefined
  Matrix left_;      // of BLAS, which is ATen's right one
  Matrix right_;
  at::Tensor out_;  // by rows
  double alpha_ = 1;
};

}  // namespace tpurun::program
