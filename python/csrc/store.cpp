#include "store.h"

#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include <c10/util/Exception.h>

namespace tpurun {

namespace {

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

int32_t get(void* ctx, const char* key, uint64_t key_bytes, void* value, uint64_t capacity,
            uint64_t* value_bytes) {
  const std::string name(key, key_bytes);
  return guarded("get", name, [&] {
    const auto found = store_of(ctx).get(name);
    if (found.size() > capacity) {
      return 1;
    }
    std::memcpy(value, found.data(), found.size());
    *value_bytes = found.size();
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
