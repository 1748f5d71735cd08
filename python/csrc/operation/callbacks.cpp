#include "operation/callbacks.h"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "interpreter/gil.h"
#include "operation/in_flight.h"

namespace tpurun {

namespace {

using namespace std::chrono_literals;

constexpr auto kIdle = 5s;  // a thread without work for this long ends
constexpr auto kPatience =
    50ms;  // a callback that takes longer may be waiting for one that is queued behind it
constexpr auto kStopLimit = 5s;   // how long the exit of the interpreter waits for a callback
constexpr int kMaxThreads = 256;  // a program with this many callbacks that wait for each other is broken

// Whether this thread is inside a callback that holds up others.
thread_local bool has_turn = false;

class CallbackThreads {
 public:
  void push(InFlight* op) {
    const std::lock_guard lock(mutex_);
    if (stopping_) {
      return;  // leaked on purpose: its tensors need an interpreter
    }
    op->next = nullptr;  // it may have been in the queue before
    (last_ == nullptr ? first_ : last_->next) = op;
    last_ = op;
    offer();
  }

  // The calling thread's callback holds up others no longer, or does so again.
  void leave_turn() {
    const std::lock_guard lock(mutex_);
    --turns_;
    offer();
  }

  void retake_turn() {
    const std::lock_guard lock(mutex_);
    ++turns_;
  }

  bool nothing_is_due() {
    const std::lock_guard lock(mutex_);
    return first_ == nullptr && turns_ == 0;
  }

  bool stopped() {
    const std::lock_guard lock(mutex_);
    return stopping_;
  }

  void stop() {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    work_.notify_all();
    ended_.wait_for(lock, kStopLimit, [this] { return threads_ == 0; });
  }

 private:
  // Somebody has to take what is queued, or to see that it is time to.
  void offer() {
    if (first_ == nullptr) {
      return;
    }
    if (idle_ == 0 && threads_ < kMaxThreads) {
      spawn();
    }
    work_.notify_one();
  }

  void spawn() {
    try {
      std::thread([this] { run(); }).detach();
      ++threads_;
    } catch (const std::system_error&) {
      // No thread to be had now: those that exist take the op when they are free.
    }
  }

  void run() {
    pthread_setname_np(pthread_self(), "tpurun-callback");
    std::unique_lock lock(mutex_);
    while (InFlight* op = next(lock)) {
      ++turns_;
      has_turn = true;
      began_ = Clock::now();
      offer();
      lock.unlock();
      op->finish();
      lock.lock();
      has_turn = false;
      --turns_;
      offer();
    }
    --threads_;
    ended_.notify_all();
  }

  // Null when there was nothing to do for long, or all ends and nothing is left.
  InFlight* next(std::unique_lock<std::mutex>& lock) {
    ++idle_;
    const auto idle_until = Clock::now() + kIdle;
    while (!is_next_due() && (first_ != nullptr || (!stopping_ && Clock::now() < idle_until))) {
      work_.wait_until(lock, first_ == nullptr ? idle_until : began_ + kPatience);
    }
    --idle_;
    InFlight* op = is_next_due() ? first_ : nullptr;
    if (op != nullptr) {
      first_ = op->next;
      last_ = first_ == nullptr ? nullptr : last_;
    }
    return op;
  }

  bool is_next_due() const {
    return first_ != nullptr && (turns_ == 0 || Clock::now() >= began_ + kPatience);
  }

  using Clock = std::chrono::steady_clock;

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable ended_;
  InFlight* first_ = nullptr;
  InFlight* last_ = nullptr;
  int turns_ = 0;  // callbacks that run and hold up others
  Clock::time_point began_;
  int idle_ = 0;
  int threads_ = 0;
  bool stopping_ = false;
};

CallbackThreads* threads_of_this_process = nullptr;

// A forked child has none of the threads, and a lock that one of them may have held.
void forget_threads_of_parent() { threads_of_this_process = new CallbackThreads(); }

CallbackThreads& threads() {
  static const bool ready = [] {
    forget_threads_of_parent();
    pthread_atfork(nullptr, nullptr, forget_threads_of_parent);
    return true;
  }();
  static_cast<void>(ready);
  return *threads_of_this_process;
}

}  // namespace

void finish_on_callback_thread(InFlight* op) noexcept { threads().push(op); }

bool no_callback_is_due() { return threads().nothing_is_due(); }

LetOthersCallBack::LetOthersCallBack() {
  if (has_turn) {
    threads().leave_turn();
  }
}

LetOthersCallBack::~LetOthersCallBack() {
  if (has_turn) {
    threads().retake_turn();
  }
}

void stop_callbacks() {
  without_gil([] { threads().stop(); });
}

bool callbacks_stopped() { return threads().stopped(); }

}  // namespace tpurun
