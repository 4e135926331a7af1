/* One persistent team of threads for all kernels; parallel.c says how it stays out of the way of other processes. */
#ifndef TWOFOLD_PARALLEL_H
#define TWOFOLD_PARALLEL_H

#include <stddef.h>

/* Computes items first..last-1. Pieces run in any order, on any thread, and must not depend on each other. */
typedef void (*team_body)(void *arg, ptrdiff_t first, ptrdiff_t last);

/* Runs body over items 0..count-1 in pieces of `grain` items; returns when all are done. One piece's worth runs on the calling
   thread alone, as does everything when the team is busy with another caller. */
void team_run(team_body body, void *arg, ptrdiff_t count, ptrdiff_t grain);

/* How many threads may work, the caller included; at least 1. */
int team_size(void);

/* A buffer of the calling thread, aligned to a page, kept for the thread's life; valid until its next call. */
void *thread_scratch(size_t bytes);

/* Items per piece so that a piece has about `enough` of a work of which every item has `each`. */
static inline ptrdiff_t team_grain(ptrdiff_t enough, ptrdiff_t each) {
    return each > 0 && each < enough ? enough / each : 1;
}
#endif
