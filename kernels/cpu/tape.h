/* A recorded step: calls of kernels with all their arguments; tape.c runs it. */
#ifndef TWOFOLD_TAPE_H
#define TWOFOLD_TAPE_H

#include <stddef.h>
#include <stdint.h>

/* One argument, in 64 bits whatever its type. */
union tape_value {
    void *p;
    ptrdiff_t n;
    int i;
    float f;
    uint32_t u;
    uint64_t bits;
};

/* Calls one kernel with the arguments at `values`; not 0: it failed. */
typedef int (*tape_call)(const union tape_value *values);

/* Compiled from signatures.py. */
extern const tape_call tape_calls[];
extern const ptrdiff_t num_tape_calls;
#endif
