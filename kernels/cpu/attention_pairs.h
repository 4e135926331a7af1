/* The buffers of attention in tiles, and how keys and values get into them: in the form that the second operand of a product has,
   pairs of what is summed over (features, or positions) side by side. For attention_bfloats.c alone, where there are tiles. */
#ifndef TWOFOLD_ATTENTION_PAIRS_H
#define TWOFOLD_ATTENTION_PAIRS_H

#include "amx.h"
#include "attention.h"

/* Rows that share what is loaded of keys and values: two tiles of them. */
#define GROUP_ROWS (2 * AMX_ROWS)
/* bfloat16 pairs in a row of a tile, and what the products' second operand has in a tile. */
#define DEPTH (2 * LANES)
#define TILE_BFLOATS (AMX_ROWS * DEPTH)
/* Floats between two rows of scores: one cache line more than a power of two, so that rows fall into different sets of the cache. */
#define SCORE_ROW (SECTION + LANES)
/* bfloat16 weights take the place of the scores that they are made of. */
#define WEIGHT_ROW (2 * SCORE_ROW)

/* query [rows][depth], rounded up to whole tiles; keys [SECTION / LANES][depth / DEPTH] tiles; values [SECTION / DEPTH][width / LANES]
   tiles; scores [GROUP_ROWS][SCORE_ROW]; part: the state of a group of rows after one section; lanes [AMX_ROWS][LANES];
   rotated: one row of the query. */
struct work {
    uint16_t *query, *keys, *values;
    float *scores, *lanes, *rotated;
    struct state part;
    ptrdiff_t depth, width;
    ptrdiff_t tile, columns; /* the positions that keys and values hold */
    int rounded;             /* whether query is filled */
    const uint16_t *value_row[SECTION];
};

static size_t work_bytes(const struct attention *p) {
    size_t depth = (size_t)round_up(p->head_size, DEPTH), width = (size_t)width_of(p);
    size_t bfloats = (size_t)p->state_rows * depth + SECTION * (depth + width);
    size_t floats = GROUP_ROWS * (SCORE_ROW + width + 2) + AMX_ROWS * LANES + depth;
    return sizeof(struct work) + VEC_BYTES + bfloats * sizeof(uint16_t) + floats * sizeof(float);
}

static void carve(const struct attention *p, struct work *w) {
    w->depth = round_up(p->head_size, DEPTH), w->width = width_of(p);
    w->scores = (float *)(((uintptr_t)(w + 1) + VEC_BYTES - 1) / VEC_BYTES * VEC_BYTES);
    w->lanes = w->scores + GROUP_ROWS * SCORE_ROW;
    w->rotated = w->lanes + AMX_ROWS * LANES;
    w->part.sum = w->rotated + w->depth;
    w->part.largest = w->part.sum + GROUP_ROWS * w->width;
    w->part.total = w->part.largest + GROUP_ROWS;
    w->keys = (uint16_t *)(w->part.total + GROUP_ROWS);
    w->values = w->keys + SECTION * w->depth;
    w->query = w->values + SECTION * w->width;
}

/* The first lanes of 16 or 32, as many as are left. */
static inline uint32_t lanes_left(ptrdiff_t left) { return left >= 32 ? ~0u : left <= 0 ? 0 : (1u << left) - 1; }

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

/* Fetch a place's LANES slots of keys and values while those before are packed. A call of a function that does nothing else would be
   left out by the compiler, so this one is no call. */
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
#endif
