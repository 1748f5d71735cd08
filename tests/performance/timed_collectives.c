/* LAUNCHER COLLECTIVE SECONDS BYTES..
 *
 * Times one collective of float32 for each size, as `tpurun bench` does: BYTES are those of the largest
 * buffer of a rank; a time is that of one iteration on the slowest rank, over blocks of iterations that start
 * together; there are as many as fit into SECONDS, three blocks at least. Rank 0 writes a line of JSON for
 * each size and kind of memory: the median, least and greatest time of the blocks.
 */
#include "timed_collectives.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LINE = 64 };
enum { MIN_BLOCKS = 3, MAX_BLOCKS = 7, MAX_ITERATIONS = 20000 };

int rank, ranks;

/* Where the result is, and whether it comes in shares of ranks, each with what that rank gave. */
typedef enum { NOTHING, SUM_IN_LARGE, SUM_IN_OTHER, SHARES_IN_LARGE, SHARES_IN_OTHER, ROOTS_IN_LARGE } Result;

typedef struct {
  const char* name;
  void (*run)(Buffers*);
  Result result;
} Collective;

static const Collective COLLECTIVES[] = {
    {"all_reduce", all_reduce, SUM_IN_LARGE},         {"all_gather", all_gather, SHARES_IN_LARGE},
    {"reduce_scatter", reduce_scatter, SUM_IN_OTHER}, {"all_to_all", all_to_all, SHARES_IN_OTHER},
    {"broadcast", broadcast, ROOTS_IN_LARGE},         {"barrier", barrier, NOTHING},
};

void fail(const char* text) {
  fprintf(stderr, "error on rank %d: %s\n", rank, text);
  give_up();
}

void* aligned(size_t bytes) { return aligned_alloc(LINE, (bytes + LINE - 1) / LINE * LINE); }

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

static float* filled(int memory, int count, float value) {
  float* buffer = take(memory, sizeof(float) * (count > 0 ? count : 1));
  if (buffer == NULL) fail("no memory");
  for (int i = 0; i < count; i++) buffer[i] = value;
  return buffer;
}

/* Every rank gives its number plus one; integers of this size are exact in any order of summation. */
static void check(const Collective* collective, Buffers* b) {
  collective->run(b);
  int is_large = collective->result == SUM_IN_LARGE || collective->result == SHARES_IN_LARGE ||
                 collective->result == ROOTS_IN_LARGE;
  int is_shared = collective->result == SHARES_IN_LARGE || collective->result == SHARES_IN_OTHER;
  int count = collective->result == NOTHING ? 0 : collective->result == SUM_IN_OTHER ? b->share : b->count;
  float sum = (float)ranks * (ranks + 1) / 2;
  for (int i = 0; i < count; i++) {
    float expected = is_shared ? i / b->share + 1 : collective->result == ROOTS_IN_LARGE ? 1 : sum;
    if ((is_large ? b->large : b->other)[i] != expected) fail("the result is wrong");
  }
  /* Zeros stay zeros however often they are summed up. */
  memset(b->large, 0, sizeof(float) * b->count);
  memset(b->other, 0, sizeof(float) * b->count);
}

/* The seconds of one iteration on the slowest rank, known to all ranks. */
static double block(const Collective* collective, Buffers* b, int iterations) {
  barrier(b);
  double start = now();
  for (int i = 0; i < iterations; i++) collective->run(b);
  return greatest((now() - start) / iterations);
}

static int within(double value, int least, int most) {
  return value < least ? least : value > most ? most : (int)value;
}

static int by_value(const void* a, const void* b) {
  double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static void measure(const Collective* collective, double seconds, int memory, int bytes) {
  int is_barrier = collective->result == NOTHING;
  Buffers b = {.count = is_barrier ? 0 : bytes / (int)sizeof(float)};
  b.share = b.count / ranks;
  b.large = filled(memory, b.count, rank + 1);
  b.other = filled(memory, b.count, rank + 1);
  check(collective, &b);

  /* The check was the first one: these do not set anything up any more. */
  double estimate = 0;
  for (int count = 1; count <= MAX_ITERATIONS; count *= 4) {
    estimate = block(collective, &b, count) + 1e-9;
    if (estimate * count >= seconds / 20) break;
  }
  int blocks = within(seconds / estimate, MIN_BLOCKS, MAX_BLOCKS);
  int iterations = within(seconds / blocks / estimate, 1, MAX_ITERATIONS);
  double times[MAX_BLOCKS];
  for (int i = 0; i < blocks; i++) times[i] = block(collective, &b, iterations);
  qsort(times, blocks, sizeof(double), by_value);
  double median = (times[(blocks - 1) / 2] + times[blocks / 2]) / 2;
  if (rank == 0) {
    printf("{\"collective\": \"%s\", \"bytes\": %d, \"ranks\": %d, ", collective->name, bytes, ranks);
    printf("\"memory\": \"%s\", ", MEMORIES[memory]);
    printf("\"time_us\": %.2f, \"min_us\": %.2f, \"max_us\": %.2f, ", median * 1e6, times[0] * 1e6,
           times[blocks - 1] * 1e6);
    printf("\"blocks\": %d, \"iterations\": %d}\n", blocks, iterations);
    fflush(stdout);
  }
  give_back(memory, b.large);
  give_back(memory, b.other);
}

int main(int argc, char** argv) {
  begin(&argc, &argv);
  if (argc < 4) fail("expected COLLECTIVE SECONDS BYTES..");
  const Collective* collective = NULL;
  for (size_t i = 0; i < sizeof(COLLECTIVES) / sizeof(COLLECTIVES[0]); i++)
    if (strcmp(COLLECTIVES[i].name, argv[1]) == 0) collective = &COLLECTIVES[i];
  if (collective == NULL) fail("expected the name of a collective");
  for (int i = 3; i < argc; i++)
    for (int memory = 0; MEMORIES[memory] != NULL; memory++)
      measure(collective, atof(argv[2]), memory, atoi(argv[i]));
  finish();
  return 0;
}
