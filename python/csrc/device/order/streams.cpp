#include "device/order/streams.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <iterator>
#include <mutex>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include "device/order/guard.h"
#include "interpreter/gil.h"

namespace tpurun::device::streams {

namespace {

using Clock = std::chrono::steady_clock;
using Begun = std::vector<std::shared_ptr<Pending>>;

constexpr c10::StreamId kDefault = 0;
constexpr std::size_t kHandedOut = 32;                // in turn
constexpr c10::StreamId kOfOne = 1 + kHandedOut;      // of `with_begun`
constexpr std::size_t kStreams = 1 + kHandedOut + 1;  // of a device, with the default one

// Entries of the streams of all devices: none is the usual case, and costs one load. Operations that are
// deferred count as `kAnyDeferred` of them.
std::atomic<uint64_t> begun_somewhere{0};
constexpr uint64_t kAnyDeferred = uint64_t{1} << 32;
Deferred* deferred = nullptr;
bool has_noted_deferred = false;

struct State {
  std::mutex mutex;
  Begun begun;
};

struct Device {
  std::array<State, kStreams> streams;
  std::atomic<std::size_t> begun{0};  // entries of all its streams
  std::atomic<std::size_t> handed_out{0};
};

std::vector<Device>* devices = nullptr;

Device& device_of(c10::Stream stream) { return devices->at(static_cast<std::size_t>(stream.device_index())); }

State& state_of(c10::Stream stream) {
  return device_of(stream).streams.at(static_cast<std::size_t>(stream.id()));
}

// Unsigned numbers wrap, so `change` may stand for a negative one.
void count(Device& device, std::size_t change) {
  device.begun.fetch_add(change, std::memory_order_relaxed);
  begun_somewhere.fetch_add(change, std::memory_order_relaxed);
}

thread_local std::vector<c10::StreamId> current_ids;
thread_local bool is_bringing_home = false;
thread_local std::vector<const Pending*> awaited;  // by this thread, the innermost last

c10::Device concrete(c10::Device device) { return device.has_index() ? device : current_device(); }

c10::Stream stream_of(c10::Device device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device, id);
}

void forget(Device& device, State& state, const std::shared_ptr<Pending>& pending) {
  const std::lock_guard<std::mutex> lock(state.mutex);
  const auto found = std::find(state.begun.begin(), state.begun.end(), pending);
  if (found != state.begun.end()) {
    state.begun.erase(found);
    count(device, std::size_t{0} - 1);
  }
}

Begun copy_of(State& state) {
  const std::lock_guard<std::mutex> lock(state.mutex);
  return state.begun;
}

// While one lives, this thread waits for `pending`.
struct Awaiting {
  explicit Awaiting(const Pending& pending) { awaited.push_back(&pending); }
  ~Awaiting() { awaited.pop_back(); }
  Awaiting(const Awaiting&) = delete;
  Awaiting& operator=(const Awaiting&) = delete;
};

// Waits for what a stream has begun. An entry stays until it is over, because another thread may use the
// stream in the meantime. One that failed is forgotten as its error is told; those behind it stay.
void drain(Device& device, State& state) {
  for (const auto& pending : copy_of(state)) {
    // A failed wait runs abort hooks, which may use the device: they do not wait for it again.
    if (std::find(awaited.begin(), awaited.end(), pending.get()) != awaited.end()) {
      continue;
    }
    try {
      const Awaiting awaiting(*pending);
      without_gil([&] { pending->wait(); });
    } catch (...) {
      // Ctrl-C ends a wait, too, and the operation goes on.
      if (pending->is_done()) {
        forget(device, state, pending);
      }
      throw;
    }
    forget(device, state, pending);
  }
}

struct Event {
  Begun begun;
  Clock::time_point at;
};

}  // namespace

void install(c10::DeviceIndex count) { devices = new std::vector<Device>(static_cast<std::size_t>(count)); }

c10::Stream default_of(c10::Device device) { return stream_of(concrete(device), kDefault); }

c10::Stream create(c10::Device device) {
  device = concrete(device);
  const std::size_t turn = devices->at(static_cast<std::size_t>(device.index())).handed_out.fetch_add(1);
  return stream_of(device, static_cast<c10::StreamId>(1 + turn % kHandedOut));
}

c10::Stream current(c10::Device device) {
  device = concrete(device);
  const auto at = static_cast<std::size_t>(device.index());
  return stream_of(device, at < current_ids.size() ? current_ids[at] : kDefault);
}

c10::Stream exchange(c10::Stream stream) {
  const auto before = current(stream.device());
  if (stream != before) {
    run_deferred(Cut::kStream);
  }
  const auto at = static_cast<std::size_t>(stream.device_index());
  if (current_ids.size() <= at) {
    current_ids.resize(at + 1, kDefault);
  }
  current_ids[at] = stream.id();
  return before;
}

void add(c10::Stream stream, std::shared_ptr<Pending> pending) {
  auto& state = state_of(stream);
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (std::find(state.begun.begin(), state.begun.end(), pending) != state.begun.end()) {
    return;
  }
  // Operations that are over are dropped here, because nobody else drops them on a stream that nothing else
  // runs on. Failures are kept until somebody is told of them.
  const auto is_over = [](const auto& one) { return one->is_done() && !one->has_failed(); };
  const auto before = state.begun.size();
  state.begun.erase(std::remove_if(state.begun.begin(), state.begun.end(), is_over), state.begun.end());
  state.begun.push_back(std::move(pending));
  count(device_of(stream), state.begun.size() - before);
}

void add_to_current(c10::Device device, const std::shared_ptr<Pending>& pending) {
  add(current(device), pending);
  if (device.has_index() && device != current_device()) {
    add(current(current_device()), pending);
  }
}

void with_begun(c10::Device device, std::shared_ptr<Pending> pending, const std::function<void()>& then) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  const auto stream = stream_of(concrete(device), kOfOne);
  // Also when `then` throws.
  struct Borrowed {
    explicit Borrowed(c10::Stream stream) : stream(stream), before(exchange(stream)) {}
    ~Borrowed() {
      exchange(before);
      for (const auto& pending : copy_of(state_of(stream))) {
        forget(device_of(stream), state_of(stream), pending);
      }
    }
    c10::Stream stream;
    c10::Stream before;
  } borrowed(stream);
  add(stream, std::move(pending));
  then();
}

BringingHome::BringingHome() : before_(std::exchange(is_bringing_home, true)) {}
BringingHome::~BringingHome() { is_bringing_home = before_; }

void set_deferred(Deferred& all) { deferred = &all; }

void note_deferred(bool are_there) {
  if (are_there != has_noted_deferred) {
    has_noted_deferred = are_there;
    begun_somewhere.fetch_add(are_there ? kAnyDeferred : uint64_t{0} - kAnyDeferred,
                              std::memory_order_relaxed);
  }
}

void run_deferred(Cut why) {
  if (C10_UNLIKELY(begun_somewhere.load(std::memory_order_relaxed) >= kAnyDeferred)) {
    deferred->run(why);
  }
}

void run_deferred_to_count() {
  try {
    run_deferred(Cut::kMemory);
  } catch (const c10::OutOfMemoryError&) {
    // The operation that wants an element says so.
  }
}

std::size_t count_deferred() { return deferred == nullptr ? 0 : deferred->count(); }

void settle() {
  if (begun_somewhere.load(std::memory_order_relaxed) == 0) {
    return;
  }
  run_deferred(Cut::kOperation);
  settle_begun();
}

void settle_begun() {
  if (begun_somewhere.load(std::memory_order_relaxed) % kAnyDeferred == 0 || is_bringing_home) {
    return;
  }
  for (std::size_t index = 0; index < devices->size(); ++index) {
    auto& device = (*devices)[index];
    if (device.begun.load(std::memory_order_relaxed) != 0) {
      const auto id = index < current_ids.size() ? current_ids[index] : kDefault;
      drain(device, device.streams.at(static_cast<std::size_t>(id)));
    }
  }
}

bool is_idle(c10::Stream stream) {
  auto& state = state_of(stream);
  const std::lock_guard<std::mutex> lock(state.mutex);
  return std::all_of(state.begun.begin(), state.begun.end(),
                     [](const auto& pending) { return pending->is_done(); });
}

void synchronize(c10::Stream stream) {
  run_deferred(Cut::kStream);
  drain(device_of(stream), state_of(stream));
}

void synchronize_all() {
  run_deferred(Cut::kStream);
  if (begun_somewhere.load(std::memory_order_relaxed) == 0) {
    return;
  }
  for (auto& device : *devices) {
    for (auto& state : device.streams) {
      drain(device, state);
    }
  }
}

void record(void** event, c10::Stream stream) {
  run_deferred(Cut::kStream);
  if (*event == nullptr) {
    *event = new Event();
  }
  auto& recorded = *static_cast<Event*>(*event);
  auto& state = state_of(stream);
  const std::lock_guard<std::mutex> lock(state.mutex);
  recorded.begun = state.begun;
  recorded.at = Clock::now();
}

void wait_for(c10::Stream stream, void* event) {
  if (event == nullptr) {
    return;
  }
  for (const auto& pending : static_cast<Event*>(event)->begun) {
    if (!pending->is_done() || pending->has_failed()) {
      add(stream, pending);
    }
  }
}

bool is_done(void* event) {
  if (event == nullptr) {
    return true;
  }
  auto& recorded = *static_cast<Event*>(event);
  if (!std::all_of(recorded.begun.begin(), recorded.begun.end(),
                   [](const auto& pending) { return pending->is_done(); })) {
    return false;
  }
  if (!recorded.begun.empty()) {
    recorded.begun.clear();
    recorded.at = Clock::now();
  }
  return true;
}

void synchronize_event(void* event) {
  if (event != nullptr) {
    auto& recorded = *static_cast<Event*>(event);
    for (const auto& pending : recorded.begun) {
      without_gil([&] { pending->wait(); });
    }
    is_done(event);
  }
}

double elapsed_ms(void* from, void* to) {
  TORCH_CHECK(from != nullptr && to != nullptr,
              "expected two recorded events, got one that was never recorded");
  TORCH_CHECK(is_done(from) && is_done(to), "expected two events that are over; synchronize them first");
  const auto took = static_cast<Event*>(to)->at - static_cast<Event*>(from)->at;
  return std::chrono::duration<double, std::milli>(took).count();
}

void destroy(void* event) noexcept { delete static_cast<Event*>(event); }

}  // namespace tpurun::device::streams
