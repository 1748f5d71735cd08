// The c10d backend: torch's collectives, checked and forwarded to the engine. No state beyond a handle.
//
// The virtual functions carry the names of torch 2.12; newer versions forward their own names to these.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "abi/tpurun.h"
#include "operation/operation.h"
#include "process_group/abort_hooks.h"
#include "process_group/compat.h"
#include "process_group/timeout_extensions.h"

namespace tpurun {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

class ProcessGroupOptions final : public c10d::Backend::Options {
 public:
  explicit ProcessGroupOptions(std::chrono::milliseconds timeout);
  c10::intrusive_ptr<c10d::Backend::Options> clone() const TPURUN_OVERRIDE_SINCE_2_14;
};

class ProcessGroup final : public c10d::Backend {
 public:
  // Returns when all ranks of the group have come. `global_ranks` are the group's ranks in the world.
  ProcessGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
               const std::vector<int32_t>& global_ranks, const std::string& name,
               std::chrono::milliseconds timeout, uint32_t epoch, bool beyond_job);
  ~ProcessGroup() override;

  // The group of those that are left, of a later epoch, see tpurun_comm_shrink.
  c10::intrusive_ptr<ProcessGroup> survivors(const std::vector<uint32_t>& lost,
                                             std::chrono::milliseconds timeout);
  TpurunMembers members() const;
  TpurunTraffic traffic() const;

  const std::string getBackendName() const override { return "tpu_dist"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void addEphemeralTimeout(const std::chrono::milliseconds& by) TPURUN_OVERRIDE_SINCE_2_14;
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return true; }
  // The group of some of the ranks of this one, which all its members must call; null for the others.
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& opts) override;
  bool supportsShrinking() const TPURUN_OVERRIDE_SINCE_2_14 { return true; }
  // The group of those that are left, see `survivors`; the excluded, by their ranks in it, do not call.
  c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& excluded, int flags,
                                           const c10::intrusive_ptr<Options>& opts)
      TPURUN_OVERRIDE_SINCE_2_14;
#ifdef C10D_BACKEND_HAS_HOOKS
  bool supportsAbortHooks() const override { return true; }
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override { hooks_->add(id, std::move(hook)); }
  void unregisterAbortHook(int64_t id) override { hooks_->remove(id); }
#endif
  // DDP asks for the memory of its buckets, FSDP2 for that of its buffers: other ranks can use it in place.
  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options = {}) override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  uint64_t getSequenceNumberForGroup() override;
  void setSequenceNumberForGroup() override {}
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  // The operations that the collectives below post.
  Operation broadcast_of(const Tensors& tensors, int64_t root) const;
  Operation all_reduce_of(const Tensors& tensors, const c10d::ReduceOp& op) const;
  Operation all_gather_of(const at::Tensor& output, const at::Tensor& input) const;
  Operation reduce_scatter_of(const at::Tensor& output, const at::Tensor& input,
                              const c10d::ReduceOp& op) const;
  Operation all_to_all_of(const at::Tensor& output, const at::Tensor& input,
                          const std::vector<int64_t>& output_splits,
                          const std::vector<int64_t>& input_splits) const;
  static Operation barrier_of();

  // Whether a blocking call needs its Work: in a batch, or to end an extension of its timeout.
  bool needs_works() { return coalesces() || !extensions_.is_empty(); }
  // Posts and blocks until it has ended. For who has no use for a Work, see `needs_works`.
  void run(Operation operation) { run(operation, options_->timeout); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input,
                             const c10d::GatherOptions& opts) TPURUN_OVERRIDE_SINCE_2_14;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_for_all_ranks) override;

 private:
  enum class Call { kBlocking, kAsync };
  struct FreeComm {
    void operator()(TpurunComm* comm) const;
  };
  // Between startCoalescing and endCoalescing of one thread.
  struct Batch {
    std::thread::id thread;
    std::vector<WorkPtr> works;
  };

  ProcessGroup(std::unique_ptr<TpurunComm, FreeComm> comm, const TpurunMembers& members,
               std::chrono::milliseconds timeout);

  template <class Opts>
  WorkPtr post(Operation operation, const Opts& opts) {
    return post(std::move(operation), opts.asyncOp ? Call::kAsync : Call::kBlocking, opts.timeout);
  }
  WorkPtr post(Operation operation, Call call, std::chrono::milliseconds timeout);
  void run(Operation& operation, std::chrono::milliseconds timeout);
  bool coalesces();
  std::string names_of(const std::vector<uint32_t>& world_ranks) const;
  bool is_in_fork() const;
  int checked_rank(const char* op, int64_t rank, const char* role) const;

  c10::intrusive_ptr<ProcessGroupOptions> options_;
  std::shared_ptr<AbortHooks> hooks_ = std::make_shared<AbortHooks>();
  c10::intrusive_ptr<c10d::Store> store_;  // the engine's bootstrap may come back to it
  std::unique_ptr<TpurunComm, FreeComm> comm_;
  std::mutex batch_mutex_;
  std::unique_ptr<Batch> batch_;
  std::atomic<bool> has_batch_{false};  // any thread's
  TimeoutExtensions extensions_;
  std::atomic<uint32_t> sparse_sums_{0};
};

}  // namespace tpurun
