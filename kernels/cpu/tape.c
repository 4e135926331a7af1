/* Runs a recorded step in one call. The kernels are those that a step without a recording calls, one after the other on the calling
   thread; what they share out goes to the team of parallel.c, whose workers look out for the next region meanwhile. So a step
   waits for no thread that has claimed nothing, here as elsewhere, and a kernel with a single piece costs a call of a function. */
#include "tape.h"

#include <time.h>

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* program: for each of `count` calls the kernel's place in tape_calls, the number of its arguments, the arguments. `times` is NULL or
   gets the nanoseconds of each call. Returns 0, or at the first call that fails its number, from 1 on. */
int twofold_tape_run(const union tape_value *program, ptrdiff_t count, int64_t *times) {
    for (ptrdiff_t i = 0; i < count; i++) {
        int64_t start = times ? now_ns() : 0;
        if (tape_calls[program[0].n](program + 2)) return (int)i + 1;
        program += 2 + program[1].n;
        if (times) times[i] = now_ns() - start;
    }
    return 0;
}
