/* One thread team: the OpenMP runtime that torch has loaded, called through pointers, so that the two never fight. */
#ifndef TWOFOLD_PARALLEL_H
#define TWOFOLD_PARALLEL_H

#include <stddef.h>

typedef void (*team_body)(void *arg, int thread, int num_threads);

/* Runs body(arg, i, n) for i in 0..n-1, n at most num_threads; returns when all are done. */
void team_run(team_body body, void *arg, int num_threads);

/* A buffer of the calling thread, aligned to a page, kept for the thread's life; valid until its next call. */
void *thread_scratch(size_t bytes);

/* The half-open share of `count` items that thread i of n takes. */
static inline void team_share(ptrdiff_t count, int thread, int num_threads, ptrdiff_t *first, ptrdiff_t *last) {
    *first = count * thread / num_threads;
    *last = count * (thread + 1) / num_threads;
}
#endif
