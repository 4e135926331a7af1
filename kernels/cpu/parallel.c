/* The thread team. Every region's pieces are claimed one by one from a counter, by the caller and by whichever workers run, so
   a region never waits for a worker that has claimed nothing: with all cores taken by other processes the caller does the work
   alone. The caller waits only for pieces that were claimed and are not finished.

   `ticket` is the whole protocol: the region's number above, the pieces nobody has claimed below. A worker reads the ticket,
   then the region's description, then claims with a compare-and-swap of that ticket. Success means that a piece of that very
   region was still unclaimed, hence the region was not over and the description, which only changes between regions, was its own.

   Waiting threads look at memory for SPIN_NS, longer than the pause between two kernels of a step, then sleep in the kernel;
   who changes what they wait for makes a system call only if somebody sleeps.

   Workers may be tied to a CPU each; what the caller runs on is the caller's affair. */
#define _GNU_SOURCE
#include "parallel.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#if defined(__linux__) && !defined(TWOFOLD_NO_FUTEX)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAVE_FUTEX 1
#endif

#if defined(__linux__)
#include <sched.h>
#define HAVE_AFFINITY 1
#endif

#define SPIN_NS 60000
#define MAX_WORKERS 255
/* What two threads write must not share a cache line; neighbours are fetched in pairs. */
#define LINE _Alignas(128)

static struct {
    LINE _Atomic uint64_t ticket;
    LINE _Atomic uint32_t finished; /* pieces of this region */
    LINE _Atomic uint32_t region;   /* changes with every region; idle workers wait for that */
    LINE _Atomic int idle_sleepers, caller_sleeps, busy;
    /* The region's description. */
    LINE _Atomic(team_body) body;
    _Atomic(void *) arg;
    _Atomic ptrdiff_t count, grain;
    _Atomic int helpers;
    /* Touched by the caller that holds `busy`. */
    int num_workers, tied;
    pthread_t workers[MAX_WORKERS];
} team;

/* Shared with the platform: a number; and how often a list was set, how many CPUs it has, the CPUs (the caller's first). */
static const int *num_threads;
static const volatile int *team_cpus;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t scratch_key;

#ifdef HAVE_FUTEX
static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(_Atomic uint32_t *word, int count) {
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

static void reset_sleep(void) {}
#else
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    pthread_mutex_lock(&mutex);
    while (atomic_load(word) == value) pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
}

static void wake(_Atomic uint32_t *word, int count) {
    (void)word, (void)count;
    pthread_mutex_lock(&mutex);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
}

static void reset_sleep(void) {
    pthread_mutex_init(&mutex, NULL);
    pthread_cond_init(&changed, NULL);
}
#endif

static void pause_core(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Whether *word stops being `value` within SPIN_NS. */
static int spin_while(_Atomic uint32_t *word, uint32_t value) {
    int64_t end = 0;
    for (;;) {
        for (int i = 0; i < 32; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != value) return 1;
            pause_core();
        }
        int64_t now = now_ns();
        if (!end) end = now + SPIN_NS;
        if (now >= end) return 0;
    }
}

struct piece {
    team_body body;
    void *arg;
    ptrdiff_t first, last;
};

/* Claim a piece of the region that is open, if this thread (0: the caller) takes part in it. */
static int claim(int thread, struct piece *piece) {
    uint64_t ticket = atomic_load_explicit(&team.ticket, memory_order_acquire);
    for (;;) {
        ptrdiff_t left = (ptrdiff_t)(uint32_t)ticket;
        if (left == 0 || thread > atomic_load_explicit(&team.helpers, memory_order_relaxed)) return 0;
        ptrdiff_t count = atomic_load_explicit(&team.count, memory_order_relaxed);
        ptrdiff_t grain = atomic_load_explicit(&team.grain, memory_order_relaxed);
        piece->body = atomic_load_explicit(&team.body, memory_order_relaxed);
        piece->arg = atomic_load_explicit(&team.arg, memory_order_relaxed);
        if (!atomic_compare_exchange_weak_explicit(&team.ticket, &ticket, ticket - 1, memory_order_acq_rel, memory_order_acquire))
            continue;
        piece->first = ((count + grain - 1) / grain - left) * grain;
        piece->last = piece->first + grain < count ? piece->first + grain : count;
        return 1;
    }
}

/* Work on the open region until nothing is left to claim. */
static void take_part(int thread) {
    struct piece piece;
    while (claim(thread, &piece)) {
        piece.body(piece.arg, piece.first, piece.last);
        atomic_fetch_add(&team.finished, 1);
        if (thread && atomic_load(&team.caller_sleeps)) wake(&team.finished, 1);
    }
}

static void *work(void *number) {
    for (;;) {
        uint32_t region = atomic_load(&team.region);
        take_part((int)(intptr_t)number);
        if (spin_while(&team.region, region)) continue;
        atomic_fetch_add(&team.idle_sleepers, 1);
        if (atomic_load(&team.region) == region) sleep_while(&team.region, region);
        atomic_fetch_sub(&team.idle_sleepers, 1);
    }
    return NULL;
}

#ifdef HAVE_AFFINITY
/* Tie a worker to its CPU, or let it go where the calling thread goes. One that the container refuses stays as it is. */
static void tie(pthread_t thread, int number) {
    cpu_set_t wanted;
    if (number < team_cpus[1]) {
        CPU_ZERO(&wanted);
        CPU_SET(team_cpus[2 + number], &wanted);
    } else if (pthread_getaffinity_np(pthread_self(), sizeof wanted, &wanted)) {
        return;
    }
    pthread_setaffinity_np(thread, sizeof wanted, &wanted);
}
#else
static void tie(pthread_t thread, int number) { (void)thread, (void)number; }
#endif

/* Follow a list of CPUs that has changed. */
static void tie_workers(void) {
    for (int i = 0; i < team.num_workers; i++) tie(team.workers[i], i + 1);
    team.tied = team_cpus[0];
}

/* Signals are for the program's own threads. Fewer workers than asked for is no error: the caller does their share. */
static void start_workers(int wanted) {
    sigset_t all, before;
    pthread_attr_t detached;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    while (team.num_workers < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, &detached, work, (void *)(intptr_t)(team.num_workers + 1))) break;
        team.workers[team.num_workers++] = thread;
        if (team_cpus && team_cpus[1]) tie(thread, team.num_workers);
    }
    pthread_attr_destroy(&detached);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* A forked child has none of the workers and must not wait for what they had claimed. */
static void forget_workers(void) {
    team.num_workers = 0;
    atomic_store(&team.ticket, 0);
    atomic_store(&team.idle_sleepers, 0);
    atomic_store(&team.caller_sleeps, 0);
    atomic_store(&team.busy, 0);
    reset_sleep();
}

static void set_up(void) {
    pthread_key_create(&scratch_key, free);
    pthread_atfork(NULL, NULL, forget_workers);
}

static void open_region(team_body body, void *arg, ptrdiff_t count, ptrdiff_t grain, int helpers) {
    atomic_store_explicit(&team.body, body, memory_order_relaxed);
    atomic_store_explicit(&team.arg, arg, memory_order_relaxed);
    atomic_store_explicit(&team.count, count, memory_order_relaxed);
    atomic_store_explicit(&team.grain, grain, memory_order_relaxed);
    atomic_store_explicit(&team.helpers, helpers, memory_order_relaxed);
    atomic_store_explicit(&team.finished, 0, memory_order_relaxed);
    uint32_t region = atomic_load_explicit(&team.region, memory_order_relaxed) + 1;
    atomic_store(&team.ticket, (uint64_t)region << 32 | (uint64_t)((count + grain - 1) / grain));
    atomic_store(&team.region, region);
    if (atomic_load(&team.idle_sleepers)) wake(&team.region, helpers);
}

static void wait_for_claimed(uint32_t pieces) {
    uint32_t finished;
    while ((finished = atomic_load(&team.finished)) < pieces) {
        if (spin_while(&team.finished, finished)) continue;
        atomic_store(&team.caller_sleeps, 1);
        if (atomic_load(&team.finished) == finished) sleep_while(&team.finished, finished);
        atomic_store(&team.caller_sleeps, 0);
    }
}

void team_run(team_body body, void *arg, ptrdiff_t count, ptrdiff_t grain) {
    int helpers = team_size() - 1;
    if (count <= 0) return;
    if (grain < 1) grain = 1;
    if (count / grain > INT32_MAX) grain = count / INT32_MAX + 1;
    ptrdiff_t pieces = (count + grain - 1) / grain;
    if (helpers < 1 || pieces < 2 || atomic_exchange(&team.busy, 1)) {
        body(arg, 0, count);
        return;
    }
    pthread_once(&once, set_up);
    if (team_cpus && team.tied != team_cpus[0]) tie_workers();
    if (team.num_workers < helpers) start_workers(helpers);
    open_region(body, arg, count, grain, helpers);
    take_part(0);
    wait_for_claimed((uint32_t)pieces);
    atomic_store(&team.busy, 0);
}

int team_size(void) {
    int size = num_threads ? *(volatile const int *)num_threads : 1;
    return size < 1 ? 1 : size > MAX_WORKERS ? MAX_WORKERS : size;
}

/* `cell` holds the number of threads and is read anew by every region; it must live as long as the library. */
void twofold_set_threads_cell(const int *cell) { num_threads = cell; }

/* `list` is read when its first number changes, and must live as long as the library. */
void twofold_set_team_cpus(const int *list) { team_cpus = list; }

void *thread_scratch(size_t bytes) {
    static _Thread_local void *buffer;
    static _Thread_local size_t capacity;
    if (bytes > capacity) {
        free(buffer);
        capacity = (bytes + 4095) & ~(size_t)4095;
        buffer = aligned_alloc(4096, capacity);
        if (!buffer) abort();
        pthread_once(&once, set_up);
        pthread_setspecific(scratch_key, buffer);
    }
    return buffer;
}
