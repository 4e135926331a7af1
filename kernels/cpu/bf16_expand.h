/* Steps of a panel as tiles of bfloat16 [32 output features][STEP_K], each weight computed in float32 and rounded once.

   Codes of 4 bits are looked up: a feature and group have sixteen weights, which are rounded together and then found by one
   instruction for STEP_K codes. */
#ifndef TWOFOLD_BF16_EXPAND_H
#define TWOFOLD_BF16_EXPAND_H

#include "codes.h"
#include "groups.h"

/* Groups change at most every GROUP_K features. */
#define GROUP_K 16
#define NUM_HALVES (STEP_K / GROUP_K)

struct bf16_weights {
    const uint8_t *codes; /* [panels][steps][step_bytes] */
    const void *scales, *offsets; /* as in linear.h */
    const uint8_t *zeros;
    enum float_type scale_type;
    enum step_kind kind;
    enum bf16_coding coding;
    float centre;
    ptrdiff_t steps, step_bytes, groups, group_size;
};

/* What the groups of a step make of codes, kept while they are the same. */
struct bf16_groups {
    _Alignas(64) float scale[NUM_HALVES][PANEL], shift[NUM_HALVES][PANEL]; /* shift: what is taken from a code, or the offset */
    _Alignas(64) __m512bh table[PANEL]; /* NIBBLES: for each pair of features one of both, or for each feature one of both groups */
    ptrdiff_t index[NUM_HALVES], end; /* the first step that has other groups */
};

INLINE void bf16_forget(struct bf16_groups *g) { g->index[0] = g->index[1] = -1, g->end = 0; }

/* One step of a panel; `g` is that of the step before it, or forgotten. */
void bf16_expand(const struct bf16_weights *w, ptrdiff_t panel, ptrdiff_t step, struct bf16_groups *g, uint8_t *out);
#endif
