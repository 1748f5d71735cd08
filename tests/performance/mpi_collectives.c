/* The collectives of MPI, to be timed: mpirun -n N mpi_collectives COLLECTIVE SECONDS BYTES.. */
#include <mpi.h>
#include <stdlib.h>

#include "timed_collectives.h"

const char* const MEMORIES[] = {"staged", NULL};

void* take(int memory, size_t bytes) {
  (void)memory;
  return aligned(bytes);
}

void give_back(int memory, void* data) {
  (void)memory;
  free(data);
}

void all_reduce(Buffers* b) {
  MPI_Allreduce(MPI_IN_PLACE, b->large, b->count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

void all_gather(Buffers* b) {
  MPI_Allgather(b->other, b->share, MPI_FLOAT, b->large, b->share, MPI_FLOAT, MPI_COMM_WORLD);
}

void reduce_scatter(Buffers* b) {
  MPI_Reduce_scatter_block(b->large, b->other, b->share, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

void all_to_all(Buffers* b) {
  MPI_Alltoall(b->large, b->share, MPI_FLOAT, b->other, b->share, MPI_FLOAT, MPI_COMM_WORLD);
}

void broadcast(Buffers* b) { MPI_Bcast(b->large, b->count, MPI_FLOAT, 0, MPI_COMM_WORLD); }

void barrier(Buffers* b) {
  (void)b;
  MPI_Barrier(MPI_COMM_WORLD);
}

void begin(int* argc, char*** argv) {
  MPI_Init(argc, argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
}

void finish(void) { MPI_Finalize(); }

double greatest(double value) {
  double found;
  MPI_Allreduce(&value, &found, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return found;
}

void give_up(void) { MPI_Abort(MPI_COMM_WORLD, 1); }
