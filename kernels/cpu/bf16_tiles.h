/* Products in bfloat16 by tile registers: what those of few rows (linear_bf16_few.c) and of many (linear_bf16_many.c) share. */
#ifndef TWOFOLD_BF16_TILES_H
#define TWOFOLD_BF16_TILES_H

#include "linear_bf16.h"
#include "parallel.h"

#if HAVE_AMX_BF16
/* Rows that pass in one go while a panel is expanded step by step. */
#define FEW_ROWS (2 * AMX_ROWS)
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
    const __mmask16 low = (__mmask16)(left >= LANES ? -1 : (1 << left) - 1);
    const __mmask16 high = (__mmask16)(left >= STEP_K ? -1 : left > LANES ? (1 << (left - LANES)) - 1 : 0);
    if (p->perm)
        for (ptrdiff_t i = 0; i < left; i++) gathered[i] = x[p->perm[k + i]];
    const float *from = p->perm ? gathered : x + k;
    return (__m512)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(high, from + LANES), _mm512_maskz_loadu_ps(low, from));
}

/* Items are steps of blocks of rows. */
INLINE void round_x(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct bf16_product *p = arg;
    for (ptrdiff_t item = first; item < last; item++) {
        const ptrdiff_t row = item / p->w.steps * p->width, k = item % p->w.steps * STEP_K;
        const ptrdiff_t rows = smaller(p->rows - row, p->width);
        float *out = (float *)(p->tiles + item * p->width * STEP_BYTES);
        __m512 tile[AMX_ROWS];
        if (p->width == 1) {
            _mm512_storeu_ps(out, round_step(p, p->x + row * p->x_stride, k));
            continue;
        }
#pragma GCC unroll 16
        for (int r = 0; r < AMX_ROWS; r++)
            tile[r] = r < rows ? round_step(p, p->x + (row + r) * p->x_stride, k) : _mm512_setzero_ps();
        transpose(tile);
        const __mmask16 used = (__mmask16)((1u << p->width) - 1);
#pragma GCC unroll 16
        for (int pair = 0; pair < AMX_ROWS; pair++) _mm512_mask_storeu_ps(out + pair * p->width, used, tile[pair]);
    }
}

/* Tiles 0 to 3 are sums [16 features][width], 4 and 5 weights, 6 and 7 x. */
INLINE void configure(ptrdiff_t width) {
    struct amx_config config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.row_bytes[tile] = (uint16_t)(tile == 4 || tile == 5 ? STEP_BYTES : 4 * width);
        config.rows[tile] = AMX_ROWS;
    }
    amx_settle(&config);
    _tile_loadconfig(&config);
}

/* y's part of a block of rows and 16 features: sums [16 features][AMX_ROWS], or [16] of one row. */
INLINE void write_block(const struct bf16_product *p, const float *sums, ptrdiff_t row, ptrdiff_t last, ptrdiff_t feature) {
    const ptrdiff_t features = p->out_features - feature, rows = smaller(last - row, AMX_ROWS);
    if (features <= 0) return;
    const __mmask16 lanes = (__mmask16)(features >= LANES ? -1 : (1 << features) - 1);
    const __m512 bias = p->bias ? _mm512_maskz_loadu_ps(lanes, p->bias + feature) : _mm512_setzero_ps();
    float *y = p->y + row * p->out_features + feature;
    __m512 column[AMX_ROWS];
    if (p->width == 1) {
        column[0] = _mm512_load_ps(sums);
        _mm512_mask_storeu_ps(y, lanes, (__m512)(p->bias ? (vf)column[0] + (vf)bias : (vf)column[0]));
        return;
    }
#pragma GCC unroll 16
    for (int i = 0; i < AMX_ROWS; i++) column[i] = _mm512_load_ps(sums + i * AMX_ROWS);
    transpose(column);
#pragma GCC unroll 16
    for (int r = 0; r < AMX_ROWS; r++)
        if (r < rows) _mm512_mask_storeu_ps(y + r * p->out_features, lanes, (__m512)(p->bias ? (vf)column[r] + (vf)bias : (vf)column[r]));
}

INLINE void write_sums(const struct bf16_product *p, const int blocks, ptrdiff_t panel, ptrdiff_t row, ptrdiff_t last) {
    _Alignas(64) float sums[4][SUM_FLOATS];
    const ptrdiff_t stride = p->width == 1 ? 4 : VEC_BYTES;
    _tile_stored(0, sums[0], stride);
    _tile_stored(1, sums[1], stride);
    if (blocks == 2) {
        _tile_stored(2, sums[2], stride);
        _tile_stored(3, sums[3], stride);
    }
    amx_settle(sums);
    for (int i = 0; i < 2 * blocks; i++) write_block(p, sums[i], row + i / 2 * AMX_ROWS, last, panel * PANEL + i % 2 * LANES);
}

/* Sums of a panel's step, at `a`, and one or two blocks of rows. x passes the L1 cache by, so that the weights stay there. */
INLINE void multiply_step(const struct bf16_product *p, const int blocks, const uint8_t *a, const uint8_t *x, ptrdiff_t apart) {
    const ptrdiff_t stride = 4 * p->width;
    _tile_loadd(4, a, STEP_BYTES);
    if (blocks == 1)
        _tile_loadd(6, x, stride);
    else
        _tile_stream_loadd(6, x, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a + A_BYTES, STEP_BYTES);
    _tile_dpbf16ps(1, 5, 6);
    if (blocks == 1) return;
    _tile_stream_loadd(7, x + apart, stride);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
}

INLINE void clear_sums(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

INLINE const uint8_t *x_block(const struct bf16_product *p, ptrdiff_t row) {
    return p->tiles + row / p->width * p->w.steps * p->width * STEP_BYTES;
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
