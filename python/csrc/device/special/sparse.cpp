#include "device/special/sparse.h"

#include <algorithm>

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <c10/core/DeviceGuard.h>

namespace tpurun::device {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

at::SparseTensorImpl& listed(const at::Tensor& sparse) {
  return *static_cast<at::SparseTensorImpl*>(sparse.unsafeGetTensorImpl());
}

at::SparseCsrTensorImpl& compressed(const at::Tensor& sparse) {
  return *static_cast<at::SparseCsrTensorImpl*>(sparse.unsafeGetTensorImpl());
}

bool are_same(const Parts& ours, const Parts& theirs) {
  return std::equal(ours.begin(), ours.end(), theirs.begin(), theirs.end(),
                    [](const at::Tensor& one, const at::Tensor& other) { return one.is_same(other); });
}

}  // namespace

bool is_sparse(const at::Tensor& tensor) {
  const auto layout = tensor.layout();
  return layout != at::kStrided && layout != at::kMkldnn && layout != at::kJagged;
}

Parts parts_of(const at::Tensor& sparse) {
  if (sparse.is_sparse()) {
    return {listed(sparse).indices(), listed(sparse).values()};
  }
  const auto& impl = compressed(sparse);
  return {impl.compressed_indices(), impl.plain_indices(), impl.values()};
}

at::Tensor sparse_of(const at::Tensor& like, const Parts& parts) {
  const c10::Device device = parts.back().device();
  const c10::DeviceGuard guard(device);
  at::Tensor made;
  if (like.is_sparse()) {
    const auto key = device.is_cpu() ? DispatchKey::SparseCPU : DispatchKey::SparsePrivateUse1;
    made = at::detail::make_tensor<at::SparseTensorImpl>(DispatchKeySet(key), like.dtype());
  } else {
    const auto key = device.is_cpu() ? DispatchKey::SparseCsrCPU : DispatchKey::SparseCsrPrivateUse1;
    made = at::detail::make_tensor<at::SparseCsrTensorImpl>(DispatchKeySet(key), device, like.layout(),
                                                            like.dtype());
  }
  become(made, like, parts);
  return made;
}

void become(const at::Tensor& sparse, const at::Tensor& like, const Parts& parts) {
  const bool is_moved = !are_same(parts_of(sparse), parts);
  if (!like.is_sparse()) {
    if (is_moved || sparse.sizes() != like.sizes()) {
      compressed(sparse).set_member_tensors(parts[0], parts[1], parts[2], like.sizes());
    }
    return;
  }
  auto& impl = listed(sparse);
  const auto& other = listed(like);
  if (impl.sizes() != other.sizes() || impl.sparse_dim() != other.sparse_dim() ||
      impl.dense_dim() != other.dense_dim()) {
    impl.raw_resize_(other.sparse_dim(), other.dense_dim(), other.sizes());
  }
  if (is_moved) {
    impl.set_indices_and_values_unsafe(parts[0], parts[1]);
  }
  if (impl.coalesced() != other.coalesced()) {
    impl.set_coalesced(other.coalesced());
  }
}

}  // namespace tpurun::device
