#include "program/fused/layout.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include <c10/util/SmallVector.h>

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

enum class Order { kInOrder, kSwapped, kUnknown };

// Which of two dimensions is the inner one, as the first operand that has a say has it.
Order order_of(c10::ArrayRef<c10::DimVector> strides, c10::IntArrayRef sizes, int64_t inner, int64_t outer) {
  for (const auto& of : strides) {
    const int64_t in = of[static_cast<std::size_t>(inner)];
    const int64_t out = of[static_cast<std::size_t>(outer)];
    if (in == 0 || out == 0) {
      continue;
    }
    if (in != out) {
      return in < out ? Order::kInOrder : Order::kSwapped;
    }
    if (sizes[static_cast<std::size_t>(inner)] > sizes[static_cast<std::size_t>(outer)]) {
      return Order::kSwapped;
    }
  }
  return Order::kUnknown;
}

// ATen sorts dimensions by insertion. Nothing moves when no dimension that is looked at goes before another:
// each is compared to those within it until one of them is known to be within.
bool stays_in_order(c10::ArrayRef<c10::DimVector> strides, c10::IntArrayRef sizes) {
  for (auto outer = static_cast<int64_t>(sizes.size()) - 2; outer >= 0; --outer) {
    for (int64_t inner = outer + 1; inner < static_cast<int64_t>(sizes.size()); ++inner) {
      const Order order = order_of(strides, sizes, inner, outer);
      if (order == Order::kSwapped) {
        return false;
      }
      if (order == Order::kInOrder) {
        break;
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
  c10::SmallVector<c10::DimVector, 4> strides;
  for (const auto* operand : operands) {
    strides.push_back(broadcast_strides(*operand, sizes));
  }
  return stays_in_order(strides, sizes);
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
