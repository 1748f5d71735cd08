// Streams and events. Operations run on the calling thread, so a stream is what its collectives have not
// finished yet: who comes next on the stream waits for them, nobody else does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include <c10/core/Stream.h>

namespace tpurun::device::streams {

// Something that a stream has begun and that ends by itself.
class Pending {
 public:
  virtual ~Pending() = default;
  virtual bool is_done() const = 0;
  virtual bool has_failed() const = 0;  // only once it is done
  virtual void wait() = 0;              // throws when it failed
};

// The reason why operations that are deferred run now: another operation comes, memory is looked at or
// counted, a stream or an event is used, the mode changes, another thread records, there is a bound, or the
// process forks.
enum class Cut : uint8_t { kOperation, kMemory, kStream, kMode, kThread, kBound, kFork };
constexpr std::size_t kCuts = 7;

// Operations of any thread that are recorded, to be run together later.
class Deferred {
 public:
  virtual ~Deferred() = default;
  // Throws when they cannot be run; they are kept then.
  virtual void run(Cut why) = 0;
  virtual std::size_t count() = 0;
};

void install(c10::DeviceIndex devices);
// Once.
void set_deferred(Deferred& deferred);
// Says whether there are any. Under a lock of the caller's.
void note_deferred(bool are_there);
// Runs them. Code that needs elements, or waits for begun collectives, calls it first.
void run_deferred(Cut why);
// Runs them before memory is counted. Where they do not fit, what is held is the answer.
void run_deferred_to_count();
std::size_t count_deferred();

c10::Stream default_of(c10::Device device);
c10::Stream create(c10::Device device);  // one of a few, in turn
c10::Stream current(c10::Device device);
c10::Stream exchange(c10::Stream stream);

// Everything that comes next on the stream comes after `pending`.
void add(c10::Stream stream, std::shared_ptr<Pending> pending);
// Adds it to the current streams of `device` and of the current device. A program that never sets its device
// takes the stream of the one for that of the other.
void add_to_current(c10::Device device, const std::shared_ptr<Pending>& pending);
// Runs `then` while the current stream of `device` has begun `pending` and nothing else.
void with_begun(c10::Device device, std::shared_ptr<Pending> pending, const std::function<void()>& then);
// Waits for what this thread's current streams have begun; every operation does, before it begins. All
// indices name one memory, so the current streams of all of them count, whichever device is current.
void settle();
// The same without running what is deferred.
void settle_begun();
// While one lives, operations of this thread wait for nothing: they bring a result to where it belongs, for
// which the streams still wait.
class BringingHome {
 public:
  BringingHome();
  ~BringingHome();
  BringingHome(const BringingHome&) = delete;
  BringingHome& operator=(const BringingHome&) = delete;

 private:
  bool before_;
};

bool is_idle(c10::Stream stream);
void synchronize(c10::Stream stream);
void synchronize_all();

// An event is a copy of what a stream had begun when it was recorded.
void record(void** event, c10::Stream stream);
void wait_for(c10::Stream stream, void* event);
bool is_done(void* event);
void synchronize_event(void* event);
double elapsed_ms(void* from, void* to);
void destroy(void* event) noexcept;

}  // namespace tpurun::device::streams
