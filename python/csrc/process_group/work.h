// The handles that torch gets for posted operations.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "abi/tpurun.h"
#include "device/order/streams.h"
#include "operation/in_flight.h"
#include "operation/operation.h"
#include "process_group/abort_hooks.h"
#include "process_group/compat.h"

namespace tpurun {

// An operation that was done before its post returned.
class FinishedWork final : public c10d::Work {
 public:
  // Starts the profiler's event; `post` runs between this and `finish`.
  FinishedWork(int rank, const Operation& operation, std::chrono::milliseconds timeout);
  void finish(uint64_t seq);

  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  std::exception_ptr exception() const override { return nullptr; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return seq_; }
  std::chrono::milliseconds getTimeout() const TPURUN_OVERRIDE_SINCE_2_14 { return timeout_; }

 private:
  std::vector<at::Tensor> results_;
  std::chrono::milliseconds timeout_;
  uint64_t seq_ = 0;
};

// An operation the engine works on.
class PendingWork final : public c10d::Work {
 public:
  PendingWork(int rank, Operation operation, std::chrono::milliseconds timeout,
              std::shared_ptr<const AbortHooks> hooks);
  ~PendingWork() override;

  // Posts it; throws what the engine refuses.
  void post(TpurunComm* comm, const std::string& site);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  // On device tensors, without a timeout and in Strict, what waits is the current stream.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void wait_on_host(std::chrono::milliseconds timeout);
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return in_flight_->operation().results(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return tpurun_work_seq(handle_); }
  std::chrono::milliseconds getTimeout() const TPURUN_OVERRIDE_SINCE_2_14 { return timeout_; }

 private:
  bool runs_on_stream() const;
  void check_process() const;
  std::shared_ptr<device::streams::Pending> ticket();

  InFlight* in_flight_;
  TpurunWork* handle_ = nullptr;
  std::atomic<bool> was_waited_for_{false};  // by the host
  std::chrono::milliseconds timeout_;
  std::shared_ptr<const AbortHooks> hooks_;
};

// The work that endCoalescing returns. It is done when all of its works are.
class CoalescedWork final : public c10d::Work {
 public:
  CoalescedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace tpurun
