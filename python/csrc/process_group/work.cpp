#include "process_group/work.h"

#include <utility>

#include <ATen/core/List.h>

#include "device/order/mode.h"
#include "interpreter/errors.h"
#include "interpreter/gil.h"
#include "interpreter/interrupts.h"

namespace tpurun {

namespace {

// Profilers show the shapes of what goes in; a receive has only what comes out.
const std::vector<at::Tensor>& shown_to_profiler(const Operation& operation) {
  return operation.profiled().empty() ? operation.results() : operation.profiled();
}

// Makes a stream wait for an operation.
class Ticket final : public device::streams::Pending {
 public:
  explicit Ticket(c10::intrusive_ptr<PendingWork> work) : work_(std::move(work)) {}

  bool is_done() const override { return work_->isCompleted(); }
  bool has_failed() const override { return work_->exception() != nullptr; }
  void wait() override { work_->wait_on_host(kNoTimeout); }

 private:
  c10::intrusive_ptr<PendingWork> work_;
};

}  // namespace

FinishedWork::FinishedWork(int rank, const Operation& operation, std::chrono::milliseconds timeout)
    : c10d::Work(rank, operation.type(), operation.title(), shown_to_profiler(operation)),
      results_(operation.results()),
      timeout_(timeout) {}

void FinishedWork::finish(uint64_t seq) {
  seq_ = seq;
  c10d::Work::finish();
}

c10::intrusive_ptr<c10::ivalue::Future> FinishedWork::getFuture() {
  auto future = future_of(results_);
  complete(*future, results_);
  return future;
}

PendingWork::PendingWork(int rank, Operation operation, std::chrono::milliseconds timeout,
                         std::shared_ptr<const AbortHooks> hooks)
    : c10d::Work(rank, operation.type(), operation.title(), shown_to_profiler(operation)),
      in_flight_(new InFlight(std::move(operation))),
      timeout_(timeout),
      hooks_(std::move(hooks)) {
  if (recordFunctionEndCallback_) {
    in_flight_->at_end(std::exchange(recordFunctionEndCallback_, nullptr));
  }
}

PendingWork::~PendingWork() {
  if (handle_ != nullptr) {
    tpurun_work_free(handle_);
  } else {
    in_flight_->release();  // the engine never took its share
  }
  in_flight_->release();
}

void PendingWork::post(TpurunComm* comm, const std::string& site) {
  TpurunOp record = in_flight_->operation().record(rank_, site, timeout_.count());
  record.flags = in_flight_->is_lazy() ? TPURUN_ASYNC | TPURUN_LAZY : TPURUN_ASYNC;
  record.done = &InFlight::done;
  record.done_ctx = in_flight_;
  TpurunError error;
  const auto status = without_gil([&] { return tpurun_post(comm, &record, &handle_, &error); });
  throw_unless_ok(status, error);
}

bool PendingWork::isCompleted() {
  if (tpurun_work_is_done(handle_) == 0) {
    tpurun_work_attend(handle_);  // who asks may ask until it is
    return false;
  }
  if (in_flight_->operation().copies_back() && isSuccess()) {
    in_flight_->copy_back();
  }
  in_flight_->end_event();
  return true;
}

bool PendingWork::isSuccess() const { return tpurun_work_is_done(handle_) != 0 && exception() == nullptr; }

std::exception_ptr PendingWork::exception() const {
  if (tpurun_work_is_done(handle_) == 0) {
    return nullptr;
  }
  TpurunError error;
  try {
    throw_unless_ok(tpurun_work_wait(handle_, 0, 0, &error), error);
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

bool PendingWork::wait(std::chrono::milliseconds timeout) {
  if (timeout == kNoTimeout && runs_on_stream()) {
    device::streams::add_to_current(*in_flight_->operation().device(), ticket());
  } else {
    wait_on_host(timeout);
  }
  return true;
}

// Whether what comes after it on a stream waits for it, and the host need not.
bool PendingWork::runs_on_stream() const {
  return in_flight_->operation().device() && device::eager_mode() == device::EagerMode::kStrict;
}

std::shared_ptr<device::streams::Pending> PendingWork::ticket() {
  return std::make_shared<Ticket>(c10::intrusive_ptr<PendingWork>::reclaim_copy(this));
}

void PendingWork::wait_on_host(std::chrono::milliseconds timeout) {
  TpurunError error;
  const auto threads = tpurun_work_is_done(handle_) == 0 ? python_threads() : 0;
  Interruptible interruptible(handle_, [](void* work, const char* reason, uint64_t bytes) {
    tpurun_work_abort(static_cast<TpurunWork*>(work), reason, bytes);
  });
  const auto status =
      without_gil([&] { return tpurun_work_wait(handle_, timeout.count(), threads, &error); });
  // A wait that is over before the operation is has failed nothing.
  if (tpurun_work_is_done(handle_) != 0) {
    in_flight_->end_event();
    if (is_failure(status)) {
      hooks_->run();
    }
  }
  interruptible.rethrow(status, error);
  throw_unless_ok(status, error);
  was_waited_for_ = true;
  in_flight_->copy_back();
  in_flight_->await_future();
}

// In a fork of the rank nobody records how it ended.
void PendingWork::check_process() const {
  TpurunError error;
  if (tpurun_work_is_done(handle_) != 0 && tpurun_work_wait(handle_, 0, 0, &error) == TPURUN_INVALID_USAGE) {
    throw_unless_ok(TPURUN_INVALID_USAGE, error);
  }
}

int PendingWork::sourceRank() const {
  check_process();
  tpurun_work_attend(handle_);
  return in_flight_->source();
}

c10::intrusive_ptr<c10::ivalue::Future> PendingWork::getFuture() {
  check_process();
  const auto& results = in_flight_->operation().results();
  if (runs_on_stream() && !results.empty()) {
    // As on every accelerator: complete from the start, and whoever uses its value waits on a stream.
    // Callbacks then run where and when they are added, which is in the same order on all ranks.
    auto future = future_of(results);
    tpurun_work_attend(handle_);
    device::streams::with_begun(*in_flight_->operation().device(), ticket(),
                                [&] { complete(*future, results); });
    return future;
  }
  if (tpurun_work_is_done(handle_) != 0) {
    in_flight_->await_record();
  }
  auto future = in_flight_->future(was_waited_for_);
  tpurun_work_attend(handle_);
  return future;
}

CoalescedWork::CoalescedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works)
    : c10d::Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

bool CoalescedWork::isCompleted() {
  for (const auto& work : works_) {
    if (!work->isCompleted()) {
      return false;
    }
  }
  return true;
}

bool CoalescedWork::isSuccess() const {
  for (const auto& work : works_) {
    if (!work->isSuccess()) {
      return false;
    }
  }
  return true;
}

std::exception_ptr CoalescedWork::exception() const {
  for (const auto& work : works_) {
    if (auto error = work->exception()) {
      return error;
    }
  }
  return nullptr;
}

bool CoalescedWork::wait(std::chrono::milliseconds timeout) {
  for (const auto& work : works_) {
    work->wait(timeout);
  }
  return true;
}

std::vector<at::Tensor> CoalescedWork::result() {
  std::vector<at::Tensor> results;
  for (const auto& work : works_) {
    const auto some = work->result();
    results.insert(results.end(), some.begin(), some.end());
  }
  return results;
}

c10::intrusive_ptr<c10::ivalue::Future> CoalescedWork::getFuture() {
  const auto type = c10::ListType::create(c10::TensorType::get());
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(c10::FutureType::create(type));
  for (const auto& work : works_) {
    futures.push_back(work->getFuture());
  }
  return c10::collectAll(futures)->then(
      [results = result()](c10::ivalue::Future& all) {
        if (all.hasError()) {
          std::rethrow_exception(all.exception_ptr());
        }
        return c10::IValue(results);
      },
      type);
}

}  // namespace tpurun
