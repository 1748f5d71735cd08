// The sum of sparse tensors over all ranks, made of dense operations: the ranks tell each other how many
// values they have, in the order of the other collectives, and then send each other indices and values, which
// needs no order. Nothing blocks on the way, so that an asynchronous one delays no other operation.
#pragma once

#include <chrono>
#include <functional>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "operation/operation.h"

namespace tpurun {

// Posts an asynchronous operation; called from a callback thread, too.
using Post = std::function<c10::intrusive_ptr<c10d::Work>(Operation)>;

// Replaces the COO tensor `tensor` by the sum. `sequence` tells sparse sums of a group apart and is the same
// on all its ranks.
c10::intrusive_ptr<c10d::Work> sum_sparse(const at::Tensor& tensor, const c10d::ReduceOp& op, int rank,
                                          int size, uint32_t sequence, Post post);

}  // namespace tpurun
