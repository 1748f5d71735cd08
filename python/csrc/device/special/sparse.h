// Sparse tensors of the device are made of strided ones of the device, as those of the CPU are of the CPU's.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/SmallVector.h>

namespace tpurun::device {

// Indices and values; compressed and plain indices and values.
using Parts = c10::SmallVector<at::Tensor, 3>;

bool is_sparse(const at::Tensor& tensor);

Parts parts_of(const at::Tensor& sparse);

// A tensor of the layout and shape of `like`, made of other parts, on their device.
at::Tensor sparse_of(const at::Tensor& like, const Parts& parts);

// Gives a sparse tensor the shape of `like` and other parts, if they are others.
void become(const at::Tensor& sparse, const at::Tensor& like, const Parts& parts);

}  // namespace tpurun::device
