/* One product y = x W^T, and how to compute a part of it: experts.c runs many in one region. */
#ifndef TWOFOLD_LINEAR_H
#define TWOFOLD_LINEAR_H

#include <stddef.h>
#include <stdint.h>

#include "half.h"

#define BFLOAT16_BITS 16
#define FLOAT16_BITS 17
/* Of floats in 8 and 4 bits, of which codes hold [N/PANEL][K][PANEL] bytes, or words as of integers. */
#define E4M3_BITS 18
#define E2M1_BITS 19

/* What a gated product's gates are put through: in the order of GATES in linear.py. */
enum gate { NO_GATE, SILU, GELU_TANH };

struct linear {
    const float *x;
    ptrdiff_t x_stride;
    ptrdiff_t rows;
    ptrdiff_t in_features;
    ptrdiff_t out_features;
    const float *bias;
    float *y;
    ptrdiff_t y_stride;
    /* Dense: panels float [N/PANEL][K][PANEL]. */
    const float *weight;
    /* Low-bit: codes int32 [N/PANEL][words][PANEL]; scales, zeros uint8 or NULL, offsets or NULL [N/PANEL][groups][PANEL].
       A weight is (code - zero) * scale, or with offsets code * scale + offset. */
    const int32_t *codes;
    const void *scales;
    const uint8_t *zeros;
    const void *offsets;
    enum float_type scale_type; /* of scales and offsets */
    ptrdiff_t words;
    ptrdiff_t groups;
    ptrdiff_t group_size;
    int bits; /* of a code; BFLOAT16_BITS or FLOAT16_BITS: two such floats in a word, without scales; or of small floats */
    ptrdiff_t piece_panels; /* panels per piece of work */
    /* With a gate the product's first half are gates, the second ups, each `ups` panels, and y takes gates put through it times ups. */
    enum gate gate;
    ptrdiff_t ups;
};

/* Items of a product cut into pieces of `piece_panels` panels, each with some rows: the piece size for a team that shares
   `all_items` such items among its threads, how many items that makes, and what one of them multiplies. */
ptrdiff_t linear_grid(const struct linear *p);
ptrdiff_t linear_piece(ptrdiff_t all_items);
ptrdiff_t linear_num_items(const struct linear *p);
ptrdiff_t linear_item_grain(const struct linear *p);

/* Computes items first..last-1 of the linear at `arg`. */
void linear_run_items(void *arg, ptrdiff_t first, ptrdiff_t last);

/* Panels that items are made of: those of y, or of gates. */
ptrdiff_t linear_panels(const struct linear *p);

/* The product with its panels from `panel` on written to part [rows from `row` on][width] instead. */
struct linear linear_part(const struct linear *p, ptrdiff_t row, ptrdiff_t panel, float *part, ptrdiff_t width);

/* A product with a gate, one of `gate`'s: y has half as many features as it, and these fill whole panels. */
void linear_set_gate(struct linear *p, int gate);

/* Rows first..last-1 of y, of `panels` panels, from gates and ups: parts [2][rows][panels * PANEL]. */
void linear_gate(const struct linear *p, ptrdiff_t first, ptrdiff_t last, ptrdiff_t panel, ptrdiff_t panels, const float *parts);

/* A product with x in 8 bits, in linear_int8.c. */
void twofold_linear_int8(const float *x, ptrdiff_t x_stride, ptrdiff_t rows, const void *const *tensors, const ptrdiff_t *sizes,
                         float input_scale, void *workspace, const float *bias, float *y, int gate);

/* A product in bfloat16, in linear_bf16.c. */
void twofold_linear_bf16(const float *x, ptrdiff_t x_stride, ptrdiff_t rows, const void *const *tensors, const ptrdiff_t *sizes,
                         void *workspace, const float *bias, float *y);
#endif
