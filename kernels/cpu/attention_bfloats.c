/* Attention over a bfloat16 cache in tile registers: queries, times the scale, rounded to bfloat16, scores and weighted sums by
   products of bfloat16 pairs with float32 sums, softmax in float32, weights rounded to bfloat16 before they multiply values. A row's
   total is the sum of its weights before rounding: their errors have no sign in common, and the largest weight, 1, has none.

   Keys and values of a section are copied once into the form that the second operand of a product has, pairs of what is summed over
   (features, or positions) side by side; all rows of the item then read the copy. Positions past the context are zeros among the
   values, a masked one has the weight 0, and zeros change no sum: so a row's result is the same in any company. */
#include "amx.h"
#include "attention.h"

#if HAVE_AMX && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "attention_pairs.h"

#define ITEM_ROWS (24 * AMX_ROWS)
#define UNROLL _Pragma("GCC unroll 8")

/* Tiles 0 and 1 are sums [rows][LANES], 2 is the first operand [rows][LANES][2], 3 the second [AMX_ROWS][LANES][2]; four and no more,
   for the reason that linear_bf16_many.c gives. */
static void configure(int rows) {
    struct amx_config config = amx_whole_tiles();
    for (int tile = 0; tile < 3; tile++) config.rows[tile] = (uint8_t)rows;
    amx_load(&config);
}

static void begin(const struct attention *p, const struct item *item, void *work) {
    struct work *w = work;
    carve(p, w);
    w->rounded = 0;
    configure((int)at_most(item->last_row - item->first_row, AMX_ROWS));
}

/* Fetch a group's rows of the query, or of what is written in the end, while the group before is computed; inlined, see fetch(). */
INLINE void fetch_rows(const struct attention *p, const struct item *item, ptrdiff_t place, const int to_write) {
    for (ptrdiff_t row = item->first_row + place; row < at_most(item->first_row + place + GROUP_ROWS, item->last_row); row++) {
        const float *query = query_row(p, item, row), *out = out_row(p, item, row);
        for (ptrdiff_t d = 0; d < p->head_size; d += LANES)
            if (to_write) __builtin_prefetch(out + d, 1);
            else __builtin_prefetch(query + d);
    }
}

/* A group's rows of the query, in whole tiles. */
static void round_query(const struct attention *p, const struct item *item, struct work *w, ptrdiff_t place) {
    ptrdiff_t rows = item->last_row - item->first_row;
    for (ptrdiff_t r = place; r < at_most(place + GROUP_ROWS, round_up(rows, AMX_ROWS)); r++) {
        copy_query(p, item, item->first_row + (r < rows ? r : 0), w->rotated);
        for (ptrdiff_t d = 0; d < w->depth; d += LANES) {
            __m512 part = _mm512_maskz_loadu_ps((__mmask16)lanes_left(p->head_size - d), w->rotated + d) * _mm512_set1_ps(p->scale);
            _mm256_store_si256((__m256i *)(w->query + r * w->depth + d), (__m256i)_mm512_cvtneps_pbh(part));
        }
    }
}

/* The rows of the group at hand and the columns of the section, multiples of DEPTH, that some of them see. */
struct group {
    ptrdiff_t row;
    int rows, from, end;
    int all; /* every row sees the whole section */
};

/* scores [rows][columns from..end] = query . keys */
INLINE void score(const struct work *w, const uint16_t *query, const struct group *g, const int tiles) {
    const ptrdiff_t row = w->depth * (ptrdiff_t)sizeof(uint16_t), score_row = SCORE_ROW * sizeof(float);
    for (int column = g->from; column < g->end; column += LANES) {
        float *scores = w->scores + column;
        const uint16_t *keys = w->keys + column * w->depth;
        _tile_zero(0);
        _tile_zero(1);
        for (ptrdiff_t d = 0; d < w->depth; d += DEPTH) {
            _tile_loadd(3, keys + d * LANES, VEC_BYTES);
            _tile_loadd(2, query + d, row);
            _tile_dpbf16ps(0, 2, 3);
            if (tiles > 1) {
                _tile_loadd(2, query + AMX_ROWS * w->depth + d, row);
                _tile_dpbf16ps(1, 2, 3);
            }
        }
        _tile_stored(0, scores, score_row);
        if (tiles > 1) _tile_stored(1, scores + AMX_ROWS * SCORE_ROW, score_row);
    }
}

/* The part's sum [rows][width] = weights [rows][columns from..end] . values */
INLINE void mix(const struct work *w, const struct group *g, const int tiles) {
    const ptrdiff_t row = w->width * (ptrdiff_t)sizeof(float), weight_row = WEIGHT_ROW * sizeof(uint16_t);
    for (ptrdiff_t column = 0; column < w->width; column += LANES) {
        const uint16_t *weights = (const uint16_t *)w->scores;
        float *sum = w->part.sum + column;
        _tile_zero(0);
        _tile_zero(1);
        for (ptrdiff_t i = g->from; i < g->end; i += DEPTH) {
            _tile_loadd(3, w->values + i * w->width + column * DEPTH, VEC_BYTES);
            _tile_loadd(2, weights + i, weight_row);
            _tile_dpbf16ps(0, 2, 3);
            if (tiles > 1) {
                _tile_loadd(2, weights + AMX_ROWS * WEIGHT_ROW + i, weight_row);
                _tile_dpbf16ps(1, 2, 3);
            }
        }
        _tile_stored(0, sum, row);
        if (tiles > 1) _tile_stored(1, sum + AMX_ROWS * w->width, row);
    }
}

/* The lanes from column `at` on that lie in [first, last). */
INLINE __mmask16 seen(int at, int first, int last) { return (__mmask16)(lanes_left(last - at) & ~lanes_left(first - at)); }

/* 2^x for x <= 0 or NaN to 9e-5 of itself, exactly for whole x: a weight is then rounded to 2^-9. */
INLINE vf weight_of(vf x) {
    vf r = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* x - floor(x); 0 for infinities */
    vf p = splat(0x1.3baadp-4f);
    p = p * r + splat(0x1.d23772p-3f);
    p = p * r + splat(0x1.63e65ap-1f);
    p = p * r + splat(1.0f);
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)x); /* times 2^floor(x) */
}

/* Lane by lane the largest of columns [first, last), or all, of one row's scores. */
INLINE vf peak_of(const struct attention *p, float *scores, const int all, int first, int last) {
    if (p->soft_cap != 0.0f)
        for (int i = first / LANES * LANES; i < last; i += LANES)
            store(scores + i, capped(load(scores + i), p->soft_cap) * splat(LOG2_E));
    vf peak = splat(-INFINITY);
    /* Where the score is NaN, the maximum stays. */
    if (all) {
        vf other = peak;
        UNROLL for (int i = 0; i < SECTION; i += DEPTH) {
            peak = vmax(load(scores + i), peak);
            other = vmax(load(scores + i + LANES), other);
        }
        return vmax(other, peak);
    }
    for (int i = first / LANES * LANES; i < last; i += LANES)
        peak = (vf)_mm512_mask_max_ps((__m512)peak, seen(i, first, last), (__m512)load(scores + i), (__m512)peak);
    return peak;
}

/* One row's scores into weights relative to its maximum; their sum lane by lane. */
INLINE vf soften(float *scores, const int all, int from, int end, int first, int last, float top) {
    uint16_t *weights = (uint16_t *)scores;
    vf low_sum = splat(0.0f), high_sum = splat(0.0f);
    UNROLL for (int i = from; i < end; i += DEPTH) {
        if (!all && (i + DEPTH <= first || i >= last)) {
            _mm512_store_si512(weights + i, _mm512_setzero_si512());
            continue;
        }
        vf low = weight_of(load(scores + i) - splat(top)), high = weight_of(load(scores + i + LANES) - splat(top));
        if (!all && (i < first || i + DEPTH > last)) {
            low = (vf)_mm512_maskz_mov_ps(seen(i, first, last), (__m512)low);
            high = (vf)_mm512_maskz_mov_ps(seen(i + LANES, first, last), (__m512)high);
        }
        low_sum += low;
        high_sum += high;
        _mm512_store_si512(weights + i, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
    }
    return low_sum + high_sum;
}

/* Row r's lanes [AMX_ROWS][LANES] put together in lane r: halves of each row's are combined until one lane is left. */
#define ACROSS(combine, lanes, result)                                                                                          \
    do {                                                                                                                         \
        __m512 t[AMX_ROWS];                                                                                                      \
        _Pragma("GCC unroll 16") for (int r = 0; r < 16; r++) t[r] = _mm512_load_ps((lanes) + r * LANES);                        \
        _Pragma("GCC unroll 8") for (int r = 0; r < 8; r++)                                                                      \
            t[r] = combine(_mm512_shuffle_f32x4(t[r], t[r + 8], 0x44), _mm512_shuffle_f32x4(t[r], t[r + 8], 0xEE));              \
        _Pragma("GCC unroll 4") for (int r = 0; r < 4; r++)                                                                      \
            t[r] = combine(_mm512_shuffle_f32x4(t[r], t[r + 4], 0x88), _mm512_shuffle_f32x4(t[r], t[r + 4], 0xDD));              \
        _Pragma("GCC unroll 2") for (int r = 0; r < 2; r++)                                                                      \
            t[r] = combine(_mm512_shuffle_ps(t[r], t[r + 2], 0x44), _mm512_shuffle_ps(t[r], t[r + 2], 0xEE));                    \
        t[0] = combine(_mm512_shuffle_ps(t[0], t[1], 0x88), _mm512_shuffle_ps(t[0], t[1], 0xDD));                                \
        const __m512i place = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);                           \
        _mm512_store_ps(result, _mm512_permutexvar_ps(place, t[0]));                                                             \
    } while (0)

/* Softmax of one tile of a group's rows, `first_row` of the group on. */
INLINE void soften_rows(const struct attention *p, const struct item *item, const struct work *w, const struct group *g, int first_row,
                        const int all) {
    int rows = (int)at_most(g->rows - first_row, AMX_ROWS), first[AMX_ROWS], last[AMX_ROWS];
    float *scores = w->scores + first_row * SCORE_ROW, *largest = w->part.largest + first_row;
    for (int r = 0; r < rows; r++) {
        if (!all) visible_columns(p, item, g->row + first_row + r, w->tile, w->columns, first + r, last + r);
        store(w->lanes + r * LANES, peak_of(p, scores + r * SCORE_ROW, all, all ? 0 : first[r], all ? SECTION : last[r]));
    }
    ACROSS(_mm512_max_ps, w->lanes, largest);
    for (int r = 0; r < rows; r++)
        store(w->lanes + r * LANES, soften(scores + r * SCORE_ROW, all, g->from, g->end, all ? 0 : first[r], all ? SECTION : last[r], largest[r]));
    ACROSS(_mm512_add_ps, w->lanes, w->part.total + first_row);
}

/* A group's rows, from row `place` of the item on. */
static void attend_group(const struct attention *p, const struct item *item, const struct work *w, const struct state *state,
                         ptrdiff_t place) {
    struct group g = {.row = item->first_row + place, .rows = (int)at_most(item->last_row - item->first_row - place, GROUP_ROWS)};
    int first, last, begin, stop, tiles = g.rows > AMX_ROWS ? 2 : 1;
    visible_columns(p, item, g.row, w->tile, w->columns, &first, &stop);
    visible_columns(p, item, g.row + g.rows - 1, w->tile, w->columns, &begin, &last);
    if (first >= last) return;
    g.from = first / DEPTH * DEPTH, g.end = (int)round_up(last, DEPTH), g.all = begin == 0 && stop == SECTION;
    const uint16_t *query = w->query + place * w->depth;
    amx_settle(w);
    if (tiles == 1) score(w, query, &g, 1);
    else score(w, query, &g, 2);
    amx_settle(w);
    for (int r = 0; r < g.rows; r += AMX_ROWS) {
        if (g.all) soften_rows(p, item, w, &g, r, 1);
        else soften_rows(p, item, w, &g, r, 0);
    }
    amx_settle(w);
    if (tiles == 1) mix(w, &g, 1);
    else mix(w, &g, 2);
    amx_settle(w);
    struct state whole = {state->largest + place, state->total + place, state->sum + place * w->width};
    merge(&whole, &w->part, g.rows, w->width);
}

static void attend(const struct attention *p, const struct item *item, void *work, const struct state *state, ptrdiff_t first,
                   ptrdiff_t last) {
    struct work *w = work;
    ptrdiff_t unused, end;
    visible(p, item, item->last_row - 1, &unused, &end);
    w->tile = first, w->columns = last - first;
    if (!w->rounded) fetch_rows(p, item, 0, 0);
    pack(p, item, w, first, last);
    for (ptrdiff_t place = 0; place < item->last_row - item->first_row; place += GROUP_ROWS) {
        if (!w->rounded) {
            fetch_rows(p, item, place + GROUP_ROWS, 0);
            round_query(p, item, w, place);
        }
        if (last == end) fetch_rows(p, item, place, 1);
        attend_group(p, item, w, state, place);
    }
    w->rounded = 1;
}

static const struct arithmetic in_tiles = {ITEM_ROWS, AMX_ROWS, work_bytes, begin, attend};

const struct arithmetic *bfloat_arithmetic(void) { return amx_allowed() ? &in_tiles : NULL; }
#else
const struct arithmetic *bfloat_arithmetic(void) { return NULL; }
#endif
