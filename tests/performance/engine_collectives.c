/* The collectives of tpurun's engine without torch and Python, to be timed:
 * tpurun -n N --no-python engine_collectives COLLECTIVE SECONDS BYTES..
 */
#include <stdio.h>
#include <stdlib.h>

#include "runtime.h"
#include "timed_collectives.h"

enum { MAX_RANKS = 1024, TIMEOUT_MS = 60000 };

static TpurunComm* comm;
static TpurunError error;

/* Ordinary memory, which is staged, and such as the other ranks of the host use where it is. */
const char* const MEMORIES[] = {"staged", "mapped", NULL};

void* take(int memory, size_t bytes) { return memory == 0 ? aligned(bytes) : tpurun_shared_allocate(bytes); }

void give_back(int memory, void* data) {
  if (memory == 0) {
    free(data);
  } else {
    tpurun_shared_free(data);
  }
}

static void check(TpurunStatus status) {
  if (status == TPURUN_OK) return;
  fprintf(stderr, "%.*s\n", (int)error.bytes, error.text);
  fail("tpurun refuses");
}

/* Chunks of a buffer, as many bytes each. */
typedef struct {
  void* data;
  uint32_t chunks;
  uint64_t bytes;
} Memory;

static void set_spans(TpurunSpan* spans, Memory memory) {
  for (uint32_t i = 0; i < memory.chunks; i++)
    spans[i] = (TpurunSpan){(char*)memory.data + i * memory.bytes, memory.bytes};
}

static void run(TpurunOp op, Memory from, Memory to) {
  static TpurunSpan inputs[MAX_RANKS], outputs[MAX_RANKS];
  set_spans(inputs, from);
  set_spans(outputs, to);
  op.inputs = inputs;
  op.outputs = outputs;
  op.input_chunks = from.chunks;
  op.output_chunks = to.chunks;
  op.inputs_per_chunk = from.chunks > 0;
  op.outputs_per_chunk = to.chunks > 0;
  op.scale = 1;
  op.site = "engine_collectives.c";
  op.site_bytes = 20;
  TpurunWork* none;
  check(tpurun_post(comm, &op, &none, &error));
}

static TpurunOp sum(TpurunCollective collective) {
  return (TpurunOp){.collective = collective, .dtype = TPURUN_F32, .reduce_op = TPURUN_SUM, .root = -1};
}

static Memory whole(float* data, int count) { return (Memory){data, 1, sizeof(float) * count}; }

static Memory shares(float* data, const Buffers* b) {
  return (Memory){data, ranks, sizeof(float) * b->share};
}

void all_reduce(Buffers* b) {
  run(sum(TPURUN_ALL_REDUCE), whole(b->large, b->count), whole(b->large, b->count));
}

void all_gather(Buffers* b) { run(sum(TPURUN_ALL_GATHER), whole(b->other, b->share), shares(b->large, b)); }

void reduce_scatter(Buffers* b) {
  run(sum(TPURUN_REDUCE_SCATTER), shares(b->large, b), whole(b->other, b->share));
}

void all_to_all(Buffers* b) { run(sum(TPURUN_ALL_TO_ALL), shares(b->large, b), shares(b->other, b)); }

void broadcast(Buffers* b) {
  TpurunOp op = sum(TPURUN_BROADCAST);
  op.root = 0;
  Memory all = whole(b->large, b->count), none = {0};
  run(op, rank == 0 ? all : none, rank == 0 ? none : all);
}

void barrier(Buffers* b) {
  (void)b;
  run(sum(TPURUN_BARRIER), (Memory){0}, (Memory){0});
}

static int from_environment(const char* name) {
  const char* text = getenv(name);
  if (text == NULL) fail("expected to be run by tpurun --no-python");
  return atoi(text);
}

void begin(int* argc, char*** argv) {
  (void)argc, (void)argv;
  rank = from_environment("RANK");
  ranks = from_environment("WORLD_SIZE");
  if (ranks > MAX_RANKS) fail("too many ranks");
  int32_t all[MAX_RANKS];
  for (int i = 0; i < ranks; i++) all[i] = i;
  TpurunCommConfig config = {.name = "timed",
                             .name_bytes = 5,
                             .rank = rank,
                             .size = ranks,
                             .global_ranks = all,
                             .timeout_ms = TIMEOUT_MS};
  check(tpurun_shared_open(&error));
  check(tpurun_comm_create(&config, &comm, &error));
}

void finish(void) { tpurun_comm_free(comm); }

double greatest(double value) {
  TpurunOp op = sum(TPURUN_ALL_REDUCE);
  op.dtype = TPURUN_F64;
  op.reduce_op = TPURUN_MAX;
  Memory one = {&value, 1, sizeof(value)};
  run(op, one, one);
  return value;
}

void give_up(void) { exit(1); }
