/* Rows of bfloat16 as products of many rows read them. */
#ifndef TWOFOLD_BF16_ROWS_H
#define TWOFOLD_BF16_ROWS_H

#include "linear_bf16.h"

#if HAVE_AMX_BF16
/* Bytes from row to row of K features: whole steps, and an odd number of cache lines, so that sixteen rows never meet in the L1
   cache's sets. As bf16_rows.py has it. */
INLINE ptrdiff_t bf16_row_bytes(ptrdiff_t steps) { return (steps | 1) * STEP_BYTES; }

/* STEP_K floats, 0 from number `left` on. */
INLINE __m512bh bf16_round_step(const float *x, ptrdiff_t left) {
    const __mmask16 low = (__mmask16)(left >= LANES ? -1 : (1 << left) - 1);
    const __mmask16 high = (__mmask16)(left >= STEP_K ? -1 : left > LANES ? (1 << (left - LANES)) - 1 : 0);
    return _mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(high, x + LANES), _mm512_maskz_loadu_ps(low, x));
}

/* A row of floats to whole steps, 0 beyond K. */
INLINE void bf16_round_row(const float *x, ptrdiff_t features, uint16_t *out) {
    for (ptrdiff_t k = 0; k < features; k += STEP_K)
        _mm512_storeu_si512(out + k, (__m512i)bf16_round_step(x + k, features - k));
}
#endif
#endif
