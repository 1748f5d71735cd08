// CPU tensors in memory that the other ranks of the host map: collectives use them where they are.
#pragma once

#include <ATen/core/Tensor.h>

namespace tpurun::shared {

// Makes this memory ready, before a group tells others of it; nothing where the host or a fork refuses it.
void open();

// A dense CPU tensor, uninitialised; in ordinary memory where there is no other.
at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype);

// Whether all of a tensor's storage is there.
bool is_shared(const at::Tensor& tensor);

}  // namespace tpurun::shared
