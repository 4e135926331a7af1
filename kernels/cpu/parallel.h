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

/* A grain near `wanted` with which all threads end together, as far as so few items allow. */
static inline ptrdiff_t team_even_grain(ptrdiff_t count, ptrdiff_t wanted) {
    const ptrdiff_t threads = team_size();
    ptrdiff_t best = wanted, shortest = 0;
    if (threads < 2 || count > 8 * threads * wanted) return wanted;
    for (ptrdiff_t grain = wanted > 4 ? wanted - 4 : 1; grain <= wanted + 8 && grain <= 2 * wanted; grain++) {
        ptrdiff_t pieces = (count + grain - 1) / grain, time = (pieces + threads - 1) / threads * grain;
        if (!shortest || time <= shortest) best = grain, shortest = time;
    }
    return best;
}
#endif
