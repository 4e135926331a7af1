/* A tile of a product in float32: what its files share. */
#ifndef TWOFOLD_LINEAR_TILE_H
#define TWOFOLD_LINEAR_TILE_H

#include "linear.h"
#include "simd.h"

/* Features that are summed in one accumulator. */
#define SUM_K 128
/* Low-bit weights are decoded in registers for up to so many rows: the products of more take longer than decoding into the L1 cache
   and reading from there. */
#define FUSED_ROWS (TILE_ROWS >= 6 ? 4 : 3)
/* Panels that are computed together: while some rows of x pass by many, and of low-bit weights that are decoded in registers in
   step. */
#define GROUP_PANELS 4
/* How far ahead weights are asked for when each is used once, in features. */
#define PREFETCH_K 48

/* Rows of x that share a pointer: one or two strides further are addresses that cost nothing. */
#define POINTER_ROWS 3

#define UNROLL_ROWS _Pragma("GCC unroll 12") for (int r = 0; r < rows; r++)
#define UNROLL_VECS _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECS; v++)

#define ALIGNED _Alignas(VEC_BYTES)

typedef vf accumulators[TILE_ROWS][PANEL_VECS];

/* *sum += w value, value being a vector, or in the second a float in memory. In the processor's own words where it has registers for
   a tile: a compiler's choice among forms of this instruction costs copies of registers, one for every fourth product. */
INLINE void add_product(vf *sum, vf w, vf value) {
#if defined(__AVX512F__)
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(*sum) : "v"(w), "v"(value));
#else
    *sum += w * value;
#endif
}

INLINE void add_product_with(vf *sum, vf w, const float *value) {
#if defined(__AVX512F__)
    __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(*sum) : "v"(w), "m"(*value));
#else
    *sum += w * splat(*value);
#endif
}

/* Have *w in a register from here on: a compiler may take it from memory again for every use. */
INLINE void keep(vf *w) {
#if defined(__AVX512F__)
    __asm__("" : "+v"(*w));
#else
    (void)w;
#endif
}

/* sum [rows][PANEL] += x of one feature, `stride` floats from row to row, times the panel's weights of it. */
INLINE void add_column(const int rows, const float *x, ptrdiff_t stride, const vf *column, accumulators sum) {
    UNROLL_ROWS {
        vf value = splat(x[r * stride]);
        UNROLL_VECS add_product(&sum[r][v], column[v], value);
    }
}

/* Where the group that has feature k ends, `last` at most. */
static inline ptrdiff_t group_end(const struct linear *p, ptrdiff_t k, ptrdiff_t last) {
    ptrdiff_t end = (k / p->group_size + 1) * p->group_size;
    return end < last ? end : last;
}

/* CASE(rows) for each number of rows that tiles decoded in registers have; codes that cost least to decode have
   WIDE_CASES too. */
#if TILE_ROWS >= 6
#define ROW_CASES(CASE) CASE(1) CASE(2) CASE(3) CASE(4)
#else
#define ROW_CASES(CASE) CASE(1) CASE(2) CASE(3)
#endif
#if TILE_ROWS >= 12
#define WIDE_CASES(CASE) CASE(6) CASE(8)
#else
#define WIDE_CASES(CASE)
#endif

/* out [rows][PANEL] = base + sum, base [PANEL] per row at base_stride (0: the same for all), or NULL for zero. */
INLINE void finish(const int rows, accumulators sum, const float *base, ptrdiff_t base_stride, float *out, ptrdiff_t stride) {
    UNROLL_ROWS UNROLL_VECS {
        vf value = sum[r][v];
        if (base) value = load(base + r * base_stride + v * LANES) + value;
        store(out + r * stride + v * LANES, value);
    }
}

/* One tile of y: some rows from `row`, the features of one panel, summed over features begin..end and added to what y holds, of
   which features first..last are at hand. `dense` points to the weights of feature `first`, or is NULL to decode; `ahead` and
   `step` as in dense_tile. Or such tiles of `panels` panels, GROUP_PANELS at most, where they are decoded in registers. */
struct place {
    ptrdiff_t panel, row, first, last, begin, end;
    int panels;
    const float *dense, *ahead;
    ptrdiff_t step;
};

/* Add a part's sums to those of the parts before it, so_far [rows][PANEL], or the last part's to their place in y: rows of y may
   lie so that they push each other out of a cache. */
INLINE void write_part(const struct linear *p, const int rows, accumulators sum, struct place at, float *so_far) {
    float *y = p->y + at.row * p->y_stride + at.panel * PANEL;
    const float *bias = p->bias ? p->bias + at.panel * PANEL : NULL;
    const int is_first = at.first == at.begin, is_last = at.last == at.end;
    const ptrdiff_t width = p->out_features - at.panel * PANEL;
    if (width >= PANEL) {
        const float *base = !is_first ? so_far : at.first ? y : bias;
        ptrdiff_t stride = !is_first ? PANEL : at.first ? p->y_stride : 0;
        finish(rows, sum, base, stride, is_last ? y : so_far, is_last ? p->y_stride : PANEL);
        return;
    }
    finish(rows, sum, is_first ? NULL : so_far, PANEL, so_far, PANEL);
    for (int r = 0; r < rows; r++)
        for (ptrdiff_t n = 0; n < width; n++) {
            float base = at.first ? y[r * p->y_stride + n] : bias ? bias[n] : 0.0f;
            if (is_first) so_far[r * PANEL + n] += base;
            if (is_last) y[r * p->y_stride + n] = so_far[r * PANEL + n];
        }
}

static inline int is_small_float(const struct linear *p) { return p->bits == E4M3_BITS || p->bits == E2M1_BITS; }

/* Whether a tile of so many rows is decoded in registers; then low_bit_rows computes it, else dense_rows in linear.c from what
   expand_block writes: out [last - first][PANEL], the tile's weights. In linear_low_bit.c. */
int is_in_registers(const struct linear *p, ptrdiff_t rows);
void low_bit_rows(const struct linear *p, int rows, struct place at);
void expand_block(const struct linear *p, struct place at, float *out);

/* The same of small floats. In small_floats.c. */
void small_float_rows(const struct linear *p, int rows, struct place at);
void expand_small_floats(const struct linear *p, struct place at, float *out);
#endif
