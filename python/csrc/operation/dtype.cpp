#include "operation/dtype.h"

#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/ops/item.h>

namespace tpurun {

namespace {

std::optional<TpurunDtype> engine_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::ScalarType::Bool:
      return TPURUN_BOOL;
    case at::ScalarType::Byte:
      return TPURUN_U8;
    case at::ScalarType::Char:
      return TPURUN_I8;
    case at::ScalarType::UInt16:
      return TPURUN_U16;
    case at::ScalarType::Short:
      return TPURUN_I16;
    case at::ScalarType::UInt32:
      return TPURUN_U32;
    case at::ScalarType::Int:
      return TPURUN_I32;
    case at::ScalarType::UInt64:
      return TPURUN_U64;
    case at::ScalarType::Long:
      return TPURUN_I64;
    case at::ScalarType::Half:
      return TPURUN_F16;
    case at::ScalarType::BFloat16:
      return TPURUN_BF16;
    case at::ScalarType::Float:
      return TPURUN_F32;
    case at::ScalarType::Double:
      return TPURUN_F64;
    case at::ScalarType::Float8_e4m3fn:
      return TPURUN_F8_E4M3FN;
    case at::ScalarType::Float8_e5m2:
      return TPURUN_F8_E5M2;
    case at::ScalarType::Float8_e4m3fnuz:
      return TPURUN_F8_E4M3FNUZ;
    case at::ScalarType::Float8_e5m2fnuz:
      return TPURUN_F8_E5M2FNUZ;
    case at::ScalarType::ComplexFloat:
      return TPURUN_C64;
    case at::ScalarType::ComplexDouble:
      return TPURUN_C128;
    default:
      return std::nullopt;
  }
}

}  // namespace

std::string dtype_name(at::ScalarType dtype) { return std::string(c10::getDtypeNames(dtype).first); }

TpurunDtype reducible_dtype(at::ScalarType dtype, const char* op) {
  const auto known = engine_dtype(dtype);
  TORCH_CHECK_TYPE(known.has_value(), op, ": expected a dtype that can be reduced, got ", dtype_name(dtype));
  return *known;
}

TpurunDtype movable_dtype(at::ScalarType dtype, const char* op) {
  if (const auto known = engine_dtype(dtype)) {
    return *known;
  }
  TORCH_CHECK_TYPE(!c10::isQIntType(dtype), op, ": expected a plain dtype, got ", dtype_name(dtype));
  // Bytes are bytes; the size still keeps most mix-ups apart.
  switch (c10::elementSize(dtype)) {
    case 2:
      return TPURUN_U16;
    case 4:
      return TPURUN_U32;
    default:
      return TPURUN_U8;
  }
}

TpurunReduceOp reduce_op(const c10d::ReduceOp& op, const char* name) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return TPURUN_SUM;
    case c10d::ReduceOp::AVG:
      return TPURUN_AVG;
    case c10d::ReduceOp::PRODUCT:
      return TPURUN_PRODUCT;
    case c10d::ReduceOp::MIN:
      return TPURUN_MIN;
    case c10d::ReduceOp::MAX:
      return TPURUN_MAX;
    case c10d::ReduceOp::BAND:
      return TPURUN_BAND;
    case c10d::ReduceOp::BOR:
      return TPURUN_BOR;
    case c10d::ReduceOp::BXOR:
      return TPURUN_BXOR;
    case c10d::ReduceOp::PREMUL_SUM:
      return TPURUN_PREMUL_SUM;
    default:
      TORCH_CHECK_VALUE(false, name, ": expected a reduce op, got ", static_cast<int>(op.op_));
  }
}

double premul_factor(const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) {
    return 1.0;
  }
  // The name of torch 2.12; newer ones keep it as an alias.
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(supplement != nullptr, "PREMUL_SUM: expected a factor, got none");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>()
                                             : supplement->double_factor;
}

}  // namespace tpurun
