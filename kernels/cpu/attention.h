/* What the parts of attention share: the problem, its items, the running softmax of some rows. */
#ifndef TWOFOLD_ATTENTION_H
#define TWOFOLD_ATTENTION_H

#include <math.h>

#include "codes.h"
#include "kernels.h"
#include "rotate.h"

/* Positions that are attended to at once; sums over the positions of a section are merged in order. */
#define KEY_TILE 128
#define SECTION (2 * KEY_TILE)

/* Strides in elements: block, slot, head, feature; of the scales (none for floats) block, slot, head. */
struct cache {
    const char *data;
    enum element kind;
    ptrdiff_t block, slot, head, feature;
    const float *scale;
    ptrdiff_t scale_block, scale_slot, scale_head;
};

struct attention {
    const float *query;
    ptrdiff_t query_token, query_head;
    struct rotary rotary; /* its table is NULL where queries come rotated */
    float *out;
    ptrdiff_t num_heads, num_kv_heads, group, head_size, block_size; /* group: heads that share a KV head */
    struct cache key, value;
    const int32_t *query_start, *seq_lens, *block_table;
    ptrdiff_t num_requests, table_stride;
    ptrdiff_t window; /* 0: none */
    /* Softmax works in powers of two: log2(e) is in the scale, or where scores are capped multiplies what the cap leaves. */
    float scale, soft_cap;
    const struct arithmetic *arithmetic;
    ptrdiff_t state_rows; /* for which a state has room */
    /* When sections are shared out: how many per item, and the state of each part. */
    ptrdiff_t num_sections;
    float *parts;
};

/* One request, one KV head, and query rows of it; a row is one (token, head) pair of the group that shares the KV head. */
struct item {
    ptrdiff_t request, kv_head, first_row, last_row;
};

/* Running softmax of some rows: the largest score, the sum of weights relative to it, and the weighted sum of values
   [rows][width_of()]. */
struct state {
    float *largest, *total, *sum;
};

/* How scores and weighted sums are computed. `work` is a buffer of work_bytes() that begin() fills for an item; attend() adds what
   an item's rows see of positions first..last of one section to their state; first is that of a tile. */
struct arithmetic {
    ptrdiff_t item_rows;    /* at most */
    ptrdiff_t row_multiple; /* a state has room for a multiple of it, which is one of LANES */
    size_t (*work_bytes)(const struct attention *p);
    void (*begin)(const struct attention *p, const struct item *item, void *work);
    void (*attend)(const struct attention *p, const struct item *item, void *work, const struct state *state, ptrdiff_t first,
                   ptrdiff_t last);
};

extern const struct arithmetic float_arithmetic;

/* That of a bfloat16 cache in tile registers; NULL where there are none for it. */
const struct arithmetic *bfloat_arithmetic(void);

#define LOG2_E 1.44269504f

static inline ptrdiff_t at_least(ptrdiff_t value, ptrdiff_t bound) { return value < bound ? bound : value; }

static inline ptrdiff_t at_most(ptrdiff_t value, ptrdiff_t bound) { return value > bound ? bound : value; }

static inline ptrdiff_t round_up(ptrdiff_t value, ptrdiff_t unit) { return (value + unit - 1) / unit * unit; }

/* Floats in a row of sums. */
static inline ptrdiff_t width_of(const struct attention *p) { return round_up(p->head_size, PANEL); }

/* Where a query row lies: times the strides of `query`, or in the contiguous output. */
static inline const float *query_row(const struct attention *p, const struct item *item, ptrdiff_t row) {
    ptrdiff_t token = p->query_start[item->request] + row / p->group;
    return p->query + token * p->query_token + (item->kv_head * p->group + row % p->group) * p->query_head;
}

/* Copy a query row, rotated. */
static inline void copy_query(const struct attention *p, const struct item *item, ptrdiff_t row, float *query) {
    memcpy(query, query_row(p, item, row), (size_t)p->head_size * sizeof(float));
    if (!p->rotary.table) return;
    ptrdiff_t token = p->query_start[item->request] + row / p->group;
    const float *cosine = p->rotary.table + p->rotary.positions[token] * 2 * p->rotary.half;
    rotate_halves(query, cosine, cosine + p->rotary.half, p->rotary.half);
}

static inline float *out_row(const struct attention *p, const struct item *item, ptrdiff_t row) {
    ptrdiff_t token = p->query_start[item->request] + row / p->group;
    return p->out + (token * p->num_heads + item->kv_head * p->group + row % p->group) * p->head_size;
}

/* The positions that a query row may see: [*first, *last). */
static inline void visible(const struct attention *p, const struct item *item, ptrdiff_t row, ptrdiff_t *first, ptrdiff_t *last) {
    const int32_t *start = p->query_start + item->request;
    ptrdiff_t position = p->seq_lens[item->request] - (start[1] - start[0]) + row / p->group;
    *first = p->window > 0 ? at_least(position - p->window + 1, 0) : 0;
    *last = position + 1;
}

/* The same as columns of the `columns` positions from `tile` on; none where *first >= *last. */
static inline void visible_columns(const struct attention *p, const struct item *item, ptrdiff_t row, ptrdiff_t tile,
                                   ptrdiff_t columns, int *first, int *last) {
    ptrdiff_t from, to;
    visible(p, item, row, &from, &to);
    *first = (int)at_most(at_least(from - tile, 0), columns);
    *last = (int)at_most(at_least(to - tile, 0), columns);
}

static inline void clear_state(const struct state *state, ptrdiff_t rows, ptrdiff_t width) {
    for (ptrdiff_t r = 0; r < rows; r++) state->largest[r] = -INFINITY;
    memset(state->total, 0, (size_t)rows * sizeof(float));
    memset(state->sum, 0, (size_t)(rows * width) * sizeof(float));
}

/* whole += part, each row relative to the larger of the two maxima. A cleared whole becomes the part. */
static inline void merge(const struct state *whole, const struct state *part, ptrdiff_t rows, ptrdiff_t width) {
    for (ptrdiff_t row = 0; row < rows; row += LANES) {
        vf before = load(whole->largest + row), after = load(part->largest + row), top = vmax(before, after);
        float tops[LANES], old[LANES], new[LANES];
        store(tops, top);
        store(old, vexp2(before - top));
        store(new, vexp2(after - top));
        for (ptrdiff_t i = 0, r = row; i < LANES && r < rows; i++, r++) {
            if (part->largest[r] == -INFINITY && part->total[r] == 0.0f) continue; /* nothing was seen; a NaN has a total */
            float *sum = whole->sum + r * width;
            const float *add = part->sum + r * width;
            whole->largest[r] = tops[i];
            whole->total[r] = whole->total[r] * old[i] + part->total[r] * new[i];
            for (ptrdiff_t d = 0; d < width; d += LANES) store(sum + d, load(sum + d) * splat(old[i]) + load(add + d) * splat(new[i]));
        }
    }
}

static inline ptrdiff_t place_of(const struct cache *cache, ptrdiff_t block, ptrdiff_t offset, ptrdiff_t head) {
    return block * cache->block + offset * cache->slot + head * cache->head;
}

static inline ptrdiff_t block_of(const struct attention *p, const struct item *item, ptrdiff_t position) {
    return p->block_table[item->request * p->table_stride + position / p->block_size];
}
#endif
