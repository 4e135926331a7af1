/* Products with weights of small floats, e4m3 in 8 bits and e2m1 in 4, times a scale: decoded in registers for few rows, and
   once for many. Sums are made as in linear.c, so they are those of the dequantized matrix, bit for bit.

   A code that is no number has made its group's scale NaN when it was packed: here all codes are numbers. */
#include "codes.h"
#include "groups.h"
#include "linear_tile.h"
#include "parallel.h"

#define CODES_PER_WORD 8
/* How far ahead codes are asked for when each is used once. */
#define AHEAD_BYTES 1024
#define PIECE_WORK (1 << 15)

/* e2m1: magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 in the low three bits, the sign above them. */
INLINE vf decode_e2m1(vi code) {
#if defined(__AVX512F__)
    const __m512 values = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    return (vf)_mm512_permutexvar_ps((__m512i)code, values);
#else
    vi size = code & splat_int(7);
    vf normal = (vf)((size << 22) + splat_int(126 << 23)), small = to_float(size) * splat(0.5f);
    return (vf)((vi)choose(size < splat_int(2), small, normal) | (code & splat_int(8)) << 28);
#endif
}

/* One feature's weights: of a panel's codes, and what its group's scales are. */
INLINE void load_column(const int bits, const char *codes, ptrdiff_t k, const vf *scale, vf *column) {
    UNROLL_VECS {
        if (bits == E4M3_BITS) {
            column[v] = load_e4m3((const int8_t *)codes + k * PANEL + v * LANES) * scale[v];
        } else {
            vi word = load_int((const int32_t *)(const void *)codes + k / CODES_PER_WORD * PANEL + v * LANES);
            column[v] = decode_e2m1(word >> splat_int((int32_t)(k % CODES_PER_WORD * 4))) * scale[v];
        }
    }
}

INLINE void load_scales(const struct linear *p, const int bits, ptrdiff_t panel, ptrdiff_t index, vf *scale) {
    UNROLL_VECS {
        scale[v] = load_floats(p->scales, p->scale_type, (panel * p->groups + index) * PANEL + v * LANES);
        if (bits == E4M3_BITS) scale[v] *= splat(E4M3_UNIT);
    }
}

INLINE const char *panel_codes(const struct linear *p, ptrdiff_t panel) {
    return (const char *)(p->codes + panel * p->words * PANEL);
}

INLINE void run_part(const struct linear *p, const int rows, const int bits, struct place at, float *so_far) {
    const char *codes = panel_codes(p, at.panel);
    const float *x = p->x + at.row * p->x_stride;
    const ptrdiff_t line = bits == E4M3_BITS ? PANEL : PANEL / 2;
    accumulators sum;
    UNROLL_ROWS UNROLL_VECS sum[r][v] = (vf){0};
    for (ptrdiff_t k = at.first; k < at.last;) {
        ptrdiff_t end = group_end(p, k, at.last);
        vf scale[PANEL_VECS];
        load_scales(p, bits, at.panel, k / p->group_size, scale);
        for (; k < end; k++) {
            vf column[PANEL_VECS];
            __builtin_prefetch(codes + k * line + AHEAD_BYTES);
            load_column(bits, codes, k, scale, column);
            add_column(rows, x + k, p->x_stride, column, sum);
        }
    }
    write_part(p, rows, sum, at, so_far);
}

INLINE void run_tile(const struct linear *p, const int rows, const int bits, struct place at) {
    ALIGNED float so_far[TILE_ROWS * PANEL];
    for (at.begin = at.first, at.end = at.last; at.first < at.end; at.first = at.last) {
        at.last = at.first + SUM_K < at.end ? at.first + SUM_K : at.end;
        run_part(p, rows, bits, at, so_far);
    }
}

/* A function for each: a compiler takes longer for all in one. */
#define TILES(n)                                                                                                                    \
    static __attribute__((noinline)) void e4m3_##n(const struct linear *p, struct place at) { run_tile(p, n, E4M3_BITS, at); }     \
    static __attribute__((noinline)) void e2m1_##n(const struct linear *p, struct place at) { run_tile(p, n, E2M1_BITS, at); }
#define CASE(n) \
    case n: if (p->bits == E4M3_BITS) e4m3_##n(p, at); else e2m1_##n(p, at); break;

ROW_CASES(TILES)

void small_float_rows(const struct linear *p, int rows, struct place at) {
    for (const ptrdiff_t end = at.panel + at.panels; at.panel < end; at.panel++) {
        switch (rows) {
            ROW_CASES(CASE)
        }
    }
}
#undef CASE
#undef TILES

INLINE void expand(const struct linear *p, const int bits, struct place at, float *out) {
    const char *codes = panel_codes(p, at.panel);
    for (ptrdiff_t k = at.first; k < at.last;) {
        ptrdiff_t end = group_end(p, k, at.last);
        vf scale[PANEL_VECS];
        load_scales(p, bits, at.panel, k / p->group_size, scale);
        for (; k < end; k++, out += PANEL) {
            vf column[PANEL_VECS];
            load_column(bits, codes, k, scale, column);
            UNROLL_VECS store(out + v * LANES, column[v]);
        }
    }
}

void expand_small_floats(const struct linear *p, struct place at, float *out) {
    if (p->bits == E4M3_BITS)
        expand(p, E4M3_BITS, at, out);
    else
        expand(p, E2M1_BITS, at, out);
}

struct splitting {
    int32_t *words;
    int32_t *no_number;
};

/* Items are PANEL words, of four codes each. */
static void split_words(void *arg, ptrdiff_t first, ptrdiff_t last) {
    typedef int8_t lane_bytes __attribute__((vector_size(LANES)));
    const struct splitting *p = arg;
    lane_bytes found = {0};
    for (ptrdiff_t block = first; block < last; block++) {
        int32_t *words = p->words + block * PANEL;
        vi word[PANEL_VECS];
        UNROLL_VECS word[v] = load_int(words + v * LANES);
        for (int j = 0; j < 4; j++)
            UNROLL_VECS {
                lane_bytes bytes = __builtin_convertvector(word[v] >> splat_int(8 * j), lane_bytes);
                found |= (bytes & 0x7F) == 0x7F;
                memcpy((char *)words + j * PANEL + v * LANES, &bytes, sizeof bytes);
            }
    }
    for (int lane = 0; lane < LANES; lane++)
        if (found[lane]) __atomic_store_n(p->no_number, 1, __ATOMIC_RELAXED);
}

/* Words of four e4m3 codes per output feature become a line of bytes for each of the four input features, in the same place.
   *no_number becomes 1 where a code is no number. */
void twofold_split_words(int32_t *words, ptrdiff_t blocks, int32_t *no_number) {
    struct splitting job = {words, no_number};
    team_run(split_words, &job, blocks, team_grain(PIECE_WORK, 4 * PANEL));
}
