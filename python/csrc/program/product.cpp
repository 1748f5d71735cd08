#include "program/product.h"

#include <cstring>
#include <limits>
#include <utility>

#include <dlfcn.h>

#include <ATen/Context.h>

namespace tpurun::program {

namespace {

template <class T>
using Gemm = void (*)(const char*, const char*, const int*, const int*, const int*, const T*, const T*,
                      const int*, const T*, const int*, const T*, T*, const int*);

// The routine that ATen itself calls: that of ATen's library, or of one that it needs. Null where its BLAS
// has none of this name.
void* routine(const char* name) {
  Dl_info info;
  const auto* of_aten = reinterpret_cast<const void*>(&at::globalContext);
  if (dladdr(of_aten, &info) == 0) {
    return nullptr;
  }
  void* library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  return library == nullptr ? nullptr : dlsym(library, name);
}

Gemm<float> gemm_of(float /*type*/) {
  static const auto found = reinterpret_cast<Gemm<float>>(routine("sgemm_"));
  return found;
}

Gemm<double> gemm_of(double /*type*/) {
  static const auto found = reinterpret_cast<Gemm<double>>(routine("dgemm_"));
  return found;
}

bool is_there(at::ScalarType type) {
  return (type == at::kFloat && gemm_of(float()) != nullptr) ||
         (type == at::kDouble && gemm_of(double()) != nullptr);
}

bool keeps_all_bits() {
  const auto precision =
      at::globalContext().float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL);
  return precision != at::Float32Precision::BF16 && precision != at::Float32Precision::TF32;
}

bool fits(int64_t number) { return number <= std::numeric_limits<int>::max(); }

}  // namespace

std::optional<Product::Matrix> Product::matrix(const at::Tensor& tensor) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  // The strides of a dimension with one element may be any.
  if (tensor.dim() != 2 || sizes[0] < 2 || sizes[1] < 2 || !fits(sizes[0]) || !fits(sizes[1])) {
    return std::nullopt;
  }
  if (strides[1] == 1 && strides[0] >= sizes[1] && fits(strides[0])) {
    return Matrix{tensor, false, static_cast<int>(strides[0])};
  }
  if (strides[0] == 1 && strides[1] >= sizes[0] && fits(strides[1])) {
    return Matrix{tensor, true, static_cast<int>(strides[1])};
  }
  return std::nullopt;
}

std::optional<Product> Product::of(const c10::OperatorName& op, const torch::jit::Stack& arguments) {
  const bool has_bias = op.name == "aten::addmm";
  if (op.overload_name != "out" || (!has_bias && op.name != "aten::mm")) {
    return std::nullopt;
  }
  Product made;
  const std::size_t first = has_bias ? 1 : 0;
  auto right = matrix(arguments[first].toTensor());
  auto left = matrix(arguments[first + 1].toTensor());
  const auto out = matrix(arguments.back().toTensor());
  if (!left || !right || !out || out->is_transposed || !out->tensor.is_contiguous()) {
    return std::nullopt;
  }
  const at::ScalarType type = out->tensor.scalar_type();
  if (!is_there(type) || left->tensor.scalar_type() != type || right->tensor.scalar_type() != type) {
    return std::nullopt;
  }
  if (has_bias) {
    made.bias_ = arguments[0].toTensor();
    const bool is_row = made.bias_.dim() == 1 && made.bias_.size(0) == out->tensor.size(1) &&
                        made.bias_.stride(0) == 1 && made.bias_.scalar_type() == type;
    if (!is_row || arguments[3].toScalar().toDouble() != 1) {
      return std::nullopt;
    }
    made.alpha_ = arguments[4].toScalar().toDouble();
  }
  made.left_ = std::move(*left);
  made.right_ = std::move(*right);
  made.out_ = out->tensor;
  return made;
}

void Product::copy_bias() const {
  const auto row = static_cast<std::size_t>(out_.size(1)) * out_.itemsize();
  auto* to = static_cast<char*>(out_.mutable_data_ptr());
  const void* from = bias_.const_data_ptr();
  for (int64_t at = 0; at < out_.size(0); ++at) {
    std::memcpy(to + static_cast<std::size_t>(at) * row, from, row);
  }
}

// By columns, the result is the transposed one: of the transposed operands in the other order.
template <class T, class Gemm>
void Product::multiply(const Gemm& gemm) const {
  const auto way = [](const Matrix& matrix) { return matrix.is_transposed ? 't' : 'n'; };
  const char left = way(left_);
  const char right = way(right_);
  const auto m = static_cast<int>(out_.size(1));
  const auto n = static_cast<int>(out_.size(0));
  const auto k = static_cast<int>(right_.tensor.size(1));
  const auto alpha = static_cast<T>(alpha_);
  const T beta = bias_.defined() ? 1 : 0;
  gemm(&left, &right, &m, &n, &k, &alpha, static_cast<const T*>(left_.tensor.const_data_ptr()),
       &left_.leading, static_cast<const T*>(right_.tensor.const_data_ptr()), &right_.leading, &beta,
       static_cast<T*>(out_.mutable_data_ptr()), &m);
}

bool Product::run() const {
  const bool has_memory = left_.tensor.const_data_ptr() != nullptr &&
                          right_.tensor.const_data_ptr() != nullptr &&
                          !(bias_.defined() && bias_.const_data_ptr() == nullptr);
  const bool is_double = out_.scalar_type() == at::kDouble;
  if (!has_memory || !(is_double || keeps_all_bits())) {
    return false;
  }
  if (bias_.defined()) {
    copy_bias();
  }
  if (is_double) {
    multiply<double>(gemm_of(double()));
  } else {
    multiply<float>(gemm_of(float()));
  }
  return true;
}

}  // namespace tpurun::program
