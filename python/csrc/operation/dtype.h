// The words of torch for element types and reductions, in those of the engine.
#pragma once

#include <string>

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "abi/tpurun.h"

namespace tpurun {

// As users write it: "float32".
std::string dtype_name(at::ScalarType dtype);

// `op` is the name shown when the type is refused (TypeError).
TpurunDtype reducible_dtype(at::ScalarType dtype, const char* op);
// For operations that only move elements: also types the engine has no arithmetic for.
TpurunDtype movable_dtype(at::ScalarType dtype, const char* op);

TpurunReduceOp reduce_op(const c10d::ReduceOp& op, const char* name);
// The factor of PREMUL_SUM, 1 for every other reduction.
double premul_factor(const c10d::ReduceOp& op);

}  // namespace tpurun
