#include "device/special/cells.h"

#include <optional>
#include <tuple>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

namespace tpurun::device {

namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

Tensor with(const Tensor& gates, const MaybeTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

// The last result is what the backward of a fused kernel would read; here nobody does.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& of_input, const Tensor& of_hidden,
                                             const Tensor& cell, const MaybeTensor& input_bias,
                                             const MaybeTensor& hidden_bias) {
  const Tensor gates = with(of_input, input_bias) + with(of_hidden, hidden_bias);
  const auto parts = gates.chunk(4, 1);
  const Tensor next = parts[1].sigmoid() * cell + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * next.tanh(), next, gates};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& of_input, const Tensor& of_hidden, const Tensor& hidden,
                                    const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  const auto ours = with(of_input, input_bias).chunk(3, 1);
  const auto theirs = with(of_hidden, hidden_bias).chunk(3, 1);
  const Tensor reset = (ours[0] + theirs[0]).sigmoid();
  const Tensor kept = (ours[1] + theirs[1]).sigmoid();
  const Tensor fresh = (ours[2] + reset * theirs[2]).tanh();
  return {(hidden - fresh) * kept + fresh, reset};
}

}  // namespace

void register_cells(torch::Library& aten) {
  aten.impl("_thnn_fused_lstm_cell", &lstm_cell);
  aten.impl("_thnn_fused_gru_cell", &gru_cell);
}

}  // namespace tpurun::device
