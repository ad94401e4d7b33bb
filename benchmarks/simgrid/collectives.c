/* Times one operation in SimGrid: collectives OP BYTES...
   near, far: one message from rank 0 to rank 1, to the last; gather, bcast: BYTES of one rank. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  int rank, size;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  for (int i = 2; i < argc; ++i) {
    const int bytes = atoi(argv[i]);
    char *in = SMPI_SHARED_MALLOC(bytes), *out = SMPI_SHARED_MALLOC((size_t)bytes * size);
    MPI_Barrier(MPI_COMM_WORLD);
    int messages = 1;
    const double start = MPI_Wtime();
    if (!strcmp(argv[1], "gather")) {
      MPI_Allgather(in, bytes, MPI_BYTE, out, bytes, MPI_BYTE, MPI_COMM_WORLD);
    } else if (!strcmp(argv[1], "bcast")) {
      MPI_Bcast(in, bytes, MPI_BYTE, 0, MPI_COMM_WORLD);
    } else {
      const int to = strcmp(argv[1], "near") ? size - 1 : 1;
      const int turns = 100; /* there and back */
      for (int turn = 0; turn < turns; ++turn) {
        const int from = turn % 2 ? to : 0, at = turn % 2 ? 0 : to;
        if (rank == from) MPI_Send(in, bytes, MPI_BYTE, at, 0, MPI_COMM_WORLD);
        if (rank == at) MPI_Recv(in, bytes, MPI_BYTE, from, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      }
      messages = turns;
    }
    const double took = (MPI_Wtime() - start) / messages;
    double longest;
    MPI_Reduce(&took, &longest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    if (rank == 0) printf("%d %.12f\n", bytes, longest);
    SMPI_SHARED_FREE(in);
    SMPI_SHARED_FREE(out);
  }
  MPI_Finalize();
  return 0;
}
