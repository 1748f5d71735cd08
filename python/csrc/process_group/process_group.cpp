#include "process_group/process_group.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "device/memory/memory.h"
#include "device/order/streams.h"
#include "interpreter/call_site.h"
#include "interpreter/errors.h"
#include "interpreter/gil.h"
#include "interpreter/interrupts.h"
#include "process_group/shared.h"
#include "process_group/sparse.h"
#include "process_group/store.h"
#include "process_group/work.h"

namespace tpurun {

namespace {

using c10d::OpType;

const at::Tensor& only(const Tensors& tensors, const char* op, const char* what) {
  TORCH_CHECK_VALUE(tensors.size() == 1, op, ": expected one ", what, " tensor, got ", tensors.size());
  return tensors.front();
}

const Tensors& only(const TensorLists& lists, const char* op, const char* what) {
  TORCH_CHECK_VALUE(lists.size() == 1, op, ": expected one list of ", what, " tensors, got ", lists.size());
  return lists.front();
}

void check_one_per_rank(size_t count, int size, const char* op, const char* what) {
  TORCH_CHECK_VALUE(count == static_cast<size_t>(size), op, ": expected ", size, " ", what,
                    " tensors, one per rank, got ", count);
}

void check_not_empty(const Tensors& tensors, const char* op) {
  TORCH_CHECK_VALUE(!tensors.empty(), op, ": expected at least one tensor, got none");
}

void check_pairs(const Tensors& outputs, const Tensors& inputs, const char* op) {
  check_not_empty(inputs, op);
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), op, ": expected ", inputs.size(),
                    " output tensors, one per input, got ", outputs.size());
}

// `whole` has room for exactly one `part` per rank.
void check_whole(const at::Tensor& whole, const at::Tensor& part, int size, const char* op,
                 const char* what) {
  TORCH_CHECK_VALUE(whole.numel() == part.numel() * size, op, ": expected an ", what, " tensor of ",
                    part.numel() * size, " elements (", part.numel(), " for each of ", size, " ranks), got ",
                    whole.numel());
}

void check_same_count(const at::Tensor& tensor, int64_t expected, const char* op, const char* what) {
  TORCH_CHECK_VALUE(tensor.numel() == expected, op, ": expected ", what, " of ", expected,
                    " elements, got one of ", tensor.numel());
}

// How many rows of `tensor` each rank gets: as asked, or equal shares when nothing was asked.
std::vector<int64_t> rows_per_rank(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size,
                                   const char* what) {
  const int64_t rows = tensor.dim() == 0 ? 0 : tensor.size(0);
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % size == 0, "all_to_all: expected the ", what, " to have a multiple of ", size,
                      " rows, got ", rows);
    return std::vector<int64_t>(size, rows / size);
  }
  TORCH_CHECK_VALUE(splits.size() == static_cast<size_t>(size), "all_to_all: expected ", size, " ", what,
                    " split sizes, one per rank, got ", splits.size());
  for (const int64_t split : splits) {
    TORCH_CHECK_VALUE(split >= 0, "all_to_all: expected split sizes of 0 or more, got ", split);
  }
  const auto sum = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  TORCH_CHECK_VALUE(sum == rows, "all_to_all: expected the ", what, " split sizes to add up to its ", rows,
                    " rows, got ", sum);
  return splits;
}

// Ends the wait for the other ranks while a communicator is being made, when a signal handler has raised.
void stop_waiting(void* none, const char* reason, uint64_t bytes) {
  (void)none, (void)reason, (void)bytes;
  tpurun_stop_waiting();
}

int64_t checked_timeout(std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(timeout.count() > 0, "expected a timeout above 0, got ", timeout.count(), " ms");
  return timeout.count();
}

}  // namespace

ProcessGroupOptions::ProcessGroupOptions(std::chrono::milliseconds timeout)
    : c10d::Backend::Options("tpu_dist", timeout) {}

c10::intrusive_ptr<c10d::Backend::Options> ProcessGroupOptions::clone() const {
  return c10::make_intrusive<ProcessGroupOptions>(*this);
}

void ProcessGroup::FreeComm::operator()(TpurunComm* comm) const {
  without_gil([comm] { tpurun_comm_free(comm); });
}

ProcessGroup::ProcessGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                           const std::vector<int32_t>& global_ranks, const std::string& name,
                           std::chrono::milliseconds timeout, uint32_t epoch, bool beyond_job)
    : c10d::Backend(rank, size), options_(c10::make_intrusive<ProcessGroupOptions>(timeout)), store_(store) {
  check_one_per_rank(global_ranks.size(), size, "init_process_group", "global ranks instead of");
  // In the fork of a process that has set its threads, autograd's would all make torch's pool anew at once,
  // which torch does not survive.
  at::init_num_threads();
  TpurunCommConfig config{};
  config.name = name.data();
  config.name_bytes = name.size();
  config.rank = rank;
  config.size = size;
  config.global_ranks = global_ranks.data();
  config.timeout_ms = checked_timeout(timeout);
  config.epoch = epoch;
  config.beyond_job = beyond_job ? 1 : 0;
  config.store = callbacks_of(*store_);
  config.python_threads = python_threads();
  if (size > 1) {
    shared::open();
    device::open_memory();
  }
  TpurunComm* comm = nullptr;
  TpurunError error;
  Interruptible interruptible(nullptr, stop_waiting);
  const auto status = without_gil([&] { return tpurun_comm_create(&config, &comm, &error); });
  comm_.reset(comm);
  interruptible.rethrow(status, error);
  throw_unless_ok(status, error);
  options_->timeout = std::chrono::milliseconds(tpurun_comm_timeout(comm));
  init();
}

ProcessGroup::ProcessGroup(std::unique_ptr<TpurunComm, FreeComm> comm, const TpurunMembers& members,
                           std::chrono::milliseconds timeout)
    : c10d::Backend(static_cast<int>(members.rank), static_cast<int>(members.size)),
      options_(c10::make_intrusive<ProcessGroupOptions>(timeout)),
      comm_(std::move(comm)) {
  init();
}

ProcessGroup::~ProcessGroup() = default;

c10::intrusive_ptr<ProcessGroup> ProcessGroup::survivors(const std::vector<uint32_t>& lost,
                                                         std::chrono::milliseconds timeout) {
  const auto threads = python_threads();
  const int64_t timeout_ms = checked_timeout(timeout);
  TpurunComm* comm = nullptr;
  TpurunError error;
  Interruptible interruptible(nullptr, stop_waiting);
  const auto status = without_gil([&] {
    return tpurun_comm_shrink(comm_.get(), lost.data(), lost.size(), timeout_ms, threads, &comm, &error);
  });
  std::unique_ptr<TpurunComm, FreeComm> owned(comm);
  interruptible.rethrow(status, error);
  throw_unless_ok(status, error);
  TpurunMembers members;
  tpurun_comm_members(comm, &members);
  return c10::intrusive_ptr<ProcessGroup>::unsafe_steal_from_new(
      new ProcessGroup(std::move(owned), members, options_->timeout));
}

TpurunMembers ProcessGroup::members() const {
  TpurunMembers members;
  tpurun_comm_members(comm_.get(), &members);
  return members;
}

TpurunTraffic ProcessGroup::traffic() const {
  TpurunTraffic traffic;
  tpurun_comm_traffic(comm_.get(), &traffic);
  return traffic;
}

c10::intrusive_ptr<c10d::Backend> ProcessGroup::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const std::vector<int>& ranks,
                                                      const c10::intrusive_ptr<Options>& opts) {
  TpurunError error;
  throw_unless_ok(tpurun_comm_check_process(comm_.get(), &error), error);
  const auto own = std::find(ranks.begin(), ranks.end(), rank_);
  if (own == ranks.end()) {
    return nullptr;
  }
  const auto parent = members();
  std::vector<int32_t> global_ranks;
  for (const int rank : ranks) {
    global_ranks.push_back(
        static_cast<int32_t>(parent.global_ranks[checked_rank("split_group", rank, "member")]));
  }
  return c10::make_intrusive<ProcessGroup>(store, static_cast<int>(own - ranks.begin()),
                                           static_cast<int>(ranks.size()), global_ranks, opts->group_name,
                                           opts->timeout, parent.epoch, parent.beyond_job != 0);
}

c10::intrusive_ptr<c10d::Backend> ProcessGroup::shrink(const std::vector<int64_t>& excluded, int /*flags*/,
                                                       const c10::intrusive_ptr<Options>& opts) {
  const auto group = members();
  std::vector<uint32_t> lost;
  for (const int64_t rank : excluded) {
    lost.push_back(group.global_ranks[checked_rank("shrink_group", rank, "excluded")]);
  }
  return survivors(lost, opts ? opts->timeout : options_->timeout);
}

void ProcessGroup::setTimeout(std::chrono::milliseconds timeout) {
  tpurun_comm_set_timeout(comm_.get(), checked_timeout(timeout));
  options_->timeout = timeout;
}

void ProcessGroup::addEphemeralTimeout(const std::chrono::milliseconds& by) {
  TORCH_CHECK_VALUE(by.count() >= 0, "expected a timeout extension of 0 or more, got ", by.count(), " ms");
  extensions_.add(by);
}

uint64_t ProcessGroup::getSequenceNumberForGroup() { return tpurun_comm_seq(comm_.get()); }

c10d::ErrorType ProcessGroup::getError() {
  TpurunError error;
  switch (without_gil([&] { return tpurun_comm_failure(comm_.get(), &error); })) {
    case TPURUN_OK:
      return c10d::ErrorType::SUCCESS;
    case TPURUN_TIMEOUT:
      return c10d::ErrorType::TIMEOUT;
    case TPURUN_RANK_LOST:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

// A fork may leave the groups of the rank, which stay as they are.
bool ProcessGroup::is_in_fork() const {
  TpurunError error;
  return tpurun_comm_check_process(comm_.get(), &error) != TPURUN_OK;
}

void ProcessGroup::abort() {
  if (is_in_fork()) {
    return;
  }
  hooks_->run();
  const std::string reason = "rank " + std::to_string(rank_) + " aborted the process group";
  without_gil([&] { tpurun_comm_abort(comm_.get(), reason.data(), reason.size()); });
}

void ProcessGroup::shutdown() {
  if (is_in_fork()) {
    return;
  }
  // Streams may wait for what would end here.
  device::streams::synchronize_all();
  without_gil([this] { tpurun_comm_shutdown(comm_.get()); });
}

at::Tensor ProcessGroup::allocateTensor(long size, at::TensorOptions options) {
  TORCH_CHECK_VALUE(size >= 0, "allocate_tensor: expected a size of 0 or more, got ", size);
  if (!options.device().is_cpu()) {
    return at::empty({size}, options);
  }
  return shared::empty({size}, c10::typeMetaToScalarType(options.dtype()));
}

void ProcessGroup::startCoalescing() {
  const std::lock_guard lock(batch_mutex_);
  // A batch that an exception left open is dropped; its works were handed out one by one.
  batch_ = std::make_unique<Batch>(Batch{std::this_thread::get_id(), {}});
  has_batch_ = true;
}

WorkPtr ProcessGroup::endCoalescing() {
  std::unique_ptr<Batch> batch;
  {
    const std::lock_guard lock(batch_mutex_);
    batch = std::move(batch_);
    has_batch_ = false;
  }
  TORCH_CHECK_VALUE(batch != nullptr, "endCoalescing: expected startCoalescing before it");
  return c10::make_intrusive<CoalescedWork>(rank_, std::move(batch->works));
}

bool ProcessGroup::coalesces() {
  if (!has_batch_) {
    return false;
  }
  const std::lock_guard lock(batch_mutex_);
  return batch_ && batch_->thread == std::this_thread::get_id();
}

WorkPtr ProcessGroup::post(Operation operation, Call call, std::chrono::milliseconds timeout) {
  if (timeout.count() <= 0) {
    timeout = options_->timeout;
  }
  timeout += extensions_.total();
  const bool batched = coalesces();
  if (call == Call::kBlocking && !batched) {
    auto work = c10::make_intrusive<FinishedWork>(rank_, operation, timeout);
    run(operation, timeout);
    extensions_.began(work);
    work->finish(tpurun_comm_seq(comm_.get()));
    return work;
  }
  if (operation.device()) {
    device::streams::settle();
  }
  auto work = c10::make_intrusive<PendingWork>(rank_, std::move(operation), timeout, hooks_);
  work->post(comm_.get(), call_site());
  extensions_.began(work);
  if (batched) {
    const std::lock_guard lock(batch_mutex_);
    batch_->works.push_back(work);
  }
  return work;
}

void ProcessGroup::run(Operation& operation, std::chrono::milliseconds timeout) {
  if (operation.device()) {
    device::streams::settle();
  }
  const auto [site, threads] = caller();
  TpurunOp record = operation.record(rank_, site, timeout.count());
  record.python_threads = threads;
  TpurunError error;
  TpurunWork* none = nullptr;
  Interruptible interruptible(comm_.get(), [](void* comm, const char* reason, uint64_t bytes) {
    tpurun_comm_abort(static_cast<TpurunComm*>(comm), reason, bytes);
  });
  const auto status = without_gil([&] { return tpurun_post(comm_.get(), &record, &none, &error); });
  if (is_failure(status)) {
    operation.give_up();
    hooks_->run();
  }
  interruptible.rethrow(status, error);
  throw_unless_ok(status, error);
  operation.copy_back();
}

int ProcessGroup::checked_rank(const char* op, int64_t rank, const char* role) const {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size_, op, ": invalid ", role, " rank: expected 0 to ", size_ - 1,
                    ", got ", rank);
  return static_cast<int>(rank);
}

Operation ProcessGroup::broadcast_of(const Tensors& tensors, int64_t root) const {
  Operation operation(TPURUN_BROADCAST, OpType::BROADCAST, "tpu_dist:broadcast");
  const auto& tensor = only(tensors, operation.name(), "input");
  operation.root(checked_rank(operation.name(), root, "root"));
  operation.shape_of(tensors, Shapes::kMustMatch);
  if (root == rank_) {
    operation.input(tensor);
    operation.result(tensor);
  } else {
    operation.output(tensor);
  }
  return operation;
}

WorkPtr ProcessGroup::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  return post(broadcast_of(tensors, opts.rootRank), opts);
}

Operation ProcessGroup::all_reduce_of(const Tensors& tensors, const c10d::ReduceOp& op) const {
  Operation operation(TPURUN_ALL_REDUCE, OpType::ALLREDUCE, "tpu_dist:all_reduce");
  only(tensors, operation.name(), "input");
  operation.shape_of(tensors, Shapes::kMustMatch);
  operation.in_place(tensors);
  operation.reduce_with(op);
  return operation;
}

WorkPtr ProcessGroup::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (only(tensors, "all_reduce", "input").is_sparse()) {
    return allreduce_sparse(tensors, opts);
  }
  return post(all_reduce_of(tensors, opts.reduceOp), opts);
}

WorkPtr ProcessGroup::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const auto& tensor = only(tensors, "all_reduce_sparse", "input");
  const auto timeout = opts.timeout.count() > 0 ? opts.timeout : options_->timeout;
  // The last of its operations may be posted when nobody else has this group any more.
  auto self = c10::intrusive_ptr<ProcessGroup>::unsafe_reclaim_from_nonowning(this);
  auto post_later = [self, timeout, site = call_site()](Operation operation) -> WorkPtr {
    auto work = c10::make_intrusive<PendingWork>(self->rank_, std::move(operation), timeout, self->hooks_);
    work->post(self->comm_.get(), site);
    return work;
  };
  auto work = sum_sparse(tensor, opts.reduceOp, rank_, size_, sparse_sums_++, std::move(post_later));
  if (coalesces()) {
    const std::lock_guard lock(batch_mutex_);
    batch_->works.push_back(work);
  } else if (!opts.asyncOp) {
    work->wait(kNoTimeout);
  }
  return work;
}

WorkPtr ProcessGroup::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  Operation operation(TPURUN_ALL_REDUCE, OpType::ALLREDUCE_COALESCED, "tpu_dist:all_reduce_coalesced");
  check_not_empty(tensors, operation.name());
  operation.shape_of(tensors, Shapes::kMustMatch);
  operation.in_place(tensors);
  operation.reduce_with(opts.reduceOp);
  return post(std::move(operation), opts);
}

WorkPtr ProcessGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  Operation operation(TPURUN_REDUCE, OpType::REDUCE, "tpu_dist:reduce");
  only(tensors, operation.name(), "input");
  operation.root(checked_rank(operation.name(), opts.rootRank, "root"));
  operation.shape_of(tensors, Shapes::kMustMatch);
  if (opts.rootRank == rank_) {
    operation.in_place(tensors);
  } else {
    operation.inputs({tensors});
    operation.result(tensors.front());
  }
  operation.reduce_with(opts.reduceOp);
  return post(std::move(operation), opts);
}

WorkPtr ProcessGroup::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  Operation operation(TPURUN_ALL_GATHER, OpType::ALLGATHER, "tpu_dist:all_gather");
  const auto& input = only(inputs, operation.name(), "input");
  const auto& parts = only(outputs, operation.name(), "output");
  check_one_per_rank(parts.size(), size_, operation.name(), "output");
  operation.shape_of(inputs, Shapes::kMayDiffer);
  operation.input(input);
  operation.outputs_each(parts);
  check_same_count(parts[rank_], input.numel(), operation.name(), "an output for this rank's own input");
  return post(std::move(operation), opts);
}

Operation ProcessGroup::all_gather_of(const at::Tensor& output, const at::Tensor& input) const {
  Operation operation(TPURUN_ALL_GATHER, OpType::_ALLGATHER_BASE, "tpu_dist:all_gather_into_tensor");
  operation.shape_of({input}, Shapes::kMustMatch);
  operation.input(input);
  operation.output_parts({output}, size_);
  check_whole(output, input, size_, operation.name(), "output");
  return operation;
}

WorkPtr ProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::AllgatherOptions& opts) {
  return post(all_gather_of(output, input), opts);
}

WorkPtr ProcessGroup::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) {
  Operation operation(TPURUN_ALL_GATHER, OpType::ALLGATHER_COALESCED, "tpu_dist:all_gather_coalesced");
  check_not_empty(inputs, operation.name());
  TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(size_), operation.name(), ": expected ", size_,
                    " lists of output tensors, one per rank, got ", outputs.size());
  for (const auto& list : outputs) {
    check_pairs(list, inputs, operation.name());
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_same_count(list[i], inputs[i].numel(), operation.name(), "an output");
    }
  }
  operation.shape_of(inputs, Shapes::kMustMatch);
  operation.inputs({inputs});
  operation.outputs(outputs);
  return post(std::move(operation), opts);
}

WorkPtr ProcessGroup::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& opts) {
  Operation operation(TPURUN_ALL_GATHER, OpType::ALLGATHER_INTO_TENSOR_COALESCED,
                      "tpu_dist:all_gather_into_tensor_coalesced");
  check_pairs(outputs, inputs, operation.name());
  operation.shape_of(inputs, Shapes::kMustMatch);
  operation.inputs({inputs});
  operation.output_parts(outputs, size_);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_whole(outputs[i], inputs[i], size_, operation.name(), "output");
  }
  return post(std::move(operation), opts);
}

WorkPtr ProcessGroup::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  Operation operation(TPURUN_GATHER, OpType::GATHER, "tpu_dist:gather");
  const auto& input = only(inputs, operation.name(), "input");
  operation.root(checked_rank(operation.name(), opts.rootRank, "root"));
  operation.shape_of(inputs, Shapes::kMayDiffer);
  operation.input(input);
  if (opts.rootRank == rank_) {
    const auto& parts = only(outputs, operation.name(), "output");
    check_one_per_rank(parts.size(), size_, operation.name(), "output");
    operation.outputs_each(parts);
    check_same_count(parts[rank_], input.numel(), operation.name(), "an output for this rank's own input");
  } else {
    TORCH_CHECK_VALUE(outputs.empty(), "gather: expected no output tensors off the root, got ",
                      outputs.size(), " lists of them");
  }
  return post(std::move(operation), opts);
}

WorkPtr ProcessGroup::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                         const c10d::GatherOptions& opts) {
  Operation operation(TPURUN_GATHER, OpType::GATHER, "tpu_dist:gather_into_tensor");
  operation.root(checked_rank(operation.name(), opts.rootRank, "root"));
  operation.shape_of({input}, Shapes::kMustMatch);
  operation.input(input);
  if (opts.rootRank == rank_) {
    operation.output_parts({output}, size_);
    check_whole(output, input, size_, operation.name(), "output");
  }
  return post(std::move(operation), opts);
}

WorkPtr ProcessGroup::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) {
  Operation operation(TPURUN_SCATTER, OpType::SCATTER, "tpu_dist:scatter");
  const auto& output = only(outputs, operation.name(), "output");
  operation.root(checked_rank(operation.name(), opts.rootRank, "root"));
  operation.shape_of(outputs, Shapes::kMayDiffer);
  if (opts.rootRank == rank_) {
    const auto& parts = only(inputs, operation.name(), "input");
    check_one_per_rank(parts.size(), size_, operation.name(), "input");
    operation.inputs_each(parts);
    check_same_count(output, parts[rank_].numel(), operation.name(), "an output");
  } else {
    TORCH_CHECK_VALUE(inputs.empty(), "scatter: expected no input tensors off the root, got ", inputs.size(),
                      " lists of them");
  }
  operation.output(output);
  return post(std::move(operation), opts);
}

WorkPtr ProcessGroup::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                     const c10d::ReduceScatterOptions& opts) {
  Operation operation(TPURUN_REDUCE_SCATTER, OpType::REDUCE_SCATTER, "tpu_dist:reduce_scatter");
  const auto& output = only(outputs, operation.name(), "output");
  const auto& parts = only(inputs, operation.name(), "input");
  check_one_per_rank(parts.size(), size_, operation.name(), "input");
  operation.shape_of(parts, Shapes::kMustMatch);
  operation.inputs_each(parts);
  operation.output(output);
  check_same_count(output, parts[rank_].numel(), operation.name(), "an output");
  operation.reduce_with(opts.reduceOp);
  return post(std::move(operation), opts);
}

Operation ProcessGroup::reduce_scatter_of(const at::Tensor& output, const at::Tensor& input,
                                          const c10d::ReduceOp& op) const {
  Operation operation(TPURUN_REDUCE_SCATTER, OpType::_REDUCE_SCATTER_BASE, "tpu_dist:reduce_scatter_tensor");
  operation.shape_of({input}, Shapes::kMustMatch);
  operation.input_parts({input}, size_);
  operation.output(output);
  check_whole(input, output, size_, operation.name(), "input");
  operation.reduce_with(op);
  return operation;
}

WorkPtr ProcessGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& opts) {
  return post(reduce_scatter_of(output, input, opts.reduceOp), opts);
}

WorkPtr ProcessGroup::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::ReduceScatterOptions& opts) {
  Operation operation(TPURUN_REDUCE_SCATTER, OpType::REDUCE_SCATTER_TENSOR_COALESCED,
                      "tpu_dist:reduce_scatter_tensor_coalesced");
  check_pairs(outputs, inputs, operation.name());
  operation.shape_of(inputs, Shapes::kMustMatch);
  operation.input_parts(inputs, size_);
  operation.outputs({outputs});
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_whole(inputs[i], outputs[i], size_, operation.name(), "input");
  }
  operation.reduce_with(opts.reduceOp);
  return post(std::move(operation), opts);
}

Operation ProcessGroup::all_to_all_of(const at::Tensor& output, const at::Tensor& input,
                                      const std::vector<int64_t>& output_splits,
                                      const std::vector<int64_t>& input_splits) const {
  Operation operation(TPURUN_ALL_TO_ALL, OpType::ALLTOALL_BASE, "tpu_dist:all_to_all");
  operation.shape_of({input}, Shapes::kMayDiffer);
  operation.input_rows(input, rows_per_rank(input, input_splits, size_, "input"));
  operation.output_rows(output, rows_per_rank(output, output_splits, size_, "output"));
  return operation;
}

WorkPtr ProcessGroup::alltoall_base(at::Tensor& output, at::Tensor& input,
                                    std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                    const c10d::AllToAllOptions& opts) {
  return post(all_to_all_of(output, input, output_splits, input_splits), opts);
}

WorkPtr ProcessGroup::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  Operation operation(TPURUN_ALL_TO_ALL, OpType::ALLTOALL, "tpu_dist:all_to_all");
  check_one_per_rank(inputs.size(), size_, operation.name(), "input");
  check_one_per_rank(outputs.size(), size_, operation.name(), "output");
  operation.shape_of(inputs, Shapes::kMayDiffer);
  operation.inputs_each(inputs);
  operation.outputs_each(outputs);
  return post(std::move(operation), opts);
}

WorkPtr ProcessGroup::send(Tensors& tensors, int destination, int tag) {
  Operation operation(TPURUN_SEND, OpType::SEND, "tpu_dist:send");
  operation.root(checked_rank(operation.name(), destination, "destination"));
  operation.tag(tag);
  operation.input(only(tensors, operation.name(), "input"));
  operation.shape_of(tensors, Shapes::kMayDiffer);
  return post(std::move(operation), Call::kAsync, c10d::kUnsetTimeout);
}

WorkPtr ProcessGroup::recv(Tensors& tensors, int source, int tag) {
  Operation operation(TPURUN_RECV, OpType::RECV, "tpu_dist:recv");
  operation.root(checked_rank(operation.name(), source, "source"));
  operation.tag(tag);
  operation.output(only(tensors, operation.name(), "output"));
  operation.shape_of(tensors, Shapes::kMayDiffer);
  return post(std::move(operation), Call::kAsync, c10d::kUnsetTimeout);
}

WorkPtr ProcessGroup::recvAnysource(Tensors& tensors, int tag) {
  Operation operation(TPURUN_RECV, OpType::RECVANYSOURCE, "tpu_dist:recvAnySource");
  operation.tag(tag);
  operation.output(only(tensors, operation.name(), "output"));
  operation.shape_of(tensors, Shapes::kMayDiffer);
  return post(std::move(operation), Call::kAsync, c10d::kUnsetTimeout);
}

Operation ProcessGroup::barrier_of() { return {TPURUN_BARRIER, OpType::BARRIER, "tpu_dist:barrier"}; }

WorkPtr ProcessGroup::barrier(const c10d::BarrierOptions& opts) { return post(barrier_of(), opts); }

void ProcessGroup::monitoredBarrier(const c10d::BarrierOptions& opts, bool /*wait_for_all_ranks*/) {
  // Every failure of the engine names all the ranks that are missing, so there is nothing else to collect.
  const auto timeout = opts.timeout == c10d::kUnsetTimeout ? options_->timeout : opts.timeout;
  if (timeout.count() <= 0) {
    throw CollectiveError(TPURUN_TIMEOUT,
                          c10::str("Rank ", rank_, " timed out in monitoredBarrier: expected a timeout ",
                                   "above 0, got ", timeout.count(), " ms"),
                          {});
  }
  try {
    post(Operation(TPURUN_BARRIER, OpType::BARRIER, "tpu_dist:monitored_barrier"), Call::kBlocking, timeout);
  } catch (const CollectiveError& error) {
    if (error.status() != TPURUN_TIMEOUT || error.ranks().empty()) {
      throw;
    }
    throw CollectiveError(TPURUN_TIMEOUT,
                          c10::str(error.what(), "; ", names_of(error.ranks()),
                                   " failed to pass monitoredBarrier in ", timeout.count(), " ms"),
                          error.ranks());
  }
}

// In the words of torch's own monitored barrier, by their numbers in this group.
std::string ProcessGroup::names_of(const std::vector<uint32_t>& world_ranks) const {
  const auto group = members();
  const auto* begin = group.global_ranks;
  std::string names = world_ranks.size() == 1 ? "Rank " : "Ranks ";
  for (size_t i = 0; i < world_ranks.size(); ++i) {
    names +=
        (i == 0 ? "" : ", ") + std::to_string(std::find(begin, begin + group.size, world_ranks[i]) - begin);
  }
  return names;
}

}  // namespace tpurun
