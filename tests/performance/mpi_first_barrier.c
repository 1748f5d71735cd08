/* mpirun -n N mpi_first_barrier: the least program of MPI. Rank 0 writes when the first barrier was over, by
 * the clock that all processes of a machine share. */
#include <mpi.h>
#include <stdio.h>
#include <time.h>

int main(int argc, char** argv) {
  int rank;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    printf("{\"monotonic_s\": %ld.%09ld}\n", (long)now.tv_sec, now.tv_nsec);
    fflush(stdout);
  }
  MPI_Finalize();
  return 0;
}
