// Shapes of results, and how ATen lays them out, as far as the recorder needs to know.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/DimVector.h>

namespace tpurun::program::fused {

// Whether elements lie one after the other, with exactly the strides that torch gives to a new tensor.
bool has_plain_strides(const c10::TensorImpl& tensor);

// Broadcasts the shapes of operands; false when they do not fit together.
bool broadcast(c10::ArrayRef<const c10::TensorImpl*> operands, c10::DimVector& sizes);

// Whether ATen's iterator gives the result of these operands, broadcast to `sizes`, plain strides.
bool makes_plain_strides(c10::ArrayRef<const c10::TensorImpl*> operands, c10::IntArrayRef sizes);

// Whether they all lie in the same order, without gaps, so that the result does, too, and ATen goes through
// them as they lie.
bool lie_in_one_order(c10::ArrayRef<const c10::TensorImpl*> operands);

}  // namespace tpurun::program::fused
