/* Rows of x rounded to what a quantized type holds, in float32. */
#ifndef TWOFOLD_ROUND_ROWS_H
#define TWOFOLD_ROUND_ROWS_H

#include <stddef.h>

/* In the order of rounding.py: which numbers, features that share a scale (0: a row's do), whether scales come from the values,
   whether there are zeros, and whether scales are powers of two. */
enum { ROUND_ELEMENT, ROUND_GROUP, ROUND_DYNAMIC, ROUND_ZEROS, ROUND_POWERS, NUM_ROUND_SIZES };

/* out [columns]: one row; `scale` and `zero` of static activations. It may lie where x does. */
void round_row(const ptrdiff_t *how, const float *x, ptrdiff_t columns, float scale, float zero, float *out);
#endif
