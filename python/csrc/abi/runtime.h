// The C ABI of device memory: the arena of this process, from which tensors on device tpu are allocated.
//
// There is one arena per process. All functions may be called from any thread, need no GIL and do not block.
// The Rust side is runtime/src/ffi.rs; both sides assert the sizes below.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "tpurun.h"

#ifdef __cplusplus
extern "C" {
#endif

// Statuses beside those of TpurunStatus.
enum {
  TPURUN_OUT_OF_MEMORY = 9,  // torch.OutOfMemoryError
  TPURUN_FORKED = 10,        // this process is the fork of one that had used the device: RuntimeError
};

// In bytes, of which an allocation counts what it takes after rounding; the last four are counts.
typedef struct {
  uint64_t limit;
  uint64_t allocated;  // by live blocks
  uint64_t allocated_peak;
  uint64_t allocated_total;  // ever
  uint64_t freed_total;      // ever
  uint64_t reserved;         // of the host's memory at most, live blocks and free ones kept for reuse
  uint64_t reserved_peak;
  uint64_t live;         // blocks
  uint64_t allocations;  // ever
  uint64_t frees;        // ever
  uint64_t refused;      // allocations that did not fit
} TpurunMemoryStats;

#ifdef __cplusplus
static_assert(sizeof(TpurunMemoryStats) == 88, "runtime/src/accounts.rs says the same");
#endif

// Opens the arena, of `limit_bytes`, which takes no memory of the host before it is touched; `device` is the
// number in messages (tpu:0). Once per process: again with the same limit does nothing, with another one it
// is TPURUN_INVALID_USAGE. TPURUN_FORKED in the fork of a process that has opened its own.
TpurunStatus tpurun_memory_open(uint32_t device, uint64_t limit_bytes, TpurunError* error);

// A block of at least `bytes` bytes, aligned to 512; what is in it is undefined. `site` is "train.py:28" of
// the caller, for messages and the report, or null; it is used from TPURUN_SITE_BYTES on only. Null with
// `error` filled: no memory (TPURUN_OUT_OF_MEMORY), a fork (TPURUN_FORKED), not opened
// (TPURUN_INVALID_USAGE). No bytes are null with TPURUN_OK.
enum { TPURUN_SITE_BYTES = 1 << 20 };
void* tpurun_memory_allocate(uint64_t bytes, const char* site, uint64_t site_bytes, TpurunError* error);

// 1 when `data` was a live block, else 0. In a fork nothing is freed, and the whole arena counts as live.
int32_t tpurun_memory_free(void* data);
int32_t tpurun_memory_owns(const void* data);        // 1 when it points into the arena
uint64_t tpurun_memory_size(const void* data);       // usable bytes of a live block, else 0; 0 in a fork
void tpurun_memory_stats(TpurunMemoryStats* stats);  // all zero before the arena is opened, and in a fork
void tpurun_memory_reset_peak(void);                 // the peaks become what is now
void tpurun_memory_reset_totals(void);  // everything that counts from the beginning starts at zero
uint64_t tpurun_memory_trim(void);      // gives free memory back to the host; how many bytes

// Writes a JSON object (`Report` in runtime/src/report.rs) when it fits into `capacity`, and returns its size
// in bytes. It may grow between two calls. Not terminated; 0 before the arena is opened, and in a fork.
uint64_t tpurun_memory_report(char* text, uint64_t capacity);

// The shared host memory of this process: CPU tensors that the other ranks of the host use where they are. A
// second arena, as large as the memory of the host, which takes none before it is touched.
TpurunStatus tpurun_shared_open(TpurunError* error);  // again does nothing; TPURUN_FORKED in a fork
void* tpurun_shared_allocate(uint64_t bytes);         // null: not opened, a fork, or full
void tpurun_shared_free(void* data);                  // a live block; does nothing in a fork
int32_t tpurun_shared_owns(const void* data);         // 1 when it points into the arena

// Programs, as words (runtime/program/src/words.rs). Any thread; a program does not change.
typedef struct TpurunProgram TpurunProgram;
typedef struct TpurunPlan TpurunPlan;

// Null with `error` filled where the words are no program: a bug of the extension.
TpurunProgram* tpurun_program_read(const int64_t* words, uint64_t word_count, const char* text,
                                   uint64_t text_bytes, TpurunError* error);
void tpurun_program_free(TpurunProgram* program);                   // null does nothing
uint64_t tpurun_program_fingerprint(const TpurunProgram* program);  // equal for equal streams, on every rank
// Writes the program for people when it fits into `capacity`, and returns its size in bytes. Not terminated.
uint64_t tpurun_program_text(const TpurunProgram* program, char* text, uint64_t capacity);
// How it runs where its unknown sizes are `sizes`; null with `error` filled when it makes no sense with them.
// Values of `own_from` bytes or more are in no workspace: they hold memory only as long as they are needed.
TpurunPlan* tpurun_program_plan(const TpurunProgram* program, const int64_t* sizes, uint64_t size_count,
                                int64_t own_from, TpurunError* error);
const int64_t* tpurun_plan_words(const TpurunPlan* plan, uint64_t* count);  // valid as long as the plan
void tpurun_plan_free(TpurunPlan* plan);                                    // null does nothing

// To be called in the child of a fork that was not made by the C library's fork(), which calls it by itself:
// the child keeps the parent's tensors, to read, and to write for itself alone.
void tpurun_memory_forked(void);

#ifdef __cplusplus
}
#endif
