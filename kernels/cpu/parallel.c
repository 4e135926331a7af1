#include "parallel.h"

#include <stdlib.h>

typedef void (*gomp_parallel)(void (*body)(void *), void *arg, unsigned num_threads, unsigned flags);
typedef int (*omp_query)(void);

static gomp_parallel run_parallel;
static omp_query thread_number, team_size;

/* GOMP_parallel, omp_get_thread_num and omp_get_num_threads of libgomp (or of libomp, which exports them too). */
void twofold_set_team(void *parallel, void *get_thread_num, void *get_num_threads) {
    thread_number = (omp_query)get_thread_num;
    team_size = (omp_query)get_num_threads;
    run_parallel = (gomp_parallel)parallel;
}

struct job {
    team_body body;
    void *arg;
};

static void enter(void *arg) {
    const struct job *job = arg;
    job->body(job->arg, thread_number(), team_size());
}

void team_run(team_body body, void *arg, int num_threads) {
    if (num_threads <= 1 || !run_parallel) {
        body(arg, 0, 1);
        return;
    }
    struct job job = {body, arg};
    run_parallel(enter, &job, (unsigned)num_threads, 0);
}

void *thread_scratch(size_t bytes) {
    static _Thread_local void *buffer;
    static _Thread_local size_t capacity;
    if (bytes > capacity) {
        free(buffer);
        capacity = (bytes + 4095) & ~(size_t)4095;
        buffer = aligned_alloc(4096, capacity);
        if (!buffer) abort();
    }
    return buffer;
}
