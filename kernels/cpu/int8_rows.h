/* Rows of x in 8 bits: what the int8 products read. */
#ifndef TWOFOLD_INT8_ROWS_H
#define TWOFOLD_INT8_ROWS_H

#include <stddef.h>
#include <stdint.h>

/* Rows of codes that lie together for tile registers, and how many bytes of each. */
#define X_ROWS 16
#define X_TILE 64

/* x[r][k] = codes * scales[k / block][r]. Codes lie as the weights' words hold theirs: of each word's codes first those in the low
   bits of its bytes, then those above them; those beyond K are 0. Rows lie in sets of `capacity`, or of X_ROWS if `tiled`.

   With two `planes` as many codes, scales and sums follow those of a row (of a tiled set) and of a set: what the first left over
   where a scale's square is far above the row's mean, scales of 0 elsewhere. A few features that outgrow the rest make most of the error. */
struct int8_rows {
    int8_t *codes;  /* [rows][planes][stride], or `tiled` [sets][planes][stride / X_TILE][X_ROWS][X_TILE] */
    float *scales;  /* [sets][planes][blocks][rows of a set] */
    int32_t *sums;  /* the same: of a block's codes, times `factor` */
    ptrdiff_t stride, block, blocks;
    ptrdiff_t capacity; /* rows in the buffers; those beyond the given ones have scales of 0 */
    int tiled, planes;
};

static inline ptrdiff_t int8_rows_set(const struct int8_rows *x) { return x->tiled ? X_ROWS : x->capacity; }

/* Where scales and sums of a row's first block are; those of the next are int8_rows_set further on. */
static inline ptrdiff_t int8_rows_place(const struct int8_rows *x, ptrdiff_t row) {
    ptrdiff_t set = int8_rows_set(x);
    return row / set * set * x->planes * x->blocks + row % set;
}

struct int8_input {
    const float *x;
    ptrdiff_t x_stride, rows, columns;
    const int64_t *perm; /* feature j of a row is x[perm[j]]; NULL: x[j] */
    ptrdiff_t group;     /* features that share a scale, a multiple of the block; 0: a row's do, or with `scale` all */
    float scale;         /* 0: from the values */
    int bits;            /* of the weights: the order of the codes */
    int32_t factor;      /* 0: no sums are needed */
};

/* Fill `out`, whose sizes are given, in a buffer for its codes, scales and sums one after the other. */
void int8_rows_make(const struct int8_input *input, void *buffer, struct int8_rows *out);
#endif
