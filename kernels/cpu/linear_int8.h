/* A product with x in 8 bits: what linear_int8.c and int8_tiles.c share. */
#ifndef TWOFOLD_LINEAR_INT8_H
#define TWOFOLD_LINEAR_INT8_H

#include "amx.h"
#include "int8_rows.h"
#include "linear.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

/* How codes become weights: (code - zero) * scale with the middle of the codes' range as zero, or with stored zeros, or
   code * scale + offset. */
enum coding { CENTRED, ZERO, OFFSET };

/* Whether tile registers multiply, and which of their kernels: for a block's sums in one tile, or of a panel in two. */
enum tiles { NONE, NARROW, WIDE };

struct product {
    struct linear w;
    struct int8_rows x;
    enum coding coding;
    ptrdiff_t block_words, blocks_per_group; /* words as they are stored */
    ptrdiff_t chunk, chunks; /* rows of x per piece, pieces */
    ptrdiff_t pieces;        /* of panels, for few rows */
    const int32_t *extra;    /* [sets][1 + blocks]: how many blocks some row of a set has in a second plane, and these; NULL: none */
    enum tiles tiles;
    int tile_words;        /* words of bytes that tiles take at a time, */
    ptrdiff_t block_steps; /* so many times for each block, */
    ptrdiff_t steps;       /* and in all; the last step may reach beyond K, where x's codes are 0 */
};

#define UNROLL_VECS _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECS; v++)

/* The blocks that follow for rows of x's set with `row`: how many, then which. */
static inline const int32_t *extra_blocks(const struct product *p, ptrdiff_t row) {
    static const int32_t none = 0;
    return p->extra ? p->extra + row / int8_rows_set(&p->x) * (1 + p->x.blocks) : &none;
}

static inline ptrdiff_t smaller(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

/* total + a b, rounded once where the target can: whether the compiler joins the two by itself hangs on the code around them. */
INLINE vf add_scaled(vf total, vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)total);
#elif defined(__FMA__) && VEC_BYTES == 32
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)total);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)total, (float32x4_t)a, (float32x4_t)b);
#else
    return total + a * b;
#endif
}

/* total += one block of one row: the sum of its products, scaled. */
INLINE vf add_block(vf total, vi sum, const int coding, vf scale, vi zero, vf offset, float x_scale, int32_t x_sum) {
    if (coding == ZERO) sum -= zero * splat_int(x_sum);
    total = add_scaled(total, to_float(sum), scale * splat(x_scale));
    if (coding == OFFSET) total = add_scaled(total, offset, splat(x_scale * (float)x_sum));
    return total;
}

/* A panel's codes as bytes, `centre` less: vector v of word k at out + k * step + v * apart. */
INLINE void expand_bits(const struct linear *w, const int bits, const int32_t *codes, int centre, int32_t *out, ptrdiff_t step,
                        ptrdiff_t apart) {
    typedef uint8_t bytes __attribute__((vector_size(VEC_BYTES)));
    const bytes less = (uint8_t)centre - (bytes){0};
    for (ptrdiff_t word = 0; word < w->words; word++, codes += PANEL)
        for (int j = 0; j < 8 / bits; j++, out += step)
            UNROLL_VECS {
                vi part = load_int(codes + v * LANES);
                if (bits < 8) part = (part >> (bits * j)) & splat_int(((1 << bits) - 1) * 0x01010101);
                part = (vi)((bytes)part - less);
                memcpy(out + v * apart, &part, sizeof part);
            }
}

static inline void expand(const struct linear *w, const int32_t *codes, int centre, int32_t *out, ptrdiff_t step, ptrdiff_t apart) {
    switch (w->bits) {
        case 2: expand_bits(w, 2, codes, centre, out, step, apart); break;
        case 4: expand_bits(w, 4, codes, centre, out, step, apart); break;
        case 8: expand_bits(w, 8, codes, centre, out, step, apart); break;
    }
}

/* Panels that are computed together at most. */
#define INT8_PANELS 8

/* Rows first..last-1 of panels panel..panel+panels-1 by vectors. More than twice DOT_ROWS rows need one panel's bytes of `scratch`, and
   then `panels` is 1. */
void int8_panels_run(const struct product *p, ptrdiff_t panel, int panels, ptrdiff_t first, ptrdiff_t last, int32_t *scratch);

/* Choose p's tiles; NONE where there are none or vectors are faster. With tiles x's rows come in tiles, too. */
void int8_tiles_plan(struct product *p);

#if HAVE_AMX
/* Bytes of a thread's scratch. */
size_t int8_tiles_scratch(const struct product *p);

/* Rows first..last-1 of a panel. The thread has called amx_configure(p->tile_words). */
void int8_tiles_run(const struct product *p, ptrdiff_t panel, ptrdiff_t first, ptrdiff_t last, void *scratch);
#endif
#endif
