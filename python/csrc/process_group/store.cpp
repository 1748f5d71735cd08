#include "process_group/store.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <c10/util/Exception.h>

namespace tpurun {

namespace {

using namespace std::chrono_literals;

// No exception may cross into the engine; it reports the key that failed, the log keeps the reason.
template <class Call>
int32_t guarded(const char* verb, const std::string& key, Call&& call) noexcept {
  try {
    return call();
  } catch (const c10::Error& error) {
    TORCH_WARN("tpurun: the store failed to ", verb, " ", key, ": ", error.what_without_backtrace());
  } catch (const std::exception& error) {
    TORCH_WARN("tpurun: the store failed to ", verb, " ", key, ": ", error.what());
  }
  return 1;
}

c10d::Store& store_of(void* ctx) { return *static_cast<c10d::Store*>(ctx); }

int32_t set(void* ctx, const char* key, uint64_t key_bytes, const void* value, uint64_t value_bytes) {
  const std::string name(key, key_bytes);
  return guarded("set", name, [&] {
    const auto* bytes = static_cast<const uint8_t*>(value);
    store_of(ctx).set(name, std::vector<uint8_t>(bytes, bytes + value_bytes));
    return 0;
  });
}

// A store of the program need not be able to tell.
bool is_there(c10d::Store& store, const std::string& name) {
  try {
    return store.check({name});
  } catch (const std::exception&) {
    return true;
  }
}

// As long as Store::get waits, but Ctrl-C ends it: nothing, then, as after that time. Asking again and again
// is what leaves the store to others meanwhile, and torch logs nothing of it.
std::optional<std::vector<uint8_t>> get_unless_stopped(c10d::Store& store, const std::string& name) {
  using Clock = std::chrono::steady_clock;
  const auto began = Clock::now();
  const auto until = began + store.getTimeout();
  for (auto asked = began; asked < until; asked = Clock::now()) {
    const int32_t looked = tpurun_look_while_waiting();
    // A value that has come meanwhile says where others learn that this rank is stopped.
    if (looked < 0 || is_there(store, name)) {
      return store.get(name);
    }
    if (looked > 0) {
      return std::nullopt;
    }
    // Late by an eighth of the wait at the most.
    std::this_thread::sleep_for(std::clamp<Clock::duration>((asked - began) / 8, 1ms, 200ms));
  }
  return std::nullopt;
}

int32_t get(void* ctx, const char* key, uint64_t key_bytes, void* value, uint64_t capacity,
            uint64_t* value_bytes) {
  const std::string name(key, key_bytes);
  return guarded("get", name, [&] {
    const auto found = get_unless_stopped(store_of(ctx), name);
    if (!found || found->size() > capacity) {
      return 1;
    }
    std::memcpy(value, found->data(), found->size());
    *value_bytes = found->size();
    return 0;
  });
}

int32_t add(void* ctx, const char* key, uint64_t key_bytes, int64_t delta, int64_t* sum) {
  const std::string name(key, key_bytes);
  return guarded("add", name, [&] {
    *sum = store_of(ctx).add(name, delta);
    return 0;
  });
}

}  // namespace

TpurunStore callbacks_of(c10d::Store& store) { return {&store, &set, &get, &add}; }

}  // namespace tpurun
