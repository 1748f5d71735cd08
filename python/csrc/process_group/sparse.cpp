#include "process_group/sparse.h"

#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "interpreter/errors.h"
#include "interpreter/gil.h"
#include "operation/dtype.h"
#include "operation/in_flight.h"

namespace tpurun {

namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Future = c10::ivalue::Future;

constexpr const char* kTitle = "tpu_dist:all_reduce_sparse";
constexpr const char* kName = "all_reduce_sparse";

// A header is what a rank tells the others: its number of values, and the properties that must be the same
// everywhere.
at::Tensor header_of(const at::Tensor& tensor) {
  std::vector<int64_t> header{tensor._nnz(), static_cast<int64_t>(tensor.scalar_type()), tensor.sparse_dim()};
  header.insert(header.end(), tensor.sizes().begin(), tensor.sizes().end());
  return at::tensor(header, at::kLong);
}

// 16-bit floats are added in 32 bits and rounded once, as those of dense tensors are.
at::ScalarType wide(at::ScalarType dtype) { return c10::isReducedFloatingType(dtype) ? at::kFloat : dtype; }

// Runs between the operations on callback threads.
class SparseSum final : public c10d::Work {
 public:
  SparseSum(at::Tensor tensor, int rank, int size, uint32_t sequence, Post post)
      : c10d::Work(rank, c10d::OpType::_ALLREDUCE_SPARSE),
        tensor_(std::move(tensor)),
        own_(tensor_.detach().to(at::kCPU).coalesce()),
        size_(size),
        sequence_(sequence),
        post_(std::move(post)),
        future_(future_of({tensor_})),
        indices_(size),
        values_(size) {}

  void start() {
    auto header = header_of(own_);
    headers_ = at::empty({size_, header.numel()}, at::kLong);
    Operation operation(TPURUN_ALL_GATHER, c10d::OpType::_ALLREDUCE_SPARSE, kTitle);
    operation.shape_of({header}, Shapes::kMustMatch);
    operation.input(header);
    operation.output_parts({headers_}, size_);
    first_ = post_(std::move(operation));
    then(first_->getFuture(), [this] { exchange(); });
  }

  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = without_gil([&] {
      std::unique_lock lock(mutex_);
      const auto is_done = [this] { return completed_; };
      if (timeout == kNoTimeout) {
        cv_.wait(lock, is_done);
        return true;
      }
      return cv_.wait_for(lock, timeout, is_done);
    });
    if (!done) {
      throw CollectiveError(TPURUN_TIMEOUT,
                            c10::str("Timed out after ", timeout.count(), " ms waiting for ", kName), {});
    }
    if (auto error = exception()) {
      std::rethrow_exception(error);
    }
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return {tensor_}; }
  c10::intrusive_ptr<Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return first_->getSequencenumber(); }

 private:
  // Goes on with `step` when `future` is complete; whatever fails ends this work.
  template <class Step>
  void then(const c10::intrusive_ptr<Future>& future, Step step) {
    auto self = c10::intrusive_ptr<SparseSum>::unsafe_reclaim_from_nonowning(this);
    future->addCallback([self, step](Future& done) {
      try {
        done.wait();
        if (done.hasError()) {
          std::rethrow_exception(done.exception_ptr());
        }
        step();
      } catch (...) {
        self->end(std::current_exception());
      }
    });
  }

  void exchange() {
    check_headers();
    for (int other = 0; other < size_; ++other) {
      allocate(other, count_of(other));
    }
    c10::List<c10::intrusive_ptr<Future>> futures(
        c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
    for (int other = 0; other < size_; ++other) {
      for (int part = 0; part < 2 && other != rank_; ++part) {
        if (count_of(other) > 0) {
          futures.push_back(message(TPURUN_RECV, other, part, part == 0 ? indices_[other] : values_[other]));
        }
        if (count_of(rank_) > 0) {
          futures.push_back(message(TPURUN_SEND, other, part, part == 0 ? indices_[rank_] : values_[rank_]));
        }
      }
    }
    then(c10::collectAll(futures), [this] { add(); });
  }

  int64_t count_of(int other) const { return headers_[other][0].item<int64_t>(); }

  void check_headers() const {
    const auto own = headers_[rank_].narrow(0, 1, headers_.size(1) - 1);
    for (int other = 0; other < size_; ++other) {
      TORCH_CHECK_VALUE(headers_[other].narrow(0, 1, headers_.size(1) - 1).equal(own), kName,
                        ": expected the same dtype, sizes and sparse dimensions on all ranks, ranks ", other,
                        " and ", rank_, " differ");
    }
  }

  void allocate(int other, int64_t count) {
    if (other == rank_) {
      indices_[other] = own_._indices().contiguous();
      values_[other] = own_._values().contiguous();
      return;
    }
    auto sizes = own_._values().sizes().vec();
    sizes[0] = count;
    indices_[other] = at::empty({own_.sparse_dim(), count}, at::kLong);
    values_[other] = at::empty(sizes, own_._values().options());
  }

  c10::intrusive_ptr<Future> message(TpurunCollective kind, int other, int part, const at::Tensor& tensor) {
    const bool sends = kind == TPURUN_SEND;
    Operation operation(kind, sends ? c10d::OpType::SEND : c10d::OpType::RECV, kTitle);
    operation.root(other);
    // Programs have no negative tags.
    const uint32_t number = (2 * sequence_ + part) & std::numeric_limits<int32_t>::max();
    operation.tag(std::numeric_limits<int32_t>::min() + static_cast<int32_t>(number));
    sends ? operation.input(tensor) : operation.output(tensor);
    operation.shape_of({tensor}, Shapes::kMayDiffer);
    return post_(std::move(operation))->getFuture();
  }

  // In the order of the ranks, so that all have the same bits.
  void add() {
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto dtype = wide(own_.scalar_type());
    at::Tensor sum;
    for (int other = 0; other < size_; ++other) {
      const auto values = values_[other].to(dtype);
      const auto part = at::_sparse_coo_tensor_unsafe(indices_[other], values, own_.sizes(),
                                                      values.options().layout(at::kSparse), true);
      sum = sum.defined() ? sum.add(part).coalesce() : part;
    }
    tensor_.copy_(sum.to(own_.scalar_type()).to(tensor_.device()));
    end(nullptr);
  }

  void end(std::exception_ptr error) {
    finish(error);
    if (error) {
      future_->setErrorIfNeeded(error);
    } else {
      complete(*future_, {tensor_});
    }
  }

  at::Tensor tensor_;
  at::Tensor own_;
  int size_;
  uint32_t sequence_;
  Post post_;
  c10::intrusive_ptr<Future> future_;
  at::Tensor headers_;
  WorkPtr first_;
  std::vector<at::Tensor> indices_;
  std::vector<at::Tensor> values_;
};

// The fallback of the device would reduce a copy on the CPU that nobody brings home.
std::tuple<std::vector<at::Tensor>, WorkPtr> all_reduce_on_device(
    at::TensorList tensors, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const c10::intrusive_ptr<c10d::ReduceOp>& op, const std::optional<at::Tensor>& sparse_indices,
    bool is_async, int64_t timeout_ms) {
  auto all = tensors.vec();
  c10d::AllreduceOptions options;
  options.reduceOp = *op;
  options.timeout = std::chrono::milliseconds(timeout_ms);
  options.sparseIndices = sparse_indices;
  options.asyncOp = is_async;
  auto work = group->getBackend(c10::DeviceType::PrivateUse1)->allreduce(all, options);
  return {std::move(all), std::move(work)};
}

}  // namespace

TORCH_LIBRARY_IMPL(c10d, SparsePrivateUse1, c10d_ops) { c10d_ops.impl("allreduce_", all_reduce_on_device); }

WorkPtr sum_sparse(const at::Tensor& tensor, const c10d::ReduceOp& op, int rank, int size, uint32_t sequence,
                   Post post) {
  TORCH_CHECK_VALUE(op.op_ == c10d::ReduceOp::SUM, kName, ": expected the reduce op SUM, the only one for ",
                    "sparse tensors, got ", static_cast<int>(op.op_));
  const bool is_reachable = tensor.device().is_cpu() || tensor.device().is_privateuseone();
  TORCH_CHECK_VALUE(is_reachable, kName, ": expected a tensor on cpu or tpu, got one on ", tensor.device());
  auto work = c10::make_intrusive<SparseSum>(tensor, rank, size, sequence, std::move(post));
  work->start();
  return work;
}

}  // namespace tpurun
