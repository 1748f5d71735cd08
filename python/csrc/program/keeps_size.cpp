#include "program/keeps_size.h"

#include <algorithm>
#include <array>

namespace tpurun::program {

namespace {

// In order. All are structured kernels, which are given the size of their result before they write to it;
// some others compute in their result and resize it afterwards.
constexpr std::array<std::string_view, 82> kNames = {
    "_log_softmax",
    "_log_softmax_backward_data",
    "_softmax",
    "_softmax_backward_data",
    "acos",
    "add",
    "addcdiv",
    "addcmul",
    "addmm",
    "addmv",
    "amax",
    "amin",
    "argmax",
    "argmin",
    "asin",
    "atan",
    "atan2",
    "baddbmm",
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "bitwise_xor",
    "bmm",
    "cat",
    "ceil",
    "clamp",
    "clamp_max",
    "clamp_min",
    "copysign",
    "cos",
    "cosh",
    "cumprod",
    "cumsum",
    "div",
    "elu",
    "eq",
    "erf",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "fmod",
    "gather",
    "ge",
    "gelu",
    "gelu_backward",
    "gt",
    "hardsigmoid",
    "index_add",
    "le",
    "leaky_relu",
    "lerp",
    "log",
    "log10",
    "log1p",
    "log2",
    "lt",
    "maximum",
    "mean",
    "minimum",
    "mm",
    "mul",
    "ne",
    "neg",
    "pow",
    "reciprocal",
    "remainder",
    "round",
    "rsqrt",
    "scatter",
    "scatter_add",
    "sigmoid",
    "sigmoid_backward",
    "sign",
    "silu",
    "silu_backward",
    "sqrt",
    "sub",
    "sum",
    "tanh",
    "where",
};

}  // namespace

// A softmax of ATen goes through a row for its largest element, for a sum, and last for the result. The
// others go from element to element.
const std::vector<Overwriting>& all_overwriting() {
  static const std::vector<Overwriting> all = {
      {"aten::_log_softmax", {0, -1}, 1},
      {"aten::_log_softmax_backward_data", {0, 1}, 2},
      {"aten::_softmax", {0, -1}, 1},
      {"aten::_softmax_backward_data", {0, 1}, 2},
      {"aten::gelu", {0, -1}, -1},
      {"aten::gelu_backward", {0, 1}, -1},
      {"tpurun_kernel::cross_entropy_backward", {1, -1}, -1},
  };
  return all;
}

const Overwriting* overwriting(std::string_view name) {
  const auto& all = all_overwriting();
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const Overwriting& one) { return one.name == name; });
  return found == all.end() ? nullptr : &*found;
}

bool keeps_size(std::string_view name) {
  if (name.substr(0, kOurKernels.size()) == kOurKernels) {
    return true;
  }
  constexpr std::string_view kAten = "aten::";
  return name.substr(0, kAten.size()) == kAten &&
         std::binary_search(kNames.begin(), kNames.end(), name.substr(kAten.size()));
}

}  // namespace tpurun::program
