/* A product with x and weights in bfloat16, summed in float32 by tile registers: what its files share. */
#ifndef TWOFOLD_LINEAR_BF16_H
#define TWOFOLD_LINEAR_BF16_H

#include "amx.h"
#include "linear.h"

/* Input features that a tile holds, and bytes of a tile's row of them. */
#define STEP_K 32
#define STEP_BYTES (2 * STEP_K)

/* How a step of a panel lies, 32 output features by STEP_K input features:
   NIBBLES  [16][STEP_K] bytes: codes of feature i in the low halves, of feature 16 + i in the high ones
   BYTES    [32][STEP_K] codes as signed bytes, or unsigned with offsets
   FLOATS8  [32][STEP_K] e4m3
   FLOATS16 [32][STEP_K] bfloat16, which tiles load as they lie */
enum step_kind { NIBBLES, BYTES, FLOATS8, FLOATS16 };

/* How codes become weights: (code - centre) * scale, (code - zero) * scale, code * scale + offset; or they number e2m1's floats. */
enum bf16_coding { BF16_CENTRED, BF16_ZERO, BF16_OFFSET, BF16_E2M1 };

#if HAVE_AMX_BF16
#include "bf16_expand.h"
#endif
#endif
