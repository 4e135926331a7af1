/* Attention over a bfloat16 cache in tile registers: queries, times the scale, rounded to bfloat16, scores and weighted sums by
   products of bfloat16 pairs with float32 sums, softmax in float32, weights rounded to bfloat16 before they multiply values. A row's
   total is the sum of its weights before rounding: their errors have no sign in common, and the largest weight, 1, has none.

   Keys and values of a section are copied once into the form that the second operand of a product has, pairs of what is summed over
   (features, or positions) side by side; all rows of the item then read the copy. Positions past the context are zeros among the
   values, a masked one has the weight 0, and zeros change no sum: so a row's result is the same in any company. */
#include "amx.h"
#include "attention.h"

#if HAVE_AMX && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define ITEM_ROWS (24 * AMX_ROWS)
/* Rows that share what is loaded of keys and values: two tiles of them. */
#define GROUP_ROWS (2 * AMX_ROWS)
/* bfloat16 pairs in a row of a tile, and what the products' second operand has in a tile. */
#define DEPTH (2 * LANES)
#define TILE_BFLOATS (AMX_ROWS * DEPTH)
/* Floats between two rows of scores: one cache line more than a power of two, so that rows fall into different sets of the cache. */
#define SCORE_ROW (SECTION + LANES)
/* bfloat16 weights take the place of the scores that they are made of. */
#define WEIGHT_ROW (2 * SCORE_ROW)

#define UNROLL _Pragma("GCC unroll 8")

/* query [rows][depth], rounded up to whole tiles; keys [SECTION / LANES][depth / DEPTH] tiles; values [SECTION / DEPTH][width / LANES]
   tiles; scores [GROUP_ROWS][SCORE_ROW]; part: the state of a group of rows after one section; lanes [AMX_ROWS][LANES]. */
struct work {
    uint16_t *query, *keys, *values;
    float *scores, *lanes;
    struct state part;
    ptrdiff_t depth, width;
    ptrdiff_t tile, columns; /* the positions that keys and values hold */
    int rounded;             /* whether query is filled */
    const uint16_t *value_row[SECTION];
};

static size_t work_bytes(const struct attention *p) {
    size_t depth = (size_t)round_up(p->head_size, DEPTH), width = (size_t)width_of(p);
    size_t bfloats = (size_t)p->state_rows * depth + SECTION * (depth + width);
    size_t floats = GROUP_ROWS * (SCORE_ROW + width + 2) + AMX_ROWS * LANES;
    return sizeof(struct work) + VEC_BYTES + bfloats * sizeof(uint16_t) + floats * sizeof(float);
}

static void carve(const struct attention *p, struct work *w) {
    w->depth = round_up(p->head_size, DEPTH), w->width = width_of(p);
    w->scores = (float *)(((uintptr_t)(w + 1) + VEC_BYTES - 1) / VEC_BYTES * VEC_BYTES);
    w->lanes = w->scores + GROUP_ROWS * SCORE_ROW;
    w->part.sum = w->lanes + AMX_ROWS * LANES;
    w->part.largest = w->part.sum + GROUP_ROWS * w->width;
    w->part.total = w->part.largest + GROUP_ROWS;
    w->keys = (uint16_t *)(w->part.total + GROUP_ROWS);
    w->values = w->keys + SECTION * w->depth;
    w->query = w->values + SECTION * w->width;
}

/* The first lanes of 16 or 32, as many as are left. */
static inline uint32_t lanes_left(ptrdiff_t left) { return left >= 32 ? ~0u : left <= 0 ? 0 : (1u << left) - 1; }

/* Tiles 0 to 3 are sums [rows][LANES], 4 and 5 the first operand [rows][LANES][2], 6 and 7 the second [AMX_ROWS][LANES][2]. */
static void configure(int rows) {
    struct amx_config config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = VEC_BYTES, config.rows[tile] = (uint8_t)(tile < 6 ? rows : AMX_ROWS);
    amx_settle(&config);
    _tile_loadconfig(&config);
}

static void begin(const struct attention *p, const struct item *item, void *work) {
    struct work *w = work;
    carve(p, w);
    w->rounded = 0;
    configure((int)at_most(item->last_row - item->first_row, AMX_ROWS));
}

/* Fetch a group's rows of the query, or of what is written in the end, while the group before is computed. */
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
        const float *query = query_row(p, item, item->first_row + (r < rows ? r : 0));
        for (ptrdiff_t d = 0; d < w->depth; d += LANES) {
            __m512 part = _mm512_maskz_loadu_ps((__mmask16)lanes_left(p->head_size - d), query + d) * _mm512_set1_ps(p->scale);
            _mm256_store_si256((__m256i *)(w->query + r * w->depth + d), (__m256i)_mm512_cvtneps_pbh(part));
        }
    }
}

/* a0 b0 a1 b1 .. */
INLINE __m512i interleave(__m256i a, __m256i b) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19,
                                           3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
}

/* LANES slots that lie side by side for each feature, at position `at` of the tile. */
static void pack_slots(const struct attention *p, struct work *w, const uint16_t *source, ptrdiff_t at) {
    ptrdiff_t d = 0, step = p->key.feature;
    uint16_t *target = w->keys + at * w->depth;
    for (; d + 2 <= p->head_size; d += 2, target += DEPTH, source += 2 * step) {
        __m256i a = _mm256_loadu_si256((const __m256i *)source), b = _mm256_loadu_si256((const __m256i *)(source + step));
        _mm512_store_si512(target, interleave(a, b));
    }
    for (; d < w->depth; d += 2, target += DEPTH) {
        __m256i a = _mm256_setzero_si256();
        _mm512_store_si512(target, interleave(d < p->head_size ? _mm256_loadu_si256((const __m256i *)source) : a, a));
    }
}

static void pack_key(const struct attention *p, struct work *w, const uint16_t *source, ptrdiff_t at) {
    uint16_t *target = w->keys + at / LANES * LANES * w->depth + at % LANES * 2;
    for (ptrdiff_t d = 0; d < w->depth; d++)
        target[d / 2 * DEPTH + d % 2] = d < p->head_size ? source[d * p->key.feature] : 0;
}

/* `count` slots of a block at position `at` of the tile. Positions past the context keep what an earlier tile left: their scores
   are discarded. */
static void pack_keys(const struct attention *p, struct work *w, ptrdiff_t place, ptrdiff_t at, ptrdiff_t count) {
    const uint16_t *source = (const uint16_t *)p->key.data + place;
    if (p->key.slot == 1 && p->block_size % LANES == 0)
        for (ptrdiff_t i = 0; i < count; i += LANES) pack_slots(p, w, source + i, at + i);
    else
        for (ptrdiff_t i = 0; i < count; i++) pack_key(p, w, source + i * p->key.slot, at + i);
}

/* Features d.. of a value, LANES of them at most. */
INLINE __m256i value_part(const struct attention *p, const uint16_t *value, ptrdiff_t d) {
    if (p->value.feature == 1 && d + LANES <= p->head_size) return _mm256_loadu_si256((const __m256i *)(value + d));
    uint16_t part[LANES] = {0};
    for (ptrdiff_t i = 0; i < LANES && d + i < p->head_size; i++) part[i] = value[(d + i) * p->value.feature];
    return _mm256_loadu_si256((const __m256i *)part);
}

/* Positions at, at + 1 of the tile; NULL: zeros. */
static void pack_pair(const struct attention *p, struct work *w, ptrdiff_t at, const uint16_t *first, const uint16_t *second) {
    ptrdiff_t d = 0;
    uint16_t *target = w->values + at / DEPTH * DEPTH * w->width + at % DEPTH / 2 * DEPTH;
    if (p->value.feature == 1 && first && second)
        for (; d + LANES <= p->head_size; d += LANES, target += TILE_BFLOATS)
            _mm512_store_si512(target, interleave(_mm256_loadu_si256((const __m256i *)(first + d)),
                                                  _mm256_loadu_si256((const __m256i *)(second + d))));
    for (; d < w->width; d += LANES, target += TILE_BFLOATS) {
        __m256i a = first ? value_part(p, first, d) : _mm256_setzero_si256();
        __m256i b = second ? value_part(p, second, d) : _mm256_setzero_si256();
        _mm512_store_si512(target, interleave(a, b));
    }
}

/* Fetch a place's LANES slots of keys and values while those before are packed. */
INLINE void fetch(const struct attention *p, ptrdiff_t key, ptrdiff_t value) {
    const char *keys = p->key.data + 2 * key, *values = p->value.data + 2 * value;
    for (ptrdiff_t byte = 0; byte < 2 * LANES * p->head_size; byte += VEC_BYTES) {
        __builtin_prefetch(keys + byte);
        __builtin_prefetch(values + byte);
    }
}

/* The keys and values of positions first..last, one section, of which only these exist. */
static void pack(const struct attention *p, const struct item *item, struct work *w, ptrdiff_t first, ptrdiff_t last) {
    for (ptrdiff_t position = first, next; position < last; position = next) {
        ptrdiff_t offset = position % p->block_size, block = block_of(p, item, position);
        next = at_most(position - offset + p->block_size, last);
        ptrdiff_t count = next - position, value = place_of(&p->value, block, offset, item->kv_head);
        if (next < last) {
            ptrdiff_t after = block_of(p, item, next);
            fetch(p, place_of(&p->key, after, 0, item->kv_head), place_of(&p->value, after, 0, item->kv_head));
        }
        pack_keys(p, w, place_of(&p->key, block, offset, item->kv_head), position - first, count);
        for (ptrdiff_t i = 0; i < count; i++)
            w->value_row[position - first + i] = (const uint16_t *)p->value.data + value + i * p->value.slot;
    }
    ptrdiff_t count = last - first;
    for (ptrdiff_t i = 0; i < round_up(count, DEPTH); i += 2)
        pack_pair(p, w, i, i < count ? w->value_row[i] : NULL, i + 1 < count ? w->value_row[i + 1] : NULL);
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
    for (int column = g->from; column < g->end; column += DEPTH) {
        float *scores = w->scores + column;
        const uint16_t *keys = w->keys + column * w->depth;
        _tile_zero(0);
        _tile_zero(1);
        if (tiles > 1) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (ptrdiff_t d = 0; d < w->depth; d += DEPTH) {
            _tile_loadd(4, query + d, row);
            _tile_loadd(6, keys + d * LANES, VEC_BYTES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, keys + (w->depth + d) * LANES, VEC_BYTES);
            _tile_dpbf16ps(1, 4, 7);
            if (tiles > 1) {
                _tile_loadd(5, query + AMX_ROWS * w->depth + d, row);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, scores, score_row);
        _tile_stored(1, scores + LANES, score_row);
        if (tiles > 1) {
            _tile_stored(2, scores + AMX_ROWS * SCORE_ROW, score_row);
            _tile_stored(3, scores + AMX_ROWS * SCORE_ROW + LANES, score_row);
        }
    }
}

/* The part's sum [rows][width] = weights [rows][columns from..end] . values */
INLINE void mix(const struct work *w, const struct group *g, const int tiles) {
    const ptrdiff_t row = w->width * (ptrdiff_t)sizeof(float), weight_row = WEIGHT_ROW * sizeof(uint16_t);
    for (ptrdiff_t column = 0; column < w->width; column += DEPTH) {
        const uint16_t *weights = (const uint16_t *)w->scores;
        float *sum = w->part.sum + column;
        _tile_zero(0);
        _tile_zero(1);
        if (tiles > 1) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (ptrdiff_t i = g->from; i < g->end; i += DEPTH) {
            const uint16_t *values = w->values + i * w->width + column * DEPTH;
            _tile_loadd(4, weights + i, weight_row);
            _tile_loadd(6, values, VEC_BYTES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, values + TILE_BFLOATS, VEC_BYTES);
            _tile_dpbf16ps(1, 4, 7);
            if (tiles > 1) {
                _tile_loadd(5, weights + AMX_ROWS * WEIGHT_ROW + i, weight_row);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, sum, row);
        _tile_stored(1, sum + LANES, row);
        if (tiles > 1) {
            _tile_stored(2, sum + AMX_ROWS * w->width, row);
            _tile_stored(3, sum + AMX_ROWS * w->width + LANES, row);
        }
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
