#include "device/dispatch/direct.h"

#include <ATen/Operators.h>

namespace tpurun::device {

namespace {

template <class... Ops>
void add_all(torch::Library& aten) {
  (Direct<Ops>::add_to(aten), ...);
}

namespace ops = at::_ops;

void add_arithmetic(torch::Library& aten) {
  add_all<ops::add_Tensor, ops::add__Tensor, ops::add_out, ops::sub_Tensor, ops::sub__Tensor, ops::sub_out,
          ops::mul_Tensor, ops::mul__Tensor, ops::mul_out, ops::div_Tensor, ops::div__Tensor, ops::div_out,
          ops::rsub_Tensor, ops::rsub_Scalar, ops::pow_Tensor_Scalar, ops::pow__Scalar, ops::maximum,
          ops::minimum, ops::addcmul, ops::addcmul_, ops::addcdiv, ops::addcdiv_, ops::lerp_Scalar,
          ops::lerp__Scalar, ops::lerp_Tensor, ops::lerp__Tensor, ops::fill__Scalar, ops::fill__Tensor,
          ops::zero_, ops::clone, ops::clamp, ops::clamp_, ops::clamp_min, ops::clamp_min_, ops::clamp_max>(
      aten);
}

void add_comparisons(torch::Library& aten) {
  add_all<ops::eq_Tensor, ops::eq_Scalar, ops::ne_Tensor, ops::ne_Scalar, ops::lt_Tensor, ops::lt_Scalar,
          ops::le_Tensor, ops::le_Scalar, ops::gt_Tensor, ops::gt_Scalar, ops::ge_Tensor, ops::ge_Scalar,
          ops::logical_and, ops::logical_or, ops::logical_not, ops::bitwise_and_Tensor,
          ops::bitwise_or_Tensor, ops::bitwise_not, ops::where_self, ops::isnan>(aten);
}

void add_unary(torch::Library& aten) {
  add_all<ops::neg, ops::neg_, ops::abs, ops::exp, ops::exp_, ops::log, ops::log1p, ops::sqrt, ops::sqrt_,
          ops::rsqrt, ops::reciprocal, ops::sin, ops::cos, ops::tanh, ops::tanh_, ops::sigmoid, ops::sigmoid_,
          ops::relu, ops::relu_, ops::gelu, ops::silu, ops::silu_, ops::floor, ops::round, ops::sign,
          ops::erf>(aten);
}

void add_reductions(torch::Library& aten) {
  add_all<ops::sum, ops::sum_dim_IntList, ops::mean, ops::mean_dim, ops::amax, ops::amin, ops::max, ops::min,
          ops::max_dim, ops::min_dim, ops::argmax, ops::any, ops::all, ops::cumsum, ops::linalg_vector_norm,
          ops::_softmax, ops::_softmax_backward_data, ops::_log_softmax, ops::_log_softmax_backward_data>(
      aten);
}

void add_products(torch::Library& aten) {
  add_all<ops::mm, ops::mm_out, ops::addmm, ops::addmm_out, ops::bmm, ops::bmm_out, ops::baddbmm, ops::dot,
          ops::mv, ops::addmv>(aten);
}

void add_indexing(torch::Library& aten) {
  add_all<ops::cat, ops::index_select, ops::gather, ops::scatter__src, ops::scatter_add_,
          ops::masked_fill__Scalar, ops::masked_fill__Tensor, ops::embedding_dense_backward, ops::tril,
          ops::triu>(aten);
}

void add_networks(torch::Library& aten) {
  add_all<ops::threshold_backward, ops::gelu_backward, ops::silu_backward, ops::tanh_backward,
          ops::sigmoid_backward, ops::nll_loss_forward, ops::nll_loss_backward, ops::mse_loss,
          ops::mse_loss_backward, ops::native_layer_norm, ops::native_layer_norm_backward, ops::convolution,
          ops::convolution_backward>(aten);
}

void add_lists(torch::Library& aten) {
  add_all<ops::_foreach_add__Scalar, ops::_foreach_add__List, ops::_foreach_mul_Scalar,
          ops::_foreach_mul__Scalar, ops::_foreach_mul__Tensor, ops::_foreach_mul__List,
          ops::_foreach_div__Scalar, ops::_foreach_div__ScalarList, ops::_foreach_div__List,
          ops::_foreach_lerp__Scalar, ops::_foreach_addcmul__Scalar, ops::_foreach_addcdiv__Scalar,
          ops::_foreach_addcdiv__ScalarList, ops::_foreach_sqrt, ops::_foreach_sqrt_,
          ops::_foreach_norm_Scalar, ops::_foreach_zero_>(aten);
}

}  // namespace

void register_direct(torch::Library& aten) {
  add_arithmetic(aten);
  add_comparisons(aten);
  add_unary(aten);
  add_reductions(aten);
  add_products(aten);
  add_indexing(aten);
  add_networks(aten);
  add_lists(aten);
}

}  // namespace tpurun::device
