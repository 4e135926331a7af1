/* Products with weights of few bits or of 16-bit floats, in panels of codes: decoded in registers for few rows, and once for more.
   Sums are made as in linear.c, so they are those of the dequantized matrix, bit for bit.

   A few rows pass by several panels in step, each a stream of its own that the processor's prefetchers follow: they keep more
   memory on its way than for one. */
#include "groups.h"
#include "linear_tile.h"

/* Features of a panel between those of the others, 4 KiB of 16-bit floats; divides SUM_K. Integers take longer to decode than to
   arrive, and panel after panel less long than in step. */
#define TURN_K 64
/* How far ahead codes are asked for, in words: panels in step have the others in between. */
#define AHEAD 768
#define AHEAD_IN_STEP 384
/* Added to a code's bits, this makes a float of them, 2^23 and the code. */
#define FLOAT_BITS 0x4B000000
#define FLOAT_BASE 0x1p23f

/* How codes become weights: the zeros may be stored, half the codes' range where a table of codes minus zero makes the difference
   free, or replaced by an offset; or a code is a float of 16 bits. */
enum coding { ZERO, CENTRED, OFFSET, BFLOAT, HALF, NUM_CODINGS };

static enum coding coding_of(const struct linear *p) {
    if (p->bits >= BFLOAT16_BITS) return p->bits == BFLOAT16_BITS ? BFLOAT : HALF;
    return p->offsets ? OFFSET : p->bits == 4 && !p->zeros ? CENTRED : ZERO;
}

/* The scale and zero, or offset, of one group of one panel. Codes of 8 bits have FLOAT_BASE in their zeros where decode has it. */
struct group {
    vf scale[PANEL_VECS];
    vf zero[PANEL_VECS];
};

INLINE struct group load_group(const struct linear *p, const int bits, const int coding, ptrdiff_t panel, ptrdiff_t index) {
    struct group group;
    ptrdiff_t place = (panel * p->groups + index) * PANEL;
    if (coding == BFLOAT || coding == HALF) {
        UNROLL_VECS group.scale[v] = group.zero[v] = splat(0.0f);
        return group;
    }
    UNROLL_VECS {
        group.scale[v] = load_floats(p->scales, p->scale_type, place + v * LANES);
        if (coding == OFFSET)
            group.zero[v] = load_floats(p->offsets, p->scale_type, place + v * LANES);
        else if (p->zeros)
            group.zero[v] = to_float(load_zeros(p->zeros + place + v * LANES));
        else
            group.zero[v] = splat((float)(1 << (bits - 1)));
#if defined(__AVX512BW__)
        if (bits == 8 && coding == ZERO) group.zero[v] += splat(FLOAT_BASE);
#endif
    }
    return group;
}

#if defined(__AVX512BW__)
/* FLOAT_BASE and code number j of 8 bits of each word: one instruction where a shift, a mask and a conversion are three. */
INLINE vf float_of_byte(vi word, int j) {
    const __m512i base = _mm512_set1_epi32(FLOAT_BITS);
    if (j == 0) return (vf)((word & splat_int(255)) | (vi)base);
    const vi from = {0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12}; /* within 16 bytes */
    return (vf)_mm512_mask_shuffle_epi8(base, 0x1111111111111111, (__m512i)word, (__m512i)(from + splat_int(j)));
}

/* Number j of the two float16 in each word: first all of one, then all of the other, as the conversion takes them. */
INLINE vf float_of_half(vi word, int j) {
    const __m512i even = _mm512_setr_epi32(0x20000, 0x60004, 0xA0008, 0xE000C, 0x120010, 0x160014, 0x1A0018, 0x1E001C, 0x30001, 0x70005,
                                           0xB0009, 0xF000D, 0x130011, 0x170015, 0x1B0019, 0x1F001D);
    const __m512i sorted = _mm512_permutexvar_epi16(even, (__m512i)word);
    return (vf)_mm512_cvtph_ps(j ? _mm512_extracti64x4_epi64(sorted, 1) : _mm512_castsi512_si256(sorted));
}
#endif

/* The weight that code number j of each lane's word stands for: (code - zero) * scale, the difference being exact, or
   code * scale + zero with an offset as `zero`; that product is exact for scales of up to 16 bits. */
INLINE vf decode(vi word, const int bits, const int coding, int j, vf scale, vf zero) {
    vi code = word >> (bits * j);
    if (coding == BFLOAT) return (vf)(j ? word & splat_int(-65536) : word << 16);
#if defined(__AVX512BW__)
    if (coding == HALF) return float_of_half(word, j);
    if (bits == 8 && coding == OFFSET) return (float_of_byte(word, j) - splat(FLOAT_BASE)) * scale + zero;
    if (bits == 8) return (float_of_byte(word, j) - zero) * scale;
#endif
    if (coding == HALF) {
        vf magnitude = (vf)((code & splat_int(0x7fff)) << 13) * splat(0x1p112f);
        vi special = ((code & splat_int(0x7c00)) == splat_int(0x7c00)) & splat_int(0x7f800000); /* infinity and NaN */
        return (vf)((vi)magnitude | special | (code & splat_int(0x8000)) << 16);
    }
#if defined(__AVX512F__)
    if (bits == 4) {
        const float shift = coding == CENTRED ? -8.0f : 0.0f;
        const vf value = (vf)_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15) + splat(shift);
        vf difference = (vf)_mm512_permutexvar_ps((__m512i)code, (__m512)value);
        if (coding == OFFSET) return difference * scale + zero;
        return (coding == CENTRED ? difference : difference - zero) * scale;
    }
#endif
    vf value = to_float(code & splat_int((1 << bits) - 1));
    return coding == OFFSET ? value * scale + zero : (value - zero) * scale;
}

/* sum [rows][PANEL] += x times the weights of features first..last of a low-bit panel, decoding in registers. */
INLINE void low_bit_tile(const struct linear *p, const int bits, const int coding, const int rows, const float *x, ptrdiff_t panel,
                         ptrdiff_t first, ptrdiff_t last, accumulators sum) {
    const int per_word = 32 / bits;
    const int32_t *codes = p->codes + panel * p->words * PANEL;
    for (ptrdiff_t k = first; k < last;) {
        ptrdiff_t index = k / p->group_size, end = (index + 1) * p->group_size;
        if (end > last) end = last;
        struct group group = load_group(p, bits, coding, panel, index);
        for (; k < end; k += per_word) {
            const int32_t *place = codes + k / per_word * PANEL;
            vi word[PANEL_VECS];
            UNROLL_VECS {
                __builtin_prefetch(place + (bits == 16 ? AHEAD_IN_STEP : AHEAD) + v * LANES);
                word[v] = load_int(place + v * LANES);
            }
            int count = end - k < per_word ? (int)(end - k) : per_word;
            if (count == per_word) {
#pragma GCC unroll 8
                for (int j = 0; j < per_word; j++) {
                    vf column[PANEL_VECS];
                    UNROLL_VECS column[v] = decode(word[v], bits, coding, j, group.scale[v], group.zero[v]);
                    UNROLL_ROWS {
                        vf value = splat(x[r * p->x_stride + k + j]);
                        UNROLL_VECS add_product(&sum[r][v], column[v], value);
                    }
                }
            } else {
                for (int j = 0; j < count; j++) {
                    vf column[PANEL_VECS];
                    UNROLL_VECS column[v] = decode(word[v], bits, coding, j, group.scale[v], group.zero[v]);
                    UNROLL_ROWS {
                        vf value = splat(x[r * p->x_stride + k + j]);
                        UNROLL_VECS add_product(&sum[r][v], column[v], value);
                    }
                }
            }
        }
    }
}

/* out [last-first][PANEL]: the weights of features first..last of a low-bit panel. */
INLINE void expand(const struct linear *p, const int bits, const int coding, ptrdiff_t panel, ptrdiff_t first, ptrdiff_t last,
                   float *out) {
    const int per_word = 32 / bits;
    const int32_t *codes = p->codes + panel * p->words * PANEL;
    for (ptrdiff_t k = first; k < last;) {
        ptrdiff_t index = k / p->group_size, end = (index + 1) * p->group_size;
        if (end > last) end = last;
        struct group group = load_group(p, bits, coding, panel, index);
        for (; k + per_word <= end; k += per_word, out += per_word * PANEL)
            UNROLL_VECS {
                vi word = load_int(codes + k / per_word * PANEL + v * LANES);
#pragma GCC unroll 8
                for (int j = 0; j < per_word; j++)
                    store(out + j * PANEL + v * LANES, decode(word, bits, coding, j, group.scale[v], group.zero[v]));
            }
        for (int j = 0; k + j < end; j++, out += PANEL)
            UNROLL_VECS {
                vi word = load_int(codes + k / per_word * PANEL + v * LANES);
                store(out + v * LANES, decode(word, bits, coding, j, group.scale[v], group.zero[v]));
            }
        k = end;
    }
}

INLINE void run_tile(const struct linear *p, const int rows, const int bits, const int coding, struct place at) {
    ALIGNED float so_far[GROUP_PANELS][TILE_ROWS * PANEL];
    accumulators sums[GROUP_PANELS];
    const float *x = p->x + at.row * p->x_stride;
    const ptrdiff_t turn = bits == 16 ? TURN_K : SUM_K;
    for (at.begin = at.first, at.end = at.last; at.first < at.end; at.first = at.last) {
        struct place of = at;
        at.last = of.last = at.first + SUM_K < at.end ? at.first + SUM_K : at.end;
        for (int c = 0; c < at.panels; c++) UNROLL_ROWS UNROLL_VECS sums[c][r][v] = (vf){0};
        for (ptrdiff_t k = at.first; k < at.last; k += turn)
            for (int c = 0; c < at.panels; c++) {
                accumulators sum;
                UNROLL_ROWS UNROLL_VECS sum[r][v] = sums[c][r][v];
                low_bit_tile(p, bits, coding, rows, x, at.panel + c, k, k + turn < at.last ? k + turn : at.last, sum);
                UNROLL_ROWS UNROLL_VECS sums[c][r][v] = sum[r][v];
            }
        for (int c = 0; c < at.panels; c++, of.panel++) write_part(p, rows, sums[c], of, so_far[c]);
    }
}

static int code_bits(const struct linear *p) { return p->bits < 16 ? p->bits : 16; }

#define VARIANT(bits, coding) (NUM_CODINGS * (bits) + (coding))
/* A function for each: a compiler takes almost twice as long for all in one. */
#define TILE(n, bits, coding)                                                                                       \
    static __attribute__((noinline)) void tile_##n##_##bits##_##coding(const struct linear *p, struct place at) { \
        run_tile(p, n, bits, coding, at);                                                                           \
    }
#define CASE(n, bits, coding) \
    case 128 * n + VARIANT(bits, coding): tile_##n##_##bits##_##coding(p, at); break;
#define VARIANTS(X, n) \
    X(n, 2, ZERO) X(n, 4, ZERO) X(n, 4, CENTRED) X(n, 4, OFFSET) X(n, 8, ZERO) X(n, 8, OFFSET) X(n, 16, BFLOAT) X(n, 16, HALF)
#define TILES(n) VARIANTS(TILE, n)
#define CASES(n) VARIANTS(CASE, n)
#define WIDE_VARIANTS(X, n) X(n, 4, CENTRED) X(n, 16, BFLOAT)
#define WIDE_TILES(n) WIDE_VARIANTS(TILE, n)
#define WIDE_ONES(n) WIDE_VARIANTS(CASE, n)
#define IS_CASE(n) || rows == n

ROW_CASES(TILES)
WIDE_CASES(WIDE_TILES)

int is_in_registers(const struct linear *p, ptrdiff_t rows) {
    if (rows <= FUSED_ROWS) return 1;
    const enum coding coding = coding_of(p);
    return !is_small_float(p) && (coding == CENTRED || coding == BFLOAT) && (0 WIDE_CASES(IS_CASE));
}

void low_bit_rows(const struct linear *p, int rows, struct place at) {
    if (is_small_float(p)) {
        small_float_rows(p, rows, at);
        return;
    }
    const int variant = 128 * rows + VARIANT(code_bits(p), coding_of(p));
    const ptrdiff_t end = at.panel + at.panels;
    if (p->bits < BFLOAT16_BITS) at.panels = 1;
    for (; at.panel < end; at.panel += at.panels) {
        switch (variant) {
            ROW_CASES(CASES)
            WIDE_CASES(WIDE_ONES)
        }
    }
}
#undef IS_CASE
#undef WIDE_ONES
#undef WIDE_TILES
#undef WIDE_VARIANTS
#undef CASES
#undef TILES
#undef VARIANTS
#undef CASE
#undef TILE

void expand_block(const struct linear *p, struct place at, float *out) {
    if (is_small_float(p)) {
        expand_small_floats(p, at, out);
        return;
    }
    switch (VARIANT(code_bits(p), coding_of(p))) {
        case VARIANT(16, BFLOAT): expand(p, 16, BFLOAT, at.panel, at.first, at.last, out); break;
        case VARIANT(16, HALF): expand(p, 16, HALF, at.panel, at.first, at.last, out); break;
        case VARIANT(4, CENTRED): expand(p, 4, CENTRED, at.panel, at.first, at.last, out); break;
        case VARIANT(2, ZERO): expand(p, 2, ZERO, at.panel, at.first, at.last, out); break;
        case VARIANT(4, ZERO): expand(p, 4, ZERO, at.panel, at.first, at.last, out); break;
        case VARIANT(4, OFFSET): expand(p, 4, OFFSET, at.panel, at.first, at.last, out); break;
        case VARIANT(8, ZERO): expand(p, 8, ZERO, at.panel, at.first, at.last, out); break;
        case VARIANT(8, OFFSET): expand(p, 8, OFFSET, at.panel, at.first, at.last, out); break;
    }
}
