/* Causal attention over a block table, online softmax (arXiv:2205.14135) over tiles of KEY_TILE positions.

   A work item is one request, one KV head and some query rows. Every SECTION of positions is summed up by itself and the sections'
   sums are merged in order, by one thread that does the whole item or, when there are too few items for all threads, by the caller
   after the threads have done a section each. Tiles and sections start at fixed positions and each row's sums run in a fixed order,
   so a row's result depends neither on its batch mates nor on how its prompt was cut into steps nor on the number of threads.

   What happens within a tile is attention_floats.c's, or attention_bfloats.c's for a bfloat16 cache where there are tile registers. */
#include <stdlib.h>

#include "attention.h"
#include "parallel.h"

/* Pairs of a query row and a position that are worth claiming by themselves, some microseconds. */
#define PIECE_PAIRS 512
/* Below so many items per thread the sections of an item are shared out too. */
#define SPLIT_ITEMS 4

/* One thread's buffers: the state of an item's rows, and the arithmetic's own. */
struct scratch {
    struct state state;
    void *work;
};

/* Floats of a state, whole cache lines of them. */
static ptrdiff_t state_size(const struct attention *p) { return round_up(p->state_rows * (width_of(p) + 2), 16); }

static struct state state_at(const struct attention *p, float *base) {
    float *after = base + p->state_rows * width_of(p);
    return (struct state){after, after + p->state_rows, base};
}

static struct scratch carve(const struct attention *p) {
    size_t floats = (size_t)state_size(p);
    float *base = thread_scratch(floats * sizeof(float) + p->arithmetic->work_bytes(p));
    return (struct scratch){state_at(p, base), base + floats};
}

static void write_out(const struct attention *p, const struct item *item, const struct state *state) {
    for (ptrdiff_t row = item->first_row; row < item->last_row; row++) {
        float *out = out_row(p, item, row);
        ptrdiff_t r = row - item->first_row;
        /* A request without a context pads a recorded step: zeros, not 0 / 0. */
        float share = 1.0f / (state->total[r] == 0.0f ? 1.0f : state->total[r]);
        const float *sum = state->sum + r * width_of(p);
        ptrdiff_t d = 0;
        for (; d + LANES <= p->head_size; d += LANES) store(out + d, load(sum + d) * splat(share));
        for (; d < p->head_size; d++) out[d] = sum[d] * share;
    }
}

/* The positions [*first, *last) that some row of the item sees. */
static void visible_to_some(const struct attention *p, const struct item *item, ptrdiff_t *first, ptrdiff_t *last) {
    ptrdiff_t unused;
    visible(p, item, item->first_row, first, &unused);
    visible(p, item, item->last_row - 1, &unused, last);
}

static void sections(const struct attention *p, const struct item *item, ptrdiff_t *first, ptrdiff_t *last) {
    visible_to_some(p, item, first, last);
    *first /= SECTION;
    *last = (*last + SECTION - 1) / SECTION;
}

/* Add one section to the state of the item's rows. */
static void attend_section(const struct attention *p, const struct item *item, const struct scratch *s, ptrdiff_t section) {
    ptrdiff_t first, last;
    visible_to_some(p, item, &first, &last);
    first = at_least(first / KEY_TILE * KEY_TILE, section * SECTION);
    last = at_most(last, (section + 1) * SECTION);
    p->arithmetic->attend(p, item, s->work, &s->state, first, last);
}

static void attend(const struct attention *p, const struct item *item, const struct scratch *s) {
    ptrdiff_t section, last;
    p->arithmetic->begin(p, item, s->work);
    clear_state(&s->state, item->last_row - item->first_row, width_of(p));
    for (sections(p, item, &section, &last); section < last; section++) attend_section(p, item, s, section);
    write_out(p, item, &s->state);
}

static ptrdiff_t num_rows(const struct attention *p, ptrdiff_t request) {
    return (p->query_start[request + 1] - p->query_start[request]) * p->group;
}

static ptrdiff_t num_blocks(const struct attention *p, ptrdiff_t rows) {
    return (rows + p->arithmetic->item_rows - 1) / p->arithmetic->item_rows;
}

/* Items lie in the order of request, block of rows from the last one back, and KV head: blocks that see most of a prompt come
   first, so that the threads end together. */
static struct item item_at(const struct attention *p, ptrdiff_t index) {
    ptrdiff_t request = 0, rows = num_rows(p, 0), blocks;
    while (index >= (blocks = num_blocks(p, rows)) * p->num_kv_heads) {
        index -= blocks * p->num_kv_heads;
        rows = num_rows(p, ++request);
    }
    ptrdiff_t row = (blocks - 1 - index / p->num_kv_heads) * p->arithmetic->item_rows;
    return (struct item){request, index % p->num_kv_heads, row, at_most(row + p->arithmetic->item_rows, rows)};
}

static void attend_items(void *arg, ptrdiff_t first, ptrdiff_t last) {
    struct attention *p = arg;
    struct scratch s = carve(p);
    for (; first < last; first++) {
        struct item item = item_at(p, first);
        attend(p, &item, &s);
    }
}

/* Part i is section i % num_sections of item i / num_sections; its state goes to p->parts. */
static void attend_parts(void *arg, ptrdiff_t first, ptrdiff_t last) {
    struct attention *p = arg;
    struct scratch s = carve(p);
    for (; first < last; first++) {
        struct item item = item_at(p, first / p->num_sections);
        ptrdiff_t section = first % p->num_sections, from, to;
        sections(p, &item, &from, &to);
        if (section < from || section >= to) continue;
        p->arithmetic->begin(p, &item, s.work);
        s.state = state_at(p, p->parts + first * state_size(p));
        clear_state(&s.state, item.last_row - item.first_row, width_of(p));
        attend_section(p, &item, &s, section);
    }
}

static void merge_parts(const struct attention *p, ptrdiff_t items) {
    struct scratch s = carve(p);
    for (ptrdiff_t i = 0; i < items; i++) {
        struct item item = item_at(p, i);
        ptrdiff_t rows = item.last_row - item.first_row, section, last;
        clear_state(&s.state, rows, width_of(p));
        for (sections(p, &item, &section, &last); section < last; section++) {
            struct state part = state_at(p, p->parts + (i * p->num_sections + section) * state_size(p));
            merge(&s.state, &part, rows, width_of(p));
        }
        write_out(p, &item, &s.state);
    }
}

static void run(struct attention *p) {
    ptrdiff_t items = 0, pairs = 0, longest = 0, most = 0;
    for (ptrdiff_t request = 0; request < p->num_requests; request++) {
        ptrdiff_t rows = num_rows(p, request);
        items += num_blocks(p, rows) * p->num_kv_heads;
        pairs += rows * p->num_kv_heads * p->seq_lens[request];
        longest = at_least(longest, p->seq_lens[request]);
        most = at_least(most, rows);
    }
    if (items == 0) return;
    p->state_rows = round_up(at_most(most, p->arithmetic->item_rows), p->arithmetic->row_multiple);
    p->num_sections = (longest + SECTION - 1) / SECTION;
    int few = items < SPLIT_ITEMS * team_size() && team_size() > 1 && p->num_sections > 1 && pairs > 2 * PIECE_PAIRS;
    p->parts = few ? aligned_alloc(64, (size_t)(items * p->num_sections * state_size(p)) * sizeof(float)) : NULL;
    if (!p->parts) {
        team_run(attend_items, p, items, team_grain(PIECE_PAIRS, pairs / items));
        return;
    }
    team_run(attend_parts, p, items * p->num_sections, team_grain(PIECE_PAIRS, pairs / (items * p->num_sections)));
    merge_parts(p, items);
    free(p->parts);
}

static struct cache cache_of(const void *data, const float *scale, const ptrdiff_t *cache, const ptrdiff_t *strides,
                             const ptrdiff_t *scale_strides) {
    return (struct cache){data, (enum element)cache[ELEMENT], strides[0], strides[1], strides[2], strides[3],
                          scale, scale_strides[0], scale_strides[1], scale_strides[2]};
}

/* sizes: num_heads, num_kv_heads, head_size, block_size, num_requests, table_stride, window, query token and head strides;
   cache: as cache_sizes.py lists it. The scales are NULL for floats. out is contiguous [T,H,D]. */
void attend_rotated(const float *query, struct rotary rotary, const void *key, const void *value, const float *key_scale,
                    const float *value_scale, float *out, const int32_t *query_start, const int32_t *seq_lens,
                    const int32_t *block_table, const ptrdiff_t *sizes, const ptrdiff_t *cache, float scale, float soft_cap) {
    struct attention p = {.query = query, .rotary = rotary, .out = out, .query_start = query_start, .seq_lens = seq_lens,
                          .block_table = block_table};
    p.num_heads = sizes[0], p.num_kv_heads = sizes[1], p.head_size = sizes[2], p.block_size = sizes[3];
    p.group = p.num_heads / p.num_kv_heads;
    p.num_requests = sizes[4], p.table_stride = sizes[5], p.window = sizes[6];
    p.query_token = sizes[7], p.query_head = sizes[8];
    p.key = cache_of(key, key_scale, cache, cache + KEY_STRIDES, cache + KEY_SCALE_STRIDES);
    p.value = cache_of(value, value_scale, cache, cache + VALUE_STRIDES, cache + VALUE_SCALE_STRIDES);
    p.soft_cap = soft_cap;
    p.scale = soft_cap == 0.0f ? scale * LOG2_E : scale;
    p.arithmetic = p.key.kind == BFLOAT16 ? bfloat_arithmetic() : NULL;
    if (!p.arithmetic) p.arithmetic = &float_arithmetic;
    run(&p);
}

void twofold_paged_attention(const float *query, const void *key, const void *value, const float *key_scale,
                             const float *value_scale, float *out, const int32_t *query_start, const int32_t *seq_lens,
                             const int32_t *block_table, const ptrdiff_t *sizes, const ptrdiff_t *cache, float scale,
                             float soft_cap) {
    attend_rotated(query, (struct rotary){0}, key, value, key_scale, value_scale, out, query_start, seq_lens, block_table, sizes,
                   cache, scale, soft_cap);
}
