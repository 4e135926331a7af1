/* The thread team under hostile scheduling; test_team.py compiles this with kernels/cpu/parallel.c's text in it.
   Workers' start is held back until `gate` opens, so what must not depend on a worker can be checked without clocks. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static atomic_int gate, started;

struct start {
    void *(*body)(void *);
    void *arg;
};

static void *late(void *arg) {
    struct start start = *(struct start *)arg;
    while (!atomic_load(&gate)) usleep(100);
    atomic_fetch_add(&started, 1);
    return start.body(start.arg);
}

static int create_late(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *), void *arg) {
    static struct start starts[64];
    static int count;
    starts[count] = (struct start){body, arg};
    return pthread_create(thread, attributes, late, &starts[count++]);
}

#define pthread_create create_late
#include "parallel.c"
#undef pthread_create

#define CHECK(condition)                                                 \
    do {                                                                 \
        if (!(condition)) {                                              \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition);      \
            _exit(1);                                                    \
        }                                                                \
    } while (0)

#define ITEMS 100

struct tally {
    atomic_int done[ITEMS];
    pthread_t owner;
    atomic_int by_others, other_holds, owner_may_go;
};

static void count_items(void *arg, ptrdiff_t first, ptrdiff_t last) {
    struct tally *tally = arg;
    for (ptrdiff_t i = first; i < last; i++) {
        atomic_fetch_add(&tally->done[i], 1);
        if (!pthread_equal(pthread_self(), tally->owner)) atomic_fetch_add(&tally->by_others, 1);
    }
}

static void run_and_check(ptrdiff_t count, ptrdiff_t grain) {
    struct tally tally = {.owner = pthread_self()};
    team_run(count_items, &tally, count, grain);
    for (int i = 0; i < ITEMS; i++) CHECK(tally.done[i] == (i < count));
}

/* Workers that have not started: the caller does everything. */
static void check_absent_workers(void) {
    struct tally tally = {.owner = pthread_self()};
    for (int i = 0; i < 3; i++) team_run(count_items, &tally, ITEMS, 7);
    CHECK(atomic_load(&started) == 0 && tally.by_others == 0);
    for (int i = 0; i < ITEMS; i++) CHECK(tally.done[i] == 3);
}

/* A worker that holds one piece: the caller does all others and comes back only after that piece is finished. */
static void hold_one(void *arg, ptrdiff_t first, ptrdiff_t last) {
    struct tally *tally = arg;
    if (!pthread_equal(pthread_self(), tally->owner)) {
        if (atomic_exchange(&tally->other_holds, 1) == 0) {
            for (;;) { /* until everything else is done, then long enough for the caller to fall asleep */
                int done = 0;
                for (int i = 0; i < ITEMS; i++) done += tally->done[i];
                if (done >= ITEMS - 1) break;
                usleep(100);
            }
            usleep(5000);
        }
    } else {
        while (!atomic_load(&tally->other_holds)) usleep(100); /* let a worker claim something */
    }
    count_items(arg, first, last);
}

static void check_slow_worker(void) {
    struct tally tally = {.owner = pthread_self()};
    team_run(hold_one, &tally, ITEMS, 1);
    CHECK(tally.other_holds == 1 && tally.by_others >= 1);
    for (int i = 0; i < ITEMS; i++) CHECK(tally.done[i] == 1);
}

static void *many_regions(void *seed) {
    unsigned state = (unsigned)(intptr_t)seed;
    for (int i = 0; i < 2000; i++) {
        state = state * 1103515245u + 12345u;
        run_and_check(state >> 16 & 63, (state >> 24 & 7) + 1);
        if (i % 500 == 0) usleep(300); /* workers fall asleep now and then */
    }
    return NULL;
}

static void nested(void *arg, ptrdiff_t first, ptrdiff_t last) {
    (void)arg, (void)first, (void)last;
    run_and_check(10, 1);
}

static void check_fork(void) {
#ifndef NO_FORK
    pid_t child = fork();
    if (child == 0) {
        run_and_check(ITEMS, 3);
        run_and_check(ITEMS, 1);
        _exit(0);
    }
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
#endif
}

int main(void) {
    static int threads = 3;
    pthread_t others[3];
    run_and_check(ITEMS, 1); /* one thread while nothing is set */
    twofold_set_threads_cell(&threads);
    check_absent_workers();
    check_fork();
    atomic_store(&gate, 1);
    check_slow_worker();
    for (intptr_t i = 0; i < 3; i++) CHECK(!pthread_create(&others[i], NULL, many_regions, (void *)(i + 1)));
    many_regions((void *)9);
    for (int i = 0; i < 3; i++) pthread_join(others[i], NULL);
    team_run(nested, NULL, 20, 1);
    check_fork();
    threads = 2; /* fewer again: worker 2 stays out */
    many_regions((void *)5);
    puts("ok");
    return 0; /* with workers alive */
}
