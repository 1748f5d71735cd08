#include "device/dispatch/schema.h"

#include <string_view>

#include <ATen/core/jit_type.h>

namespace tpurun::device {

namespace {

Argument::Kind kind_of(const c10::TypePtr& declared) {
  using Kind = Argument::Kind;
  const auto* type = declared.get();
  if (type->kind() == c10::TypeKind::OptionalType) {
    type = type->castRaw<c10::OptionalType>()->getElementType().get();
  }
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return Kind::kTensor;
    case c10::TypeKind::GeneratorType:
      return Kind::kGenerator;
    case c10::TypeKind::DeviceObjType:
      return Kind::kDevice;
    case c10::TypeKind::ListType: {
      const auto* element = type->castRaw<c10::ListType>()->getElementType().get();
      if (element->kind() == c10::TypeKind::TensorType) {
        return Kind::kTensors;
      }
      return element->isSubtypeOf(*c10::OptionalType::ofTensor()) ? Kind::kOptionalTensors : Kind::kOther;
    }
    default:
      return Kind::kOther;
  }
}

}  // namespace

Schema::Schema(const c10::FunctionSchema& schema) : results(schema.returns().size()) {
  for (const auto& argument : schema.arguments()) {
    const auto* alias = argument.alias_info();
    const bool is_written = alias != nullptr && alias->isWrite();
    arguments.push_back({kind_of(argument.real_type()), is_written});
    writes |= is_written;
  }
  copies = schema.name() == "aten::copy_" || schema.name() == "aten::_to_copy" ||
           schema.name() == "aten::copy_sparse_to_sparse_";
  for (const std::string_view prefix : {"aten::empty", "aten::new_empty", "aten::resize", "aten::set_"}) {
    leaves_bytes |= schema.name().compare(0, prefix.size(), prefix) == 0;
  }
  derives = schema.name() == "aten::_sparse_mm_reduce_impl";
}

}  // namespace tpurun::device
