/* Products in bfloat16 by tile registers: what those of few rows (linear_bf16_few.c) and of many (linear_bf16_many.c) share. */
#ifndef TWOFOLD_BF16_TILES_H
#define TWOFOLD_BF16_TILES_H

#include "bf16_rows.h"
#include "parallel.h"

#if HAVE_AMX_BF16
/* Rows for which a panel is expanded step by step, once for every two blocks of AMX_ROWS: more cost less where it is turned into
   tiles for all of them. */
#define FEW_ROWS (3 * AMX_ROWS)
#define A_BYTES (AMX_ROWS * STEP_BYTES)
#define SUM_FLOATS (AMX_ROWS * LANES)

struct bf16_product {
    struct bf16_weights w;
    const float *x;
    ptrdiff_t x_stride, rows, in_features, out_features;
    const int64_t *perm;
    uint8_t *tiles; /* x: [row blocks][steps][STEP_K / 2 pairs][width][2] */
    ptrdiff_t width; /* rows of a block */
    ptrdiff_t piece_panels, panels, pieces;
    const float *bias;
    float *y;
};

INLINE ptrdiff_t smaller(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

/* Sixteen rows of sixteen words become columns. */
INLINE void transpose(__m512 *r) {
    __m512 t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = (__m512)_mm512_unpacklo_pd((__m512d)t[i], (__m512d)t[i + 2]);
        r[i + 1] = (__m512)_mm512_unpackhi_pd((__m512d)t[i], (__m512d)t[i + 2]);
        r[i + 2] = (__m512)_mm512_unpacklo_pd((__m512d)t[i + 1], (__m512d)t[i + 3]);
        r[i + 3] = (__m512)_mm512_unpackhi_pd((__m512d)t[i + 1], (__m512d)t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512 low = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88), high = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xDD);
        __m512 low2 = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88), high2 = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xDD);
        t[i] = _mm512_shuffle_f32x4(low, low2, 0x88);
        t[i + 8] = _mm512_shuffle_f32x4(low, low2, 0xDD);
        t[i + 4] = _mm512_shuffle_f32x4(high, high2, 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(high, high2, 0xDD);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

/* STEP_K features of a row in bfloat16, 0 beyond K. */
INLINE __m512 round_step(const struct bf16_product *p, const float *x, ptrdiff_t k) {
    float gathered[STEP_K];
    const ptrdiff_t left = smaller(p->in_features - k, STEP_K);
    if (p->perm)
        for (ptrdiff_t i = 0; i < left; i++) gathered[i] = x[p->perm[k + i]];
    return (__m512)bf16_round_step(p->perm ? gathered : x + k, left);
}

INLINE void clear_sums(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* y of up to FEW_ROWS rows. */
void linear_bf16_few(struct bf16_product *p);

/* x of many rows in bfloat16, 0 beyond K to whole steps; bytes from row to row. */
struct bf16_rows {
    const void *x;
    ptrdiff_t stride;
};

/* What takes silu of the first half of y times the second, in bfloat16; elements from row to row. */
struct bf16_gate {
    uint16_t *out;
    ptrdiff_t stride;
};

/* y of many rows of x; or with a gate (else NULL), what that takes. */
void linear_bf16_many(const struct bf16_product *p, struct bf16_rows x, const struct bf16_gate *gate);
#endif
#endif
