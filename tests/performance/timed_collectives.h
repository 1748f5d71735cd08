/* What is timed, and what timing takes: each implementation of collectives defines these
 * (timed_collectives.c). */
#pragma once

#include <stddef.h>

extern int rank, ranks;

/* What rows call the kinds of memory that buffers may be in, all of which are measured. NULL is the end. */
extern const char* const MEMORIES[];
void* take(int memory, size_t bytes);
void give_back(int memory, void* data);
/* Ordinary memory that begins with a cache line, as that of torch's tensors does. */
void* aligned(size_t bytes);

/* What one operation works on: the elements of the largest buffer, and one rank's share of them. */
typedef struct {
  int count, share;
  float *large, *other;
} Buffers;

void all_reduce(Buffers* b);
void all_gather(Buffers* b);
void reduce_scatter(Buffers* b);
void all_to_all(Buffers* b);
void broadcast(Buffers* b);
void barrier(Buffers* b);

/* Sets `rank` and `ranks`. */
void begin(int* argc, char*** argv);
void finish(void);
/* Of the values of all ranks. */
double greatest(double value);
/* Ends all ranks. */
void give_up(void);

/* Says so, and ends all ranks. */
void fail(const char* text);
