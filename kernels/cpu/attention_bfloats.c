/* Attention over a bfloat16 cache in tile registers: queries, times the scale, rounded to bfloat16, scores and weighted sums by
   products of bfloat16 pairs with float32 sums, softmax in float32, weights rounded to bfloat16 before they multiply values. A row's
   total is the sum of its weights before rounding: their errors have no sign in common, and the largest weight, 1, has none.

   Keys and values of a tile are copied once into the form that the second operand of a product has, pairs of what is summed over
   (features, or positions) side by side; all rows of the item then read the copy. Positions past the context are zeros among the
   values, a masked one has the weight 0, and zeros change no sum: so a row's result is the same in any company. */
#include "amx.h"
#include "attention.h"

#if HAVE_AMX && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define ITEM_ROWS (24 * AMX_ROWS)
/* bfloat16 pairs in a row of a tile, and what the products' second operand has in a tile. */
#define DEPTH (2 * LANES)
#define TILE_BFLOATS (AMX_ROWS * DEPTH)
#define KEY_CHUNKS (KEY_TILE / DEPTH)

/* Rows of the query that are fetched ahead of the one that is rounded. */
#define AHEAD 8

#define UNROLL _Pragma("GCC unroll 8")

/* query [rows][depth], rounded up to whole tiles; keys [KEY_TILE / LANES][depth / DEPTH] tiles; values [KEY_CHUNKS][width / LANES]
   tiles; scores and weights [AMX_ROWS][KEY_TILE], of two groups of rows by turns. */
struct work {
    uint16_t *query, *keys, *values, *weights[2];
    float *scores[2];
    ptrdiff_t depth, width;
    const uint16_t *value_row[KEY_TILE];
};

static size_t work_bytes(const struct attention *p) {
    size_t depth = (size_t)round_up(p->head_size, DEPTH), width = (size_t)width_of(p);
    size_t bfloats = (size_t)p->state_rows * depth + KEY_TILE * (depth + width + 2 * AMX_ROWS);
    return sizeof(struct work) + VEC_BYTES + bfloats * sizeof(uint16_t) + 2 * AMX_ROWS * KEY_TILE * sizeof(float);
}

static void carve(const struct attention *p, struct work *w) {
    w->depth = round_up(p->head_size, DEPTH), w->width = width_of(p);
    w->scores[0] = (float *)(((uintptr_t)(w + 1) + VEC_BYTES - 1) / VEC_BYTES * VEC_BYTES);
    w->scores[1] = w->scores[0] + AMX_ROWS * KEY_TILE;
    w->weights[0] = (uint16_t *)(w->scores[1] + AMX_ROWS * KEY_TILE);
    w->weights[1] = w->weights[0] + AMX_ROWS * KEY_TILE;
    w->keys = w->weights[1] + AMX_ROWS * KEY_TILE;
    w->values = w->keys + KEY_TILE * w->depth;
    w->query = w->values + KEY_TILE * w->width;
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
    ptrdiff_t rows = item->last_row - item->first_row;
    for (ptrdiff_t r = 0; r < round_up(rows, AMX_ROWS); r++) {
        const float *query = query_row(p, item, item->first_row + (r < rows ? r : 0));
        const float *ahead = query_row(p, item, item->first_row + (r + AHEAD < rows ? r + AHEAD : 0));
        for (ptrdiff_t d = 0; d < p->head_size; d += LANES) __builtin_prefetch(ahead + d);
        for (ptrdiff_t d = 0; d < w->depth; d += LANES) {
            __m512 part = _mm512_maskz_loadu_ps((__mmask16)lanes_left(p->head_size - d), query + d) * _mm512_set1_ps(p->scale);
            _mm256_store_si256((__m256i *)(w->query + r * w->depth + d), (__m256i)_mm512_cvtneps_pbh(part));
        }
    }
    configure((int)at_most(rows, AMX_ROWS));
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
static void fetch(const struct attention *p, ptrdiff_t key, ptrdiff_t value) {
    const char *keys = p->key.data + 2 * key, *values = p->value.data + 2 * value;
    for (ptrdiff_t byte = 0; byte < 2 * LANES * p->head_size; byte += VEC_BYTES) {
        __builtin_prefetch(keys + byte);
        __builtin_prefetch(values + byte);
    }
}

/* The keys and values of positions first..last, one tile, of which only these exist. */
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

/* Products in pieces of two, so that the tiles work while vectors compute another group's softmax. Both have the same rows of the
   item, and columns from..end of the tile of positions. */
struct group {
    ptrdiff_t row;
    int rows, from, end, all; /* all: every row sees the whole tile */
    const uint16_t *query;
    float *scores, *sum;
    uint16_t *weights;
    ptrdiff_t column, depth; /* where the next piece is */
};

static ptrdiff_t score_pieces(const struct work *w, const struct group *g) { return (g->end - g->from) / DEPTH * (w->depth / DEPTH); }

static ptrdiff_t mix_pieces(const struct work *w, const struct group *g) { return w->width / DEPTH * ((g->end - g->from) / DEPTH); }

/* scores [rows][two tiles of columns] += query . keys, over DEPTH features; stored with the last ones. */
INLINE void score_piece(const struct work *w, struct group *g) {
    const uint16_t *keys = w->keys + g->column * w->depth + g->depth * LANES;
    if (g->depth == 0) {
        _tile_zero(0);
        _tile_zero(1);
    }
    _tile_loadd(4, g->query + g->depth, w->depth * (ptrdiff_t)sizeof(uint16_t));
    _tile_loadd(6, keys, VEC_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, keys + LANES * w->depth, VEC_BYTES);
    _tile_dpbf16ps(1, 4, 7);
    g->depth += DEPTH;
    if (g->depth < w->depth) return;
    _tile_stored(0, g->scores + g->column, KEY_TILE * sizeof(float));
    _tile_stored(1, g->scores + g->column + LANES, KEY_TILE * sizeof(float));
    g->column += DEPTH, g->depth = 0;
}

/* sum [rows][two tiles of columns] += weights . values, over DEPTH positions. */
INLINE void mix_piece(const struct work *w, struct group *g) {
    const uint16_t *values = w->values + g->depth * w->width + g->column * DEPTH;
    ptrdiff_t row = w->width * (ptrdiff_t)sizeof(float);
    if (g->depth == g->from) {
        _tile_loadd(2, g->sum + g->column, row);
        _tile_loadd(3, g->sum + g->column + LANES, row);
    }
    _tile_loadd(5, g->weights + g->depth, KEY_TILE * sizeof(uint16_t));
    _tile_loadd(6, values, VEC_BYTES);
    _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, values + TILE_BFLOATS, VEC_BYTES);
    _tile_dpbf16ps(3, 5, 7);
    g->depth += DEPTH;
    if (g->depth < g->end) return;
    _tile_stored(2, g->sum + g->column, row);
    _tile_stored(3, g->sum + g->column + LANES, row);
    g->column += DEPTH, g->depth = g->from;
}

/* The lanes from column `at` on that lie in [first, last). */
INLINE __mmask16 seen(int at, int first, int last) { return (__mmask16)(lanes_left(last - at) & ~lanes_left(first - at)); }

/* 2^x for x <= 0 or NaN to 4e-6 of itself, exactly for whole x: a weight is then rounded to 2^-9. */
INLINE vf weight_of(vf x) {
    vf r = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* x - floor(x); 0 for infinities */
    vf p = splat(0x1.b7f73p-7f);
    p = p * r + splat(0x1.abf868p-5f);
    p = p * r + splat(0x1.ee2450p-3f);
    p = p * r + splat(0x1.62d6c6p-1f);
    p = p * r + splat(1.0f);
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)x); /* times 2^floor(x) */
}

/* One row's scores into weights relative to its running maximum; of columns from..end it may see [first, last), or all. */
INLINE void soften(const struct attention *p, float *scores, uint16_t *weights, int from, int end, const int all, int first, int last,
                   float *largest, float *total, float *sum, ptrdiff_t width) {
    vf peak = splat(-INFINITY);
    if (p->soft_cap != 0.0f)
        for (int i = from; i < end; i += LANES) store(scores + i, capped(load(scores + i), p->soft_cap) * splat(LOG2_E));
    UNROLL for (int i = from; i < end; i += LANES) {
        vf score = load(scores + i);
        /* Where the score is NaN, the maximum stays. */
        peak = all ? vmax(score, peak) : (vf)_mm512_mask_max_ps((__m512)peak, seen(i, first, last), (__m512)score, (__m512)peak);
    }
    float top = max_lanes(peak);
    if (top < *largest) top = *largest;
    vf part = splat(0.0f);
    UNROLL for (int i = from; i < end; i += DEPTH) {
        vf low = weight_of(load(scores + i) - splat(top)), high = weight_of(load(scores + i + LANES) - splat(top));
        if (!all) {
            low = (vf)_mm512_maskz_mov_ps(seen(i, first, last), (__m512)low);
            high = (vf)_mm512_maskz_mov_ps(seen(i + LANES, first, last), (__m512)high);
        }
        part += low;
        part += high;
        _mm512_store_si512(weights + i, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
    }
    fade(largest, top, total, sum, width);
    *total += sum_lanes(part);
}

/* The next group of rows, from row `row` of the item on, that sees something of the tile of positions; 0: there is none. */
static int next_group(const struct attention *p, const struct item *item, const struct work *w, const struct state *state,
                      ptrdiff_t row, ptrdiff_t tile, int turn, struct group *g) {
    for (; row < item->last_row; row += AMX_ROWS) {
        ptrdiff_t place = row - item->first_row;
        int rows = (int)at_most(AMX_ROWS, item->last_row - row), first, last, begin, stop;
        visible_columns(p, item, row, tile, &first, &stop);
        visible_columns(p, item, row + rows - 1, tile, &begin, &last);
        if (first >= last) continue;
        int from = first / DEPTH * DEPTH;
        *g = (struct group){.row = row, .rows = rows, .from = from, .end = (int)round_up(last, DEPTH),
                            .all = begin == 0 && stop == KEY_TILE, .query = w->query + place * w->depth, .scores = w->scores[turn],
                            .sum = state->sum + place * w->width, .weights = w->weights[turn], .column = from};
        return 1;
    }
    return 0;
}

/* Softmax of row r of a group. */
INLINE void soften_row(const struct attention *p, const struct item *item, const struct work *w, const struct state *state,
                       const struct group *g, int r, ptrdiff_t tile) {
    ptrdiff_t place = g->row - item->first_row + r;
    float *scores = g->scores + r * KEY_TILE, *sum = g->sum + r * w->width;
    uint16_t *weights = g->weights + r * KEY_TILE;
    int begin, stop;
    if (g->all) {
        soften(p, scores, weights, 0, KEY_TILE, 1, 0, KEY_TILE, state->largest + place, state->total + place, sum, w->width);
        return;
    }
    visible_columns(p, item, g->row + r, tile, &begin, &stop);
    if (begin < stop)
        soften(p, scores, weights, g->from, g->end, 0, begin, stop, state->largest + place, state->total + place, sum, w->width);
    else
        memset(weights + g->from, 0, (size_t)(g->end - g->from) * sizeof(uint16_t));
}

/* The item's rows against one tile of positions, a group of AMX_ROWS after the other: while one is softened, the next one's scores
   and the sums of the one before are computed. */
static void attend_tile(const struct attention *p, const struct item *item, struct work *w, const struct state *state, ptrdiff_t tile) {
    struct group before = {0}, now, next;
    amx_settle(w);
    if (!next_group(p, item, w, state, item->first_row, tile, 0, &now)) return;
    for (ptrdiff_t left = score_pieces(w, &now); left > 0; left--) score_piece(w, &now);
    ptrdiff_t mixes = 0;
    for (int turn = 1, more = 1; more; turn ^= 1) {
        more = next_group(p, item, w, state, now.row + AMX_ROWS, tile, turn, &next);
        ptrdiff_t scores = more ? score_pieces(w, &next) : 0, each = (scores + mixes) / now.rows + 1;
        amx_settle(w);
        for (int r = 0; r < now.rows; r++) {
            soften_row(p, item, w, state, &now, r, tile);
            /* Scores first: what mixing reads has just been written. */
            for (ptrdiff_t i = 0; i < each && scores + mixes > 0; i++) {
                if (scores > 0) scores--, score_piece(w, &next);
                else mixes--, mix_piece(w, &before);
            }
        }
        for (; scores > 0; scores--) score_piece(w, &next);
        for (; mixes > 0; mixes--) mix_piece(w, &before);
        before = now, now = next;
        before.column = 0, before.depth = before.from;
        mixes = mix_pieces(w, &before);
    }
    amx_settle(w);
    for (; mixes > 0; mixes--) mix_piece(w, &before);
}

static void attend(const struct attention *p, const struct item *item, void *work, const struct state *state, ptrdiff_t first,
                   ptrdiff_t last) {
    for (ptrdiff_t tile = first; tile < last; tile += KEY_TILE) {
        pack(p, item, work, tile, at_most(tile + KEY_TILE, last));
        attend_tile(p, item, work, state, tile);
    }
}

static const struct arithmetic in_tiles = {ITEM_ROWS, AMX_ROWS, work_bytes, begin, attend};

const struct arithmetic *bfloat_arithmetic(void) { return amx_allowed() ? &in_tiles : NULL; }
#else
const struct arithmetic *bfloat_arithmetic(void) { return NULL; }
#endif
