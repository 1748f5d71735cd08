#include "callbacks.h"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "gil.h"
#include "in_flight.h"

namespace tpurun {

namespace {

using namespace std::chrono_literals;

constexpr auto kIdle = 5s;        // a thread without work for this long ends
constexpr auto kStopLimit = 5s;   // how long the exit of the interpreter waits for a callback
constexpr int kMaxThreads = 256;  // a program with this many callbacks that wait for each other is broken

class CallbackThreads {
 public:
  void push(InFlight* op) {
    const std::lock_guard lock(mutex_);
    if (stopping_) {
      return;  // leaked on purpose: its tensors need an interpreter
    }
    (last_ == nullptr ? first_ : last_->next) = op;
    last_ = op;
    ++queued_;
    if (queued_ > idle_ && threads_ < kMaxThreads) {
      spawn();
    }
    work_.notify_one();
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
      lock.unlock();
      op->finish();
      lock.lock();
    }
    --threads_;
    ended_.notify_all();
  }

  InFlight* next(std::unique_lock<std::mutex>& lock) {
    ++idle_;
    work_.wait_for(lock, kIdle, [this] { return first_ != nullptr || stopping_; });
    --idle_;
    InFlight* op = first_;
    if (op != nullptr) {
      first_ = op->next;
      last_ = first_ == nullptr ? nullptr : last_;
      --queued_;
    }
    return op;
  }

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable ended_;
  InFlight* first_ = nullptr;
  InFlight* last_ = nullptr;
  int queued_ = 0;
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

void stop_callbacks() {
  without_gil([] { threads().stop(); });
}

bool callbacks_stopped() { return threads().stopped(); }

}  // namespace tpurun
