// The memory of device `tpu`: an arena of this process, behind torch's allocator interfaces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <c10/core/CachingDeviceAllocator.h>

namespace tpurun::device {

// Allocates `tpu` storages. Each is a second owner of the bytes of a CPU storage, see twin.h.
c10::DeviceAllocator& allocator();

// While one lives, CPU memory that this thread asks for comes from the arena: results of CPU kernels that run
// for the device are device memory.
class FromArena {
 public:
  FromArena() : before_(wanted) { wanted = true; }
  ~FromArena() { wanted = before_; }
  FromArena(const FromArena&) = delete;
  FromArena& operator=(const FromArena&) = delete;

  static bool is_wanted() { return wanted; }

 private:
  static thread_local bool wanted;
  bool before_;
};

// A block of the arena for a CPU storage; `site` is the line of the program in messages, or empty.
c10::DataPtr allocate_block(std::size_t bytes, const std::string& site);
// Whether it is such a block: no other has a byte of it.
bool is_block(const c10::DataPtr& data);
// The allocator of CPU storages of the device.
c10::Allocator& block_allocator();
// Whoever asks for less is not worth looking for: walking the Python frames takes longer than the allocation.
inline constexpr std::size_t kLargeBlock = 1 << 20;

// Puts the allocators of an arena of at most `limit` bytes in place; once per process.
void claim_memory(std::size_t limit);
// Opens the arena of a claimed device, if it is not open: for the first tensor, or for a group that is to
// find it. Until then a fork may use the device as well.
void open_memory();
// Whether this is the fork of a process that had opened it.
bool is_forked();
// Returns the size of the arena in bytes, whether it is open or not.
uint64_t memory_limit();

// Returns JSON that says how much memory is held, and by which lines of the program.
std::string memory_report();

}  // namespace tpurun::device
