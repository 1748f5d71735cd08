// The C ABI of the collectives engine: the only surface between the torch shim and the Rust core.
//
// Every pointer argument is borrowed for the duration of the call, except the spans and `done_ctx` of an
// asynchronous op: the memory the spans point at must stay valid until `done` was called (the span arrays
// themselves are copied).
//
// Every call below says which thread may call it, and whether it blocks:
//   any thread   any thread of the process, and several threads at the same time.
//   blocks       the call may wait for another rank or another thread. The calling thread must not hold the
//                GIL. While the call waits, it runs the thread's check (tpurun_check_while_waiting).
//   never blocks the call waits for no rank; it takes only locks of this process that are held for a moment,
//                and may be made with the GIL held.
// No call needs the GIL. A fork of the rank has no part in its groups: there, calls that post or wait return
// TPURUN_INVALID_USAGE, and calls that end something do nothing.
// The Rust side is collectives/engine/src/ffi.rs; both sides assert the sizes below.
#pragma once

#include <stddef.h>
#include <stdint.h>

// The version of the interface in this header and in runtime.h. It grows with every change that code built
// before that change would get wrong: a struct, the arguments of a function, the meaning of a number. The
// engine has its own copy of the number (ABI_VERSION in collectives/engine/src/ffi.rs), and the shim compares
// the two when it is loaded.
#define TPURUN_ABI_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif

typedef struct TpurunComm TpurunComm;
typedef struct TpurunWork TpurunWork;

typedef enum {
  TPURUN_OK = 0,
  TPURUN_INVALID_USAGE = 1,  // this rank called with arguments that can not work: ValueError
  TPURUN_MISMATCH = 2,       // ranks posted different operations: CollectiveMismatchError
  TPURUN_RANK_LOST = 3,      // RankLostError
  TPURUN_DEADLOCK = 4,       // DeadlockError
  TPURUN_TIMEOUT = 5,        // CollectiveTimeoutError
  TPURUN_ABORTED = 6,        // AbortedError
  TPURUN_TRANSPORT = 7,      // the host refused something (descriptors, memory): DistBackendError
  TPURUN_INTERNAL = 8,       // a bug in tpurun: DistBackendError
} TpurunStatus;

typedef enum {
  TPURUN_ALL_REDUCE = 0,
  TPURUN_ALL_GATHER = 1,
  TPURUN_REDUCE_SCATTER = 2,
  TPURUN_BROADCAST = 3,
  TPURUN_ALL_TO_ALL = 4,
  TPURUN_REDUCE = 5,
  TPURUN_GATHER = 6,
  TPURUN_SCATTER = 7,
  TPURUN_BARRIER = 8,
  TPURUN_SEND = 9,
  TPURUN_RECV = 10,
} TpurunCollective;

typedef enum {
  TPURUN_BOOL = 0,
  TPURUN_U8 = 1,
  TPURUN_I8 = 2,
  TPURUN_U16 = 3,
  TPURUN_I16 = 4,
  TPURUN_U32 = 5,
  TPURUN_I32 = 6,
  TPURUN_U64 = 7,
  TPURUN_I64 = 8,
  TPURUN_F16 = 9,
  TPURUN_BF16 = 10,
  TPURUN_F32 = 11,
  TPURUN_F64 = 12,
  TPURUN_F8_E4M3FN = 13,
  TPURUN_F8_E5M2 = 14,
  TPURUN_F8_E4M3FNUZ = 15,
  TPURUN_F8_E5M2FNUZ = 16,
  TPURUN_C64 = 17,   // complex of two f32
  TPURUN_C128 = 18,  // complex of two f64
} TpurunDtype;

typedef enum {
  TPURUN_SUM = 0,
  TPURUN_AVG = 1,
  TPURUN_PRODUCT = 2,
  TPURUN_MIN = 3,
  TPURUN_MAX = 4,
  TPURUN_BAND = 5,
  TPURUN_BOR = 6,
  TPURUN_BXOR = 7,
  TPURUN_PREMUL_SUM = 8,
} TpurunReduceOp;

// One contiguous piece of a tensor.
typedef struct {
  void* data;
  uint64_t bytes;
} TpurunSpan;

// The calls of a Store of torch.distributed that the bootstrap uses; each returns 0 on success. `get` blocks
// until the key exists or the store's own timeout; it fails when the value is larger than `capacity`. All
// three are called by tpurun_comm_create alone, on its thread and before it returns.
typedef struct {
  void* ctx;
  int32_t (*set)(void* ctx, const char* key, uint64_t key_bytes, const void* value, uint64_t value_bytes);
  int32_t (*get)(void* ctx, const char* key, uint64_t key_bytes, void* value, uint64_t capacity,
                 uint64_t* value_bytes);
  int32_t (*add)(void* ctx, const char* key, uint64_t key_bytes, int64_t delta, int64_t* sum);
} TpurunStore;

typedef struct {
  const char* name;  // of the process group, the same on all its ranks; shown in messages
  uint64_t name_bytes;
  int32_t rank;  // in this group
  int32_t size;
  const int32_t* global_ranks;  // `size` entries
  int64_t timeout_ms;           // default of every operation; must be > 0
  TpurunStore store;
  uint32_t python_threads;  // as in TpurunOp
  uint32_t epoch;           // generation of the world that the group is part of; the same on all its ranks
  uint32_t beyond_job;      // 1: not all its ranks are of one launcher's job, so they meet through the store
  uint32_t reserved;
} TpurunCommConfig;

typedef struct {
  int32_t status;   // TpurunStatus
  uint32_t bytes;   // of text
  char text[8184];  // UTF-8, not terminated
  uint32_t rank_count;
  uint32_t ranks[1023];  // the guilty, by their rank in the world; none when nobody in particular is
} TpurunError;

typedef struct {
  const char* name;  // valid as long as the communicator
  uint64_t name_bytes;
  uint32_t rank;
  uint32_t size;
  const uint32_t* global_ranks;  // `size` entries, valid as long as the communicator
  uint32_t epoch;
  uint32_t beyond_job;  // 1: no launcher watches over it
} TpurunMembers;

// `error` is null on success, else valid during the call. `source` is the rank a receive matched, else -1.
// Called exactly once, on whichever thread ends the op: a thread of the engine, or a thread that is inside
// tpurun_post, tpurun_work_wait, tpurun_comm_shutdown or tpurun_comm_free of the same communicator. That may
// be the thread that posts the op, before its tpurun_post has returned. The engine may hold locks meanwhile:
// `done` may not block, may not take the GIL, and may call no function of this header.
typedef void (*TpurunDone)(void* ctx, const TpurunError* error, int32_t source);

enum { TPURUN_ASYNC = 1, TPURUN_LAZY = 2 };
enum { TPURUN_SHAPE_SHOW = 0, TPURUN_SHAPE_MATCH = 1 };

// Inputs and outputs are chunk-major lists of spans: chunk c is the concatenation of the spans
// [c * spans_per_chunk, (c + 1) * spans_per_chunk). Chunks per collective (P = ranks of the group):
//   all_reduce 1 -> 1        all_gather 1 -> P (sizes may differ)   reduce_scatter P -> 1 (sizes may differ)
//   all_to_all P -> P (any)  broadcast 1 (root) -> 1 (the others)   reduce 1 -> 1 (root)
//   gather 1 -> P (root)     scatter P (root) -> 1                  barrier 0 -> 0
//   send 1 -> 0              recv 0 -> 1
// All spans hold elements of `dtype`. An output may be the same memory as the input it replaces (all_reduce,
// reduce, and chunk `rank` of all_gather and reduce_scatter), never overlap it otherwise.
// Counts that stand for "nothing here" (outputs of reduce off the root) are 0.
typedef struct {
  uint32_t collective;  // TpurunCollective
  uint32_t dtype;       // TpurunDtype
  uint32_t reduce_op;   // TpurunReduceOp
  uint32_t flags;       // TPURUN_ASYNC: return at once, and call `done` at the end (see TpurunDone); with
                        // TPURUN_LAZY as well, that may be as late as tpurun_work_wait or _attend
  int32_t root;         // root, or the peer of send and recv (-1: any source), else -1; ranks of this group
  int32_t tag;          // send and recv
  double scale;         // factor of PREMUL_SUM
  const TpurunSpan* inputs;
  uint32_t input_chunks;
  uint32_t inputs_per_chunk;
  const TpurunSpan* outputs;
  uint32_t output_chunks;
  uint32_t outputs_per_chunk;
  const int64_t* shape;  // of the first tensor, for messages
  uint32_t ndim;
  uint32_t shape_rule;  // TPURUN_SHAPE_MATCH: the shape must be the same on all ranks
  uint64_t shape_hash;  // of all tensors' shapes, compared under TPURUN_SHAPE_MATCH
  int64_t timeout_ms;   // <= 0: the communicator's
  const char* site;     // "train.py:28" of the caller, for messages; compared when TPURUN_MATCH=strict
  uint64_t site_bytes;
  TpurunDone done;  // asynchronous ops only
  void* done_ctx;
  uint32_t python_threads;  // of the process; 0 when the calling thread is none
  uint32_t reserved;
} TpurunOp;

// Creates this rank's end of a communicator; returns when all ranks have attached or the timeout passed.
// Any thread. Blocks.
TpurunStatus tpurun_comm_create(const TpurunCommConfig* config, TpurunComm** comm, TpurunError* error);

// Posts one operation. Synchronous: returns when it is done, *work is null, and its status is returned.
// Asynchronous: returns at once with a work to free; `done` is called exactly once (also on failure, also
// when the communicator is aborted or shut down) unless this call itself did not return TPURUN_OK. Any
// thread; the order in which threads post is the order of the collectives. Blocks: a synchronous op until it
// is done, an asynchronous one while 1024 others are pending, and any for a moment where the communicator has
// failed (as tpurun_comm_failure).
TpurunStatus tpurun_post(TpurunComm* comm, const TpurunOp* op, TpurunWork** work, TpurunError* error);

// Waits at most timeout_ms (<= 0: the op's own deadline). A timeout here alone does not fail the op: it
// returns TPURUN_TIMEOUT and the work may be waited for again. `python_threads` as in TpurunOp.
// Any thread. Blocks, unless tpurun_work_is_done has returned 1. The thread may run other ops of the
// communicator meanwhile, and call their `done`.
TpurunStatus tpurun_work_wait(TpurunWork* work, int64_t timeout_ms, uint32_t python_threads,
                              TpurunError* error);
// 1 when finished, successfully or not, and in a fork of the rank. Any thread. Never blocks.
int32_t tpurun_work_is_done(const TpurunWork* work);
// A lazy op ends from now on though nobody waits for it. Any thread. Never blocks.
void tpurun_work_attend(const TpurunWork* work);
// The op's number among those of its communicator. Any thread. Never blocks.
uint64_t tpurun_work_seq(const TpurunWork* work);
// As tpurun_comm_abort, of the communicator that the operation belongs to. Any thread. Blocks for a moment.
void tpurun_work_abort(const TpurunWork* work, const char* reason, uint64_t reason_bytes);
// Does not cancel the op, and does not wait for it. Any thread, once, after every other call with this work
// has returned; the communicator may have been freed before. Never blocks.
void tpurun_work_free(TpurunWork* work);

// A check is what the calling thread runs while it waits in this library: soon after a signal has interrupted
// its sleep, and several times a second. The check may abort the communicator, which ends the wait, and must
// post nothing there. The call returns the check that was set before. A check without a function is no check.
// Any thread, for itself alone: each thread has a check of its own. Never blocks.
typedef struct {
  void (*function)(void* argument);
  void* argument;
} TpurunCheck;
TpurunCheck tpurun_check_while_waiting(TpurunCheck check);
// For that function, in a thread that makes a communicator or shrinks one, which nothing can abort yet: the
// thread waits no longer, and the call fails. Only the thread that waits, from its check. Never blocks.
void tpurun_stop_waiting(void);
// For callbacks that wait on their own, several times a second: runs that function. 0: wait on; 1: fail, it
// has called tpurun_stop_waiting; -1: this thread has none, and need not ask again.
// Only the thread that waits, from a TpurunStore. Blocks as long as the check does.
int32_t tpurun_look_while_waiting(void);

// Fails every pending and future operation of this communicator, on all its ranks, with AbortedError.
// Any thread, also from a check. Blocks for a moment: it waits for no rank, but, as tpurun_comm_failure,
// until it is known which failure is the first.
void tpurun_comm_abort(TpurunComm* comm, const char* reason, uint64_t reason_bytes);
// Frees every waiter of this rank, and joins the communicator's progress threads. Collectives that all ranks
// have posted end as they would have; all others, and pending messages, fail with AbortedError for this rank
// alone. Any thread, but not from `done` and not from a check. Blocks until those collectives have ended, and
// on the first rank of a host at most 10 s more until the other hosts know.
void tpurun_comm_shutdown(TpurunComm* comm);
// Makes the communicator of the ranks that are left, of a later epoch; all of them must call this, within
// `timeout_ms`. `lost` are ranks of the world that are not waited for, besides those whose processes are gone
// and those that the failure names as lost. `comm` fails first, if it has not yet.
// Any thread. Blocks.
TpurunStatus tpurun_comm_shrink(TpurunComm* comm, const uint32_t* lost, uint64_t lost_count,
                                int64_t timeout_ms, uint32_t python_threads, TpurunComm** survivors,
                                TpurunError* error);
// Any thread. Never blocks.
void tpurun_comm_members(const TpurunComm* comm, TpurunMembers* members);

// Bytes that this rank has moved for collectives of the communicator so far.
typedef struct {
  uint64_t read;
  uint64_t written;
  uint64_t staged;  // of both, what went through windows and rings
} TpurunTraffic;
// Any thread. Never blocks.
void tpurun_comm_traffic(const TpurunComm* comm, TpurunTraffic* traffic);
// Shuts down first when that was not done. Any thread, once, after every other call with this communicator
// has returned; its works may outlive it. Blocks as tpurun_comm_shutdown.
void tpurun_comm_free(TpurunComm* comm);
// Sets the timeout of operations posted from now on. Any thread. Never blocks.
void tpurun_comm_set_timeout(TpurunComm* comm, int64_t timeout_ms);
// In ms; TPURUN_TIMEOUT_MS may have replaced the config's. Any thread. Never blocks.
int64_t tpurun_comm_timeout(const TpurunComm* comm);
// Collectives posted so far. Any thread. Never blocks.
uint64_t tpurun_comm_seq(const TpurunComm* comm);
// The sticky failure of the communicator; TPURUN_OK when it is healthy.
// Any thread. Blocks for a moment where it has just failed: at most half a second while a rank writes why,
// and a second more until several hosts agree on it.
TpurunStatus tpurun_comm_failure(const TpurunComm* comm, TpurunError* error);
// TPURUN_INVALID_USAGE in a fork of the rank, which has no part in its groups. Any thread. Never blocks.
TpurunStatus tpurun_comm_check_process(const TpurunComm* comm, TpurunError* error);

// A run of a compiled program begins, for the flight recorder: the fingerprint and the operations of the
// program, and the first line of the user's program that is in it. The answer is for
// tpurun_program_run_ended. Allocates nothing. Any thread. Never blocks.
uint64_t tpurun_program_run_begun(uint64_t program, uint64_t operations, const char* line,
                                  uint64_t line_bytes);
// The run has ended; it has failed if `is_done` is 0. Any thread. Never blocks.
void tpurun_program_run_ended(uint64_t run, int32_t is_done);

// Copies bytes as large collectives do: past the caches. The memory must be apart. Any thread. Never blocks,
// but takes as long as the copy does.
void tpurun_stream_copy(void* to, const void* from, uint64_t bytes);

// NUL-terminated, static. Any thread. Never blocks.
const char* tpurun_version(void);
// The TPURUN_ABI_VERSION that the engine was built with. Any thread. Never blocks.
uint32_t tpurun_abi_version(void);

#ifdef __cplusplus
}
#endif

#ifdef __cplusplus
static_assert(sizeof(TpurunSpan) == 16, "collectives/engine/src/ffi.rs says the same");
static_assert(sizeof(TpurunStore) == 32, "collectives/engine/src/ffi.rs says the same");
static_assert(sizeof(TpurunCommConfig) == 88, "collectives/engine/src/ffi.rs says the same");
static_assert(sizeof(TpurunError) == 12288, "collectives/engine/src/ffi.rs says the same");
static_assert(sizeof(TpurunMembers) == 40, "collectives/engine/src/ffi.rs says the same");
static_assert(sizeof(TpurunOp) == 136, "collectives/engine/src/ffi.rs says the same");
static_assert(sizeof(TpurunCheck) == 16, "collectives/engine/src/ffi.rs says the same");
static_assert(sizeof(TpurunTraffic) == 24, "collectives/engine/src/ffi.rs says the same");
#endif
