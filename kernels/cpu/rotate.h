/* Rotary embedding of one head: one loop for whoever rotates, so that all get the same bits. */
#ifndef TWOFOLD_ROTATE_H
#define TWOFOLD_ROTATE_H

#include <stddef.h>

/* Features i and i + half are turned by angle i, in place. */
static inline void rotate_halves(float *x, const float *cosine, const float *sine, ptrdiff_t half) {
    for (ptrdiff_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
    }
}
#endif
