// The C ABI of the collectives engine: the only surface between the torch shim and the Rust core.
//
// Every pointer argument is borrowed for the duration of the call, except the spans and `done_ctx` of an
// asynchronous op: the memory the spans point at must stay valid until `done` was called (the span arrays
// themselves are copied). No function needs the GIL, none may be called with it held if it can block
// (tpurun_comm_create, tpurun_post of a synchronous op, tpurun_work_wait, tpurun_comm_shutdown).
// The Rust side is collectives/src/ffi.rs; both sides assert the sizes below.
#pragma once

#include <stddef.h>
#include <stdint.h>

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

// What the Store of torch.distributed offers to the bootstrap; each returns 0 on success. `get` blocks until
// the key exists or the store's own timeout; it fails when the value is larger than `capacity`.
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
// Called exactly once, from the engine's thread: it may not block and may not take the GIL.
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
  uint32_t flags;       // TPURUN_ASYNC: return at once, and call `done` at the end, on any thread; with
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
TpurunStatus tpurun_comm_create(const TpurunCommConfig* config, TpurunComm** comm, TpurunError* error);

// Posts one operation. Synchronous: returns when it is done, *work is null, and its status is returned.
// Asynchronous: returns at once with a work to free; `done` is called later (also on failure, also when
// the communicator is aborted or shut down) unless this call itself did not return TPURUN_OK.
TpurunStatus tpurun_post(TpurunComm* comm, const TpurunOp* op, TpurunWork** work, TpurunError* error);

// Waits at most timeout_ms (<= 0: the op's own deadline). A timeout here alone does not fail the op: it
// returns TPURUN_TIMEOUT and the work may be waited for again. `python_threads` as in TpurunOp.
TpurunStatus tpurun_work_wait(TpurunWork* work, int64_t timeout_ms, uint32_t python_threads,
                              TpurunError* error);
int32_t tpurun_work_is_done(
    const TpurunWork* work);  // 1 when finished, successfully or not, and in a fork of the rank
void tpurun_work_attend(const TpurunWork* work);  // a lazy op ends from now on though nobody waits for it
uint64_t tpurun_work_seq(const TpurunWork* work);
// As tpurun_comm_abort, of the communicator that the operation belongs to.
void tpurun_work_abort(const TpurunWork* work, const char* reason, uint64_t reason_bytes);
void tpurun_work_free(TpurunWork* work);  // does not cancel the op

// What the calling thread runs while it waits in this library: soon after a signal has interrupted its sleep,
// and several times a second. It may abort the communicator, which ends the wait, and must post nothing
// there. Returns the check before; no function: none.
typedef struct {
  void (*function)(void* argument);
  void* argument;
} TpurunCheck;
TpurunCheck tpurun_check_while_waiting(TpurunCheck check);
// For that function, in a thread that makes a communicator or shrinks one, which nothing can abort yet: the
// thread waits no longer, and the call fails.
void tpurun_stop_waiting(void);
// For callbacks that wait on their own, several times a second: runs that function. 0: wait on; 1: fail, it
// has called tpurun_stop_waiting; -1: this thread has none, and need not ask again.
int32_t tpurun_look_while_waiting(void);

// Fails every pending and future operation of this communicator, on all its ranks, with AbortedError.
void tpurun_comm_abort(TpurunComm* comm, const char* reason, uint64_t reason_bytes);
// Frees every waiter of this rank, and joins the engine's threads. Collectives that all ranks have posted end
// as they would have; all others, and pending messages, fail with AbortedError for this rank alone.
void tpurun_comm_shutdown(TpurunComm* comm);
// Makes the communicator of the ranks that are left, of a later epoch; all of them must call this, within
// `timeout_ms`. `lost` are ranks of the world that are not waited for, besides those whose processes are gone
// and those that the failure names as lost. `comm` fails first, if it has not yet.
TpurunStatus tpurun_comm_shrink(TpurunComm* comm, const uint32_t* lost, uint64_t lost_count,
                                int64_t timeout_ms, uint32_t python_threads, TpurunComm** survivors,
                                TpurunError* error);
void tpurun_comm_members(const TpurunComm* comm, TpurunMembers* members);

// Bytes that this rank has moved for collectives of the communicator so far.
typedef struct {
  uint64_t read;
  uint64_t written;
  uint64_t staged;  // of both, what went through windows and rings
} TpurunTraffic;
void tpurun_comm_traffic(const TpurunComm* comm, TpurunTraffic* traffic);
void tpurun_comm_free(TpurunComm* comm);  // shuts down first when that was not done
void tpurun_comm_set_timeout(TpurunComm* comm, int64_t timeout_ms);
int64_t tpurun_comm_timeout(const TpurunComm* comm);  // ms; TPURUN_TIMEOUT_MS may have replaced the config's
uint64_t tpurun_comm_seq(const TpurunComm* comm);     // collectives posted so far
// The sticky failure of the communicator; TPURUN_OK when it is healthy.
TpurunStatus tpurun_comm_failure(const TpurunComm* comm, TpurunError* error);
// TPURUN_INVALID_USAGE in a fork of the rank, which has no part in its groups.
TpurunStatus tpurun_comm_check_process(const TpurunComm* comm, TpurunError* error);

// Copies bytes as large collectives do: past the caches. The memory must be apart.
void tpurun_stream_copy(void* to, const void* from, uint64_t bytes);

const char* tpurun_version(void);  // NUL-terminated, static

#ifdef __cplusplus
}
#endif
