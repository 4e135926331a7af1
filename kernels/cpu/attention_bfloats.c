/* Attention over a bfloat16 cache in tile registers: queries rounded to bfloat16, scores and weighted sums by products of bfloat16
   pairs with float32 sums, softmax in float32, weights rounded to bfloat16 before they multiply values. A row's total is the sum of
   its weights before rounding: their errors have no sign in common, and the largest weight, 1, has none.

   Keys and values of a tile are copied once into the form that the second operand of a product has, pairs of what is summed over
   (features, or positions) side by side; all rows of the item then read the copy. Positions past the context are zeros among the
   values, a masked one has the weight 0, and zeros change no sum: so a row's result is the same in any company. */
#include "amx.h"
#include "attention.h"

#if HAVE_AMX && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define ITEM_ROWS (12 * AMX_ROWS)
/* bfloat16 pairs in a row of a tile, and what the products' second operand has in a tile. */
#define DEPTH (2 * LANES)
#define TILE_BFLOATS (AMX_ROWS * DEPTH)
#define KEY_CHUNKS (KEY_TILE / DEPTH)

#define UNROLL _Pragma("GCC unroll 8")

/* query [rows][depth], rounded up to whole tiles; keys [KEY_TILE / LANES][depth / DEPTH] tiles; values [KEY_CHUNKS][width / LANES]
   tiles; scores and weights [AMX_ROWS][KEY_TILE]. */
struct work {
    uint16_t *query, *keys, *values, *weights;
    float *scores;
    ptrdiff_t depth, width;
    const uint16_t *value_row[KEY_TILE];
};

static size_t work_bytes(const struct attention *p) {
    size_t depth = (size_t)round_up(p->head_size, DEPTH), width = (size_t)width_of(p);
    size_t bfloats = (size_t)p->state_rows * depth + KEY_TILE * (depth + width + AMX_ROWS);
    return sizeof(struct work) + VEC_BYTES + bfloats * sizeof(uint16_t) + AMX_ROWS * KEY_TILE * sizeof(float);
}

static void carve(const struct attention *p, struct work *w) {
    w->depth = round_up(p->head_size, DEPTH), w->width = width_of(p);
    w->scores = (float *)(((uintptr_t)(w + 1) + VEC_BYTES - 1) / VEC_BYTES * VEC_BYTES);
    w->weights = (uint16_t *)(w->scores + AMX_ROWS * KEY_TILE);
    w->keys = w->weights + AMX_ROWS * KEY_TILE;
    w->values = w->keys + KEY_TILE * w->depth;
    w->query = w->values + KEY_TILE * w->width;
}

/* The first lanes of 16 or 32, as many as are left. */
static inline uint32_t lanes_left(ptrdiff_t left) { return left >= 32 ? ~0u : left <= 0 ? 0 : (1u << left) - 1; }

/* Tiles 0 to 3 are sums [rows][LANES], 4 rows of x [rows][LANES][2], 5 to 7 the other operand [AMX_ROWS][LANES][2]. */
static void configure(int rows) {
    struct amx_config config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = VEC_BYTES, config.rows[tile] = (uint8_t)(tile < 5 ? rows : AMX_ROWS);
    amx_settle(&config);
    _tile_loadconfig(&config);
}

static void begin(const struct attention *p, const struct item *item, void *work) {
    struct work *w = work;
    carve(p, w);
    ptrdiff_t rows = item->last_row - item->first_row;
    for (ptrdiff_t r = 0; r < round_up(rows, AMX_ROWS); r++) {
        const float *query = query_row(p, item, item->first_row + (r < rows ? r : 0));
        for (ptrdiff_t d = 0; d < w->depth; d += LANES) {
            __m512 part = _mm512_maskz_loadu_ps((__mmask16)lanes_left(p->head_size - d), query + d);
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

/* Sums of `tiles` tiles side by side (2 or 4, in tiles 0..), plus the products of row tiles x [depth / DEPTH] and tiles of y, of
   which those for one sum are `step` apart and those of one depth `next`. */
INLINE void multiply(const int tiles, const uint16_t *x, ptrdiff_t x_row, ptrdiff_t depth, const uint16_t *y, ptrdiff_t step,
                     ptrdiff_t next) {
    for (ptrdiff_t d = 0; d < depth; d += DEPTH, y += step) {
        _tile_loadd(4, x + d, x_row * (ptrdiff_t)sizeof(uint16_t));
        _tile_loadd(5, y, VEC_BYTES);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, y + next, VEC_BYTES);
        _tile_dpbf16ps(1, 4, 6);
        if (tiles == 2) continue;
        _tile_loadd(7, y + 2 * next, VEC_BYTES);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, y + 3 * next, VEC_BYTES);
        _tile_dpbf16ps(3, 4, 5);
    }
}

INLINE void store_sums(const int tiles, float *sums, ptrdiff_t row) {
    _tile_stored(0, sums, row * (ptrdiff_t)sizeof(float));
    _tile_stored(1, sums + LANES, row * (ptrdiff_t)sizeof(float));
    if (tiles == 2) return;
    _tile_stored(2, sums + 2 * LANES, row * (ptrdiff_t)sizeof(float));
    _tile_stored(3, sums + 3 * LANES, row * (ptrdiff_t)sizeof(float));
}

/* scores of columns from.. (2 or 4 tiles of them) */
INLINE void score_tiles(const int tiles, const struct work *w, const uint16_t *query, int from) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    multiply(tiles, query, w->depth, w->depth, w->keys + from * w->depth, TILE_BFLOATS, LANES * w->depth);
    store_sums(tiles, w->scores + from, KEY_TILE);
}

/* sum [rows][width] (2 or 4 tiles of columns from `column` on) += weights (columns from..end) . values */
INLINE void mix_tiles(const int tiles, const struct work *w, float *sum, ptrdiff_t column, int from, int end) {
    ptrdiff_t row = w->width * (ptrdiff_t)sizeof(float), chunk = w->width / LANES * TILE_BFLOATS;
    _tile_loadd(0, sum + column, row);
    _tile_loadd(1, sum + column + LANES, row);
    if (tiles == 4) {
        _tile_loadd(2, sum + column + 2 * LANES, row);
        _tile_loadd(3, sum + column + 3 * LANES, row);
    }
    const uint16_t *values = w->values + from / DEPTH * chunk + column / LANES * TILE_BFLOATS;
    multiply(tiles, w->weights + from, KEY_TILE, end - from, values, chunk, TILE_BFLOATS);
    store_sums(tiles, sum + column, w->width);
}

static void score(const struct work *w, const uint16_t *query, int from, int end) {
    for (; from + 4 * LANES <= end; from += 4 * LANES) score_tiles(4, w, query, from);
    if (from < end) score_tiles(2, w, query, from);
}

static void mix(const struct work *w, float *sum, int from, int end) {
    ptrdiff_t column = 0;
    for (; column + 4 * LANES <= w->width; column += 4 * LANES) mix_tiles(4, w, sum, column, from, end);
    if (column < w->width) mix_tiles(2, w, sum, column, from, end);
}

/* The lanes from column `at` on that lie in [first, last). */
INLINE __mmask16 seen(int at, int first, int last) { return (__mmask16)(lanes_left(last - at) & ~lanes_left(first - at)); }

/* One row's scores into weights relative to its running maximum; of columns from..end it may see [first, last), or all. */
INLINE void soften(const struct attention *p, float *scores, uint16_t *weights, int from, int end, const int all, int first, int last,
                   float *largest, float *total, float *sum, ptrdiff_t width) {
    vf peak = splat(-INFINITY);
    UNROLL for (int i = from; i < end; i += LANES) {
        vf score = load(scores + i) * splat(p->scale);
        if (p->soft_cap != 0.0f) score = capped(score, p->soft_cap) * splat(LOG2_E);
        store(scores + i, score);
        /* Where the score is NaN, the maximum stays. */
        peak = all ? vmax(score, peak) : (vf)_mm512_mask_max_ps((__m512)peak, seen(i, first, last), (__m512)score, (__m512)peak);
    }
    float top = max_lanes(peak);
    if (top < *largest) top = *largest;
    vf part = splat(0.0f);
    UNROLL for (int i = from; i < end; i += DEPTH) {
        vf low = vexp2(load(scores + i) - splat(top)), high = vexp2(load(scores + i + LANES) - splat(top));
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

/* Rows row.. of the item against the tile of positions from `tile`. */
static void attend_rows(const struct attention *p, const struct item *item, struct work *w, const struct state *state, ptrdiff_t row,
                        int rows, ptrdiff_t tile) {
    ptrdiff_t place = row - item->first_row;
    int first, last, begin, stop;
    visible_columns(p, item, row, tile, &first, &stop);
    visible_columns(p, item, row + rows - 1, tile, &begin, &last);
    if (first >= last) return;
    int from = first / DEPTH * DEPTH, end = (int)round_up(last, DEPTH), all = begin == 0 && stop == KEY_TILE;
    amx_settle(w);
    score(w, w->query + place * w->depth, from, end);
    for (int r = 0; r < rows; r++) {
        float *scores = w->scores + r * KEY_TILE, *largest = &state->largest[place + r], *total = &state->total[place + r];
        float *sum = state->sum + (place + r) * w->width;
        uint16_t *weights = w->weights + r * KEY_TILE;
        if (!all) visible_columns(p, item, row + r, tile, &begin, &stop);
        if (all)
            soften(p, scores, weights, 0, KEY_TILE, 1, 0, KEY_TILE, largest, total, sum, w->width);
        else if (begin < stop)
            soften(p, scores, weights, from, end, 0, begin, stop, largest, total, sum, w->width);
        else
            memset(weights + from, 0, (size_t)(end - from) * sizeof(uint16_t));
    }
    amx_settle(w);
    mix(w, state->sum + place * w->width, from, end);
}

static void attend(const struct attention *p, const struct item *item, void *work, const struct state *state, ptrdiff_t first,
                   ptrdiff_t last) {
    for (ptrdiff_t tile = first; tile < last; tile += KEY_TILE) {
        pack(p, item, work, tile, at_most(tile + KEY_TILE, last));
        for (ptrdiff_t row = item->first_row; row < item->last_row; row += AMX_ROWS)
            attend_rows(p, item, work, state, row, (int)at_most(AMX_ROWS, item->last_row - row), tile);
    }
}

static const struct arithmetic in_tiles = {ITEM_ROWS, AMX_ROWS, work_bytes, begin, attend};

const struct arithmetic *bfloat_arithmetic(void) { return amx_allowed() ? &in_tiles : NULL; }
#else
const struct arithmetic *bfloat_arithmetic(void) { return NULL; }
#endif
