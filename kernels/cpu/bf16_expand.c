/* What bf16_expand.h declares: how a step of any kind becomes bfloat16. linear_bf16_few.c has shorter ways for the most common. */
#include "linear_bf16.h"

#if HAVE_AMX_BF16
static ptrdiff_t group_of(const struct bf16_weights *w, ptrdiff_t feature) {
    const ptrdiff_t index = feature / w->group_size;
    return index < w->groups ? index : w->groups - 1;
}

/* Numbers of a panel's group for a half of a step. */
static void load_group(const struct bf16_weights *w, ptrdiff_t panel, ptrdiff_t index, int half, struct bf16_groups *g) {
    g->index[half] = index;
    for (int v = 0; v < PANEL_VECS; v++) {
        const ptrdiff_t place = (panel * w->groups + index) * PANEL + v * LANES;
        vf scale = load_floats(w->scales, w->scale_type, place), shift = splat(w->centre);
        if (w->kind == FLOATS8) scale *= splat(E4M3_UNIT);
        if (w->coding == BF16_OFFSET) shift = load_floats(w->offsets, w->scale_type, place);
        if (w->coding == BF16_ZERO) shift = to_float(load_zeros(w->zeros + place)) - splat(w->kind == BYTES ? 128.0f : 0.0f);
        store(g->scale[half] + v * LANES, scale);
        store(g->shift[half] + v * LANES, shift);
    }
}

INLINE vf weights_of(const int coding, vf code, float scale, float shift) {
    if (coding == BF16_OFFSET) return code * splat(scale) + splat(shift);
    return (coding == BF16_ZERO ? code - splat(shift) : code) * splat(scale);
}

/* The sixteen weights of each feature's codes: of features i and 16 + i together where the step has one group. */
INLINE void make_tables(struct bf16_groups *g, const int coding, int one_group, float centre) {
    const vf values = coding == BF16_E2M1
                         ? (vf)_mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6)
                         : (vf)_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const vf codes = coding == BF16_CENTRED ? values - splat(centre) : values;
    if (one_group) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            vf low = weights_of(coding, codes, g->scale[0][i], g->shift[0][i]);
            vf high = weights_of(coding, codes, g->scale[0][LANES + i], g->shift[0][LANES + i]);
            g->table[i] = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
        }
        return;
    }
    for (int i = 0; i < PANEL; i++) {
        vf first = weights_of(coding, codes, g->scale[0][i], g->shift[0][i]);
        vf second = weights_of(coding, codes, g->scale[1][i], g->shift[1][i]);
        g->table[i] = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    }
}

INLINE void look_up(const struct bf16_groups *g, const uint8_t *codes, int one_group, uint8_t *out) {
    const __m512i low_bits = _mm512_set1_epi16(15), upper = _mm512_set1_epi16(16);
    const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    const __m512i for_low = one_group ? _mm512_setzero_si512() : second, for_high = one_group ? upper : second;
    const __m512bh *table = g->table, *beside = one_group ? table : table + LANES;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        __m512i pair = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(codes + i * STEP_K)));
        __m512i low = _mm512_ternarylogic_epi64(pair, low_bits, for_low, 0xEA); /* pair & low_bits | for_low */
        __m512i high = _mm512_or_si512(_mm512_srli_epi16(pair, 4), for_high);
        _mm512_store_si512(out + i * STEP_BYTES, _mm512_permutexvar_epi16(low, (__m512i)table[i]));
        _mm512_store_si512(out + (LANES + i) * STEP_BYTES, _mm512_permutexvar_epi16(high, (__m512i)beside[i]));
    }
}

INLINE vf convert_half(const int kind, const int coding, const uint8_t *codes, float scale, float shift) {
    if (kind == FLOATS8) return load_e4m3((const int8_t *)codes) * splat(scale);
    __m128i bytes = _mm_loadu_si128((const __m128i *)codes);
    if (coding == BF16_OFFSET) return to_float((vi)_mm512_cvtepu8_epi32(bytes)) * splat(scale) + splat(shift);
    vf code = to_float((vi)_mm512_cvtepi8_epi32(bytes));
    return (coding == BF16_ZERO ? code - splat(shift) : code) * splat(scale);
}

INLINE void convert(const struct bf16_groups *g, const int kind, const int coding, const uint8_t *codes, uint8_t *out) {
#pragma GCC unroll 4
    for (int i = 0; i < PANEL; i++, codes += STEP_K, out += STEP_BYTES) {
        vf first = convert_half(kind, coding, codes, g->scale[0][i], g->shift[0][i]);
        vf second = convert_half(kind, coding, codes + GROUP_K, g->scale[1][i], g->shift[1][i]);
        _mm512_store_si512(out, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
    }
}

/* Brings the groups of a step; whether they are others than before. */
static int enter_groups(const struct bf16_weights *w, ptrdiff_t panel, ptrdiff_t step, struct bf16_groups *g) {
    if (step < g->end) return 0;
    const ptrdiff_t first = group_of(w, step * STEP_K), second = group_of(w, step * STEP_K + GROUP_K);
    const int changed = first != g->index[0] || second != g->index[1];
    g->end = step + 1;
    if (first == w->groups - 1)
        g->end = w->steps;
    else if (first == second)
        g->end = (first + 1) * w->group_size / STEP_K;
    if (changed) {
        load_group(w, panel, first, 0, g);
        load_group(w, panel, second, 1, g);
    }
    return changed;
}

#define VARIANT(kind, coding) (4 * (kind) + (coding))
#define LOOK_UP(coding) \
    case VARIANT(NIBBLES, coding): \
        if (changed) make_tables(g, coding, one_group, w->centre); \
        look_up(g, codes, one_group, out); \
        break;
#define CONVERT(kind, coding) \
    case VARIANT(kind, coding): convert(g, kind, coding, codes, out); break;

void bf16_expand(const struct bf16_weights *w, ptrdiff_t panel, ptrdiff_t step, struct bf16_groups *g, uint8_t *out) {
    const int changed = enter_groups(w, panel, step, g), one_group = g->index[0] == g->index[1];
    const uint8_t *codes = w->codes + (panel * w->steps + step) * w->step_bytes;
    switch (VARIANT(w->kind, w->coding)) {
        LOOK_UP(BF16_CENTRED) LOOK_UP(BF16_ZERO) LOOK_UP(BF16_OFFSET) LOOK_UP(BF16_E2M1)
        CONVERT(BYTES, BF16_CENTRED) CONVERT(BYTES, BF16_ZERO) CONVERT(BYTES, BF16_OFFSET) CONVERT(FLOATS8, BF16_CENTRED)
    }
}
#endif
