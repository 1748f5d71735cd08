#include "program/fused/layout.h"

#include <algorithm>
#include <cstdint>

namespace tpurun::program::fused {

namespace {

using Operands = c10::ArrayRef<const c10::TensorImpl*>;

// The strides of an operand along the dimensions that it is broadcast to.
c10::DimVector broadcast_strides(const c10::TensorImpl& operand, c10::IntArrayRef sizes) {
  c10::DimVector strides(sizes.size(), 0);
  const auto own = operand.sizes();
  const std::size_t first = sizes.size() - own.size();
  for (std::size_t at = 0; at < own.size(); ++at) {
    const bool is_repeated = own[at] == 1 && sizes[first + at] != 1;
    strides[first + at] = is_repeated ? 0 : operand.strides()[at];
  }
  return strides;
}

// Whether an operand has two dimensions the other way round, as ATen sorts them.
bool has_swapped(c10::IntArrayRef strides, c10::IntArrayRef sizes, std::size_t outer, std::size_t inner) {
  const int64_t in = strides[inner];
  const int64_t out = strides[outer];
  if (in == 0 || out == 0) {
    return false;
  }
  return in > out || (in == out && sizes[inner] > sizes[outer]);
}

// ATen sorts dimensions by the first operand that has a say, and not all of its operations have their
// operands in the order of their arguments: so none may have a pair of dimensions swapped.
bool stays_in_order(c10::IntArrayRef strides, c10::IntArrayRef sizes) {
  for (std::size_t outer = 0; outer < sizes.size(); ++outer) {
    for (std::size_t inner = outer + 1; inner < sizes.size(); ++inner) {
      if (has_swapped(strides, sizes, outer, inner)) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace

bool has_plain_strides(const c10::TensorImpl& tensor) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  int64_t plain = 1;
  for (std::size_t at = sizes.size(); at-- > 0;) {
    if (strides[at] != plain) {
      return false;
    }
    plain *= std::max<int64_t>(sizes[at], 1);
  }
  return true;
}

bool broadcast(Operands operands, c10::DimVector& sizes) {
  sizes.clear();
  for (const auto* operand : operands) {
    const auto own = operand->sizes();
    if (own.size() > sizes.size()) {
      sizes.insert(sizes.begin(), own.size() - sizes.size(), 1);
    }
    const std::size_t first = sizes.size() - own.size();
    for (std::size_t at = 0; at < own.size(); ++at) {
      int64_t& size = sizes[first + at];
      if (size == 1) {
        size = own[at];
      } else if (own[at] != 1 && own[at] != size) {
        return false;
      }
    }
  }
  return true;
}

bool makes_plain_strides(Operands operands, c10::IntArrayRef sizes) {
  const auto is_all = [&](const c10::TensorImpl* operand) {
    return operand->sizes() == sizes && has_plain_strides(*operand);
  };
  if (std::all_of(operands.begin(), operands.end(), is_all)) {
    return true;
  }
  // Operations that copy an operand first keep the strides of its dimensions of one element.
  return std::all_of(operands.begin(), operands.end(), [&](const c10::TensorImpl* operand) {
    const bool is_odd = operand->sizes() == sizes && operand->is_contiguous() && !has_plain_strides(*operand);
    return !is_odd && stays_in_order(broadcast_strides(*operand, sizes), sizes);
  });
}

// Dimensions of one element are left out, as their strides may be any.
bool lie_in_one_order(Operands operands) {
  const c10::TensorImpl& first = *operands.front();
  const auto sizes = first.sizes();
  return first.is_non_overlapping_and_dense() &&
         std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size > 1; }) &&
         std::all_of(operands.begin(), operands.end(), [&](const c10::TensorImpl* operand) {
           return operand->sizes() == sizes && operand->strides() == first.strides();
         });
}

}  // namespace tpurun::program::fused
