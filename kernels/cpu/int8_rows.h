/* Rows of x in 8 bits: what the int8 products read. */
#ifndef TWOFOLD_INT8_ROWS_H
#define TWOFOLD_INT8_ROWS_H

#include <stddef.h>
#include <stdint.h>

/* x[r][k] = codes * scales[k / block][r]. Codes lie as the weights' words hold theirs: of each word's codes first those in the low
   bits of its bytes, then those above them; those beyond K are 0. */
struct int8_rows {
    int8_t *codes;  /* [rows][stride] */
    float *scales;  /* [blocks][capacity] */
    int32_t *sums;  /* [blocks][capacity]: of a block's codes, times `factor` */
    ptrdiff_t stride, block, blocks;
    ptrdiff_t capacity; /* rows in the buffers; those beyond the given ones have scales of 0 */
};

struct int8_input {
    const float *x;
    ptrdiff_t x_stride, rows, columns;
    const int64_t *perm; /* feature j of a row is x[perm[j]]; NULL: x[j] */
    ptrdiff_t group;     /* features that share a scale, a multiple of the block; 0: a row's do, or with `scale` all */
    float scale;         /* 0: from the values */
    int bits;            /* of the weights: the order of the codes */
    int32_t factor;
};

/* Fill `out`, whose sizes are given, in a buffer for its codes, scales and sums one after the other. */
void int8_rows_make(const struct int8_input *input, void *buffer, struct int8_rows *out);
#endif
