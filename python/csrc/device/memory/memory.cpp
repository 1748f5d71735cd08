#include "device/memory/memory.h"

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include <unistd.h>

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include "abi/runtime.h"
#include "device/memory/twin.h"
#include "device/order/guard.h"
#include "device/order/streams.h"
#include "interpreter/call_site.h"

namespace tpurun::device {

namespace {

[[noreturn]] void fail(const TpurunError& error) {
  const std::string text(error.text, error.bytes);
  if (error.status == TPURUN_OUT_OF_MEMORY) {
    C10_THROW_ERROR(OutOfMemoryError, text);
  }
  C10_THROW_ERROR(Error, text);
}

// The size of the arena in bytes, once the device is claimed.
std::size_t claimed_bytes = 0;
// The process that has opened it, or the one that this is a fork of.
std::atomic<pid_t> opened_by{0};

TpurunMemoryStats stats_now() {
  TpurunMemoryStats now;
  tpurun_memory_stats(&now);
  now.limit = now.limit == 0 ? claimed_bytes : now.limit;
  return now;
}

// Positive for what was taken.
void tell_profiler(void* data, int64_t bytes) {
  const auto now = stats_now();
  c10::reportMemoryUsageToProfiler(data, bytes, now.allocated, now.reserved, current_device());
}

void* allocate_in_arena(std::size_t bytes, const std::string& site) {
  if (bytes == 0) {
    return nullptr;
  }
  open_memory();
  // The text is large: no need to touch it unless something fails.
  thread_local TpurunError error;
  void* data = tpurun_memory_allocate(bytes, site.data(), site.size(), &error);
  if (data == nullptr) {
    fail(error);
  }
  if (C10_UNLIKELY(c10::memoryProfilingEnabled())) {
    tell_profiler(data, static_cast<int64_t>(tpurun_memory_size(data)));
  }
  return data;
}

// Memory of CPU storages, from the arena or from wherever it came before there was one.
class CpuAllocator final : public c10::Allocator {
 public:
  explicit CpuAllocator(c10::Allocator* ordinary) : ordinary_(ordinary), release_(ordinary->raw_deleter()) {
    TORCH_INTERNAL_ASSERT(release_ != nullptr);
    ordinary_release = release_;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (!FromArena::is_wanted()) {
      return ordinary_->allocate(bytes);
    }
    return block(bytes, bytes < kLargeBlock ? std::string() : call_site());
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  static c10::DataPtr block(std::size_t bytes, const std::string& site) {
    void* data = allocate_in_arena(bytes, site);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  static bool is_block(const c10::DataPtr& data) { return data.get_deleter() == &release; }

 private:
  static void release(void* data) {
    if (C10_UNLIKELY(c10::memoryProfilingEnabled()) && tpurun_memory_owns(data) != 0) {
      tell_profiler(data, -static_cast<int64_t>(tpurun_memory_size(data)));
    }
    if (tpurun_memory_free(data) == 0) {
      ordinary_release(data);
    }
  }

  static c10::DeleterFnPtr ordinary_release;
  c10::Allocator* ordinary_;
  c10::DeleterFnPtr release_;
};

c10::DeleterFnPtr CpuAllocator::ordinary_release = nullptr;

CpuAllocator* cpu_allocator = nullptr;

void set(c10::CachingAllocator::StatArray& stats, uint64_t current, uint64_t peak, uint64_t gained,
         uint64_t lost) {
  auto& stat = stats[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  stat.current = static_cast<int64_t>(current);
  stat.peak = static_cast<int64_t>(peak);
  stat.allocated = static_cast<int64_t>(gained);
  stat.freed = static_cast<int64_t>(lost);
}

class TpuAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const FromArena arena;
    auto twin = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                      cpu_allocator->allocate(bytes), cpu_allocator, true);
    return twin_pointer(std::move(twin), current_device());
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  bool initialized() override { return cpu_allocator != nullptr; }

  void emptyCache(c10::MempoolId_t /*pool*/) override { tpurun_memory_trim(); }

  // Operations run in order on the host, and collectives hold what they work on.
  void recordStream(const c10::DataPtr& /*data*/, c10::Stream /*stream*/) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex /*device*/) override {
    streams::run_deferred_to_count();
    const auto now = stats_now();
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      set(*bytes, now.allocated, now.allocated_peak, now.allocated_total, now.freed_total);
    }
    set(stats.reserved_bytes, now.reserved, now.reserved_peak, now.reserved_peak,
        now.reserved_peak - now.reserved);
    for (auto* counts : {&stats.allocation, &stats.active}) {
      set(*counts, now.live, now.live, now.allocations, now.frees);
    }
    stats.num_ooms = static_cast<int64_t>(now.refused);
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override { tpurun_memory_reset_totals(); }
  void resetPeakStats(c10::DeviceIndex /*device*/) override {
    streams::run_deferred_to_count();
    tpurun_memory_reset_peak();
  }

  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex /*device*/) override {
    streams::run_deferred_to_count();
    const auto now = stats_now();
    return {now.limit - now.allocated, now.limit};
  }
};

}  // namespace

thread_local bool FromArena::wanted = false;

c10::DeviceAllocator& allocator() {
  static auto* made = new TpuAllocator();
  return *made;
}

c10::DataPtr allocate_block(std::size_t bytes, const std::string& site) {
  return CpuAllocator::block(bytes, site);
}

bool is_block(const c10::DataPtr& data) { return CpuAllocator::is_block(data); }

c10::Allocator& block_allocator() { return *cpu_allocator; }

void open_memory() {
  if (opened_by.load(std::memory_order_relaxed) != 0 || claimed_bytes == 0) {
    return;
  }
  auto error = std::make_unique<TpurunError>();
  if (tpurun_memory_open(0, claimed_bytes, error.get()) != TPURUN_OK) {
    fail(*error);
  }
  opened_by = getpid();
}

bool is_forked() {
  const auto opener = opened_by.load(std::memory_order_relaxed);
  return opener != 0 && opener != getpid();
}

uint64_t memory_limit() { return stats_now().limit; }

void claim_memory(std::size_t limit) {
  claimed_bytes = limit;
  cpu_allocator = new CpuAllocator(c10::GetCPUAllocator());
  c10::SetCPUAllocator(cpu_allocator, /*priority=*/255);
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &allocator());
}

std::string memory_report() {
  std::string text;
  // It may grow between the two calls.
  for (uint64_t bytes = tpurun_memory_report(nullptr, 0); bytes > text.size();) {
    text.resize(bytes);
    bytes = tpurun_memory_report(text.data(), text.size());
    if (bytes <= text.size()) {
      text.resize(bytes);
      break;
    }
  }
  return text;
}

}  // namespace tpurun::device
