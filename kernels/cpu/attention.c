/* Causal attention over a block table, float32 over caches of float32 or 8-bit codes, online softmax (arXiv:2205.14135) over tiles of KEY_TILE positions.

   A work item is one request, one KV head and up to BLOCK_ROWS query rows; a row is one (token, head) pair of the group that
   shares the KV head. Every SECTION of positions is summed up by itself and the sections' sums are merged in order, by one
   thread that does the whole item or, when there are too few items for all threads, by the caller after the threads have done
   a section each. Tiles and sections start at fixed positions and each row's sums run in a fixed order, so a row's result
   depends neither on its batch mates nor on how its prompt was cut into steps nor on the number of threads.

   Keys are read in place where LANES consecutive slots of a block lie side by side for each feature, values where a row of
   features is contiguous and a multiple of PANEL long; else the tile is first copied into that form. Codes are decoded as they
   are read, or once per tile where several groups of rows read it. The scale of a key multiplies its score, the scale of a value
   its weight: one number each, however many features there are. */
#include <math.h>
#include <stdlib.h>

#include "codes.h"
#include "kernels.h"
#include "parallel.h"

#define KEY_TILE 128
#define KEY_PARTS (KEY_TILE / LANES)
#define SECTION (2 * KEY_TILE)
#define BLOCK_ROWS (4 * TILE_ROWS)
/* Pairs of a query row and a position that are worth claiming by themselves, some microseconds. */
#define PIECE_PAIRS 512
/* Below so many items per thread the sections of an item are shared out too. */
#define SPLIT_ITEMS 4

#define UNROLL_ROWS _Pragma("GCC unroll 12") for (int r = 0; r < rows; r++)
#define UNROLL_VECS _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECS; v++)

/* Strides in elements: block, slot, head, feature; of the scales (none for float32) block, slot, head. */
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
    float *out;
    ptrdiff_t num_heads, num_kv_heads, head_size, block_size;
    struct cache key, value;
    const int32_t *query_start, *seq_lens, *block_table;
    ptrdiff_t num_requests, table_stride;
    ptrdiff_t window; /* 0: none */
    float scale, soft_cap;
    /* When sections are shared out: how many per item, and the state of each part. */
    ptrdiff_t num_sections;
    float *parts;
};

struct item {
    ptrdiff_t request, kv_head, first_row, last_row;
};

/* Running softmax of some rows: the largest score, the sum of weights relative to it, and the weighted sum of values
   [rows][width]. */
struct state {
    float *largest, *total, *sum;
};

/* One thread's buffers. Rows of `sum` and of copied values are `width` floats: head_size rounded up to PANEL. */
struct scratch {
    float *query, *scores, *keys, *values;
    struct state part, whole; /* of one section, of all sections so far */
    ptrdiff_t width;
    /* The tile at hand: where the elements lie, and what a score and a weight of each position is multiplied by. */
    enum element key_kind, value_kind;
    const char *key_part[KEY_PARTS];
    ptrdiff_t key_step;
    const char *value_row[KEY_TILE];
    float score_factor[KEY_TILE], weight_factor[KEY_TILE];
};

static ptrdiff_t width_of(const struct attention *p) { return (p->head_size + PANEL - 1) / PANEL * PANEL; }

/* Floats of a state of BLOCK_ROWS rows. */
static size_t state_size(const struct attention *p) { return BLOCK_ROWS * (size_t)(width_of(p) + PANEL); }

static struct state state_at(const struct attention *p, float *base) {
    float *after = base + BLOCK_ROWS * width_of(p);
    return (struct state){after, after + BLOCK_ROWS, base};
}

static struct scratch carve(const struct attention *p) {
    struct scratch s;
    s.width = width_of(p);
    size_t query = BLOCK_ROWS * (size_t)p->head_size, scores = TILE_ROWS * KEY_TILE;
    size_t keys = KEY_TILE * (size_t)p->head_size, values = KEY_TILE * (size_t)s.width;
    float *base = thread_scratch((query + 2 * state_size(p) + scores + keys + values) * sizeof(float));
    s.scores = base;
    s.part = state_at(p, s.scores + scores);
    s.whole = state_at(p, s.scores + scores + state_size(p));
    s.values = s.scores + scores + 2 * state_size(p);
    s.keys = s.values + values;
    s.query = s.keys + keys;
    for (int i = 0; i < KEY_TILE; i++) s.score_factor[i] = p->scale, s.weight_factor[i] = 1.0f;
    return s;
}

/* `count` positions of one block, from `place` of a cache on, which are positions `at`.. of the tile. */
struct run {
    ptrdiff_t place, at, count;
};

static void copy_keys(const struct attention *p, struct scratch *s, const struct run *run) {
    const struct cache *cache = &p->key;
    ptrdiff_t whole = cache->slot == 1 ? run->count / LANES * LANES : 0;
    for (ptrdiff_t d = 0; d < p->head_size; d++) {
        float *copy = s->keys + d * KEY_TILE + run->at;
        ptrdiff_t place = run->place + d * cache->feature;
        for (ptrdiff_t i = 0; i < whole; i += LANES) store(copy + i, load_elements(cache->kind, cache->data, place + i));
        for (ptrdiff_t i = whole; i < run->count; i++) copy[i] = load_element(cache->kind, cache->data, place + i * cache->slot);
    }
}

static void copy_values(const struct attention *p, struct scratch *s, const struct run *run) {
    const struct cache *cache = &p->value;
    ptrdiff_t whole = cache->feature == 1 ? p->head_size / LANES * LANES : 0;
    for (ptrdiff_t i = 0; i < run->count; i++) {
        float *copy = s->values + (run->at + i) * s->width;
        ptrdiff_t place = run->place + i * cache->slot;
        for (ptrdiff_t d = 0; d < whole; d += LANES) store(copy + d, load_elements(cache->kind, cache->data, place + d));
        for (ptrdiff_t d = whole; d < p->head_size; d++)
            copy[d] = load_element(cache->kind, cache->data, place + d * cache->feature);
        for (ptrdiff_t d = p->head_size; d < s->width; d++) copy[d] = 0.0f;
        s->value_row[run->at + i] = (const char *)copy;
    }
}

static void gather_scales(const struct cache *cache, ptrdiff_t block, ptrdiff_t offset, ptrdiff_t head, ptrdiff_t count, float unit,
                          float *factor) {
    const float *scale = cache->scale + block * cache->scale_block + offset * cache->scale_slot + head * cache->scale_head;
    for (ptrdiff_t i = 0; i < count; i++) factor[i] = unit * scale[i * cache->scale_slot];
}

static ptrdiff_t place_of(const struct cache *cache, ptrdiff_t block, ptrdiff_t offset, ptrdiff_t head) {
    return block * cache->block + offset * cache->slot + head * cache->head;
}

/* Point s at the keys and values of positions first..last (one tile, of which only these exist). */
static void gather(const struct attention *p, const struct item *item, struct scratch *s, ptrdiff_t first, ptrdiff_t last) {
    int few = item->last_row - item->first_row <= TILE_ROWS, scaled = p->key.kind != FLOAT32;
    int keys_stay = p->key.slot == 1 && p->block_size % LANES == 0 && (few || !scaled);
    int values_stay = p->value.feature == 1 && s->width == p->head_size && (few || !scaled);
    size_t bytes = element_size(p->key.kind);
    s->key_kind = keys_stay ? p->key.kind : FLOAT32;
    s->value_kind = values_stay ? p->value.kind : FLOAT32;
    s->key_step = keys_stay ? p->key.feature : KEY_TILE;
    for (int i = 0; i < KEY_PARTS; i++) s->key_part[i] = (const char *)(s->keys + i * LANES);
    for (ptrdiff_t position = first, next; position < last; position = next) {
        ptrdiff_t offset = position % p->block_size, at = position - first, head = item->kv_head;
        ptrdiff_t block = p->block_table[item->request * p->table_stride + position / p->block_size];
        next = position - offset + p->block_size < last ? position - offset + p->block_size : last;
        struct run keys = {place_of(&p->key, block, offset, head), at, next - position};
        struct run values = {place_of(&p->value, block, offset, head), at, next - position};
        if (!keys_stay) copy_keys(p, s, &keys);
        for (ptrdiff_t i = 0; keys_stay && i < keys.count; i += LANES)
            s->key_part[(at + i) / LANES] = p->key.data + (keys.place + i) * bytes;
        if (!values_stay) copy_values(p, s, &values);
        for (ptrdiff_t i = 0; values_stay && i < values.count; i++)
            s->value_row[at + i] = p->value.data + (values.place + i * p->value.slot) * bytes;
        if (!scaled) continue;
        float unit = code_unit(p->key.kind);
        gather_scales(&p->key, block, offset, head, keys.count, unit * p->scale, s->score_factor + at);
        gather_scales(&p->value, block, offset, head, keys.count, unit, s->weight_factor + at);
    }
    /* Past the context there are no keys: any readable ones do, their scores are discarded. */
    for (ptrdiff_t part = (last - first + LANES - 1) / LANES; keys_stay && part < KEY_PARTS; part++) s->key_part[part] = s->key_part[0];
}

/* scores [rows][KEY_TILE] of columns part*LANES.. (PANEL of them): query [rows, depth] . keys */
INLINE void score_tile(const int rows, const enum element kind, const float *query, ptrdiff_t depth, const char *const *part,
                       ptrdiff_t step, float *scores) {
    vf sum[TILE_ROWS][PANEL_VECS];
    UNROLL_ROWS UNROLL_VECS sum[r][v] = (vf){0};
    for (ptrdiff_t d = 0; d < depth; d++) {
        vf key[PANEL_VECS];
        UNROLL_VECS key[v] = load_elements(kind, part[v], d * step);
        UNROLL_ROWS {
            vf value = splat(query[r * depth + d]);
            UNROLL_VECS sum[r][v] += key[v] * value;
        }
    }
    UNROLL_ROWS UNROLL_VECS store(scores + r * KEY_TILE + v * LANES, sum[r][v]);
}

/* sum [rows][width] (PANEL columns of it) += weights [rows][KEY_TILE] (columns first..last) . values */
INLINE void mix_tile(const int rows, const enum element kind, const float *weights, int first, int last,
                     const char *const *value_row, ptrdiff_t column, float *out, ptrdiff_t width) {
    vf sum[TILE_ROWS][PANEL_VECS];
    UNROLL_ROWS UNROLL_VECS sum[r][v] = load(out + r * width + v * LANES);
    for (int i = first; i < last; i++) {
        vf value[PANEL_VECS];
        UNROLL_VECS value[v] = load_elements(kind, value_row[i], column + v * LANES);
        UNROLL_ROWS {
            vf weight = splat(weights[r * KEY_TILE + i]);
            UNROLL_VECS sum[r][v] += value[v] * weight;
        }
    }
    UNROLL_ROWS UNROLL_VECS store(out + r * width + v * LANES, sum[r][v]);
}

/* Turn one row's scores into weights relative to its running maximum, each times its value's scale; [first, last) are the columns
   it may see. */
static void soften(const struct attention *p, const struct scratch *s, float *scores, int first, int last, int columns,
                   float *largest, float *total, float *sum) {
    vf peak = splat(-INFINITY);
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int i = 0; i < columns; i += LANES) {
        vf score = load(scores + i) * load(s->score_factor + i);
        if (p->soft_cap != 0.0f) score = capped(score, p->soft_cap);
        if (i < first || i + LANES > last) {
            vi column = lane + splat_int(i);
            score = choose((column >= splat_int(first)) & (column < splat_int(last)), score, splat(-INFINITY));
        }
        store(scores + i, score);
        peak = vmax(score, peak);
    }
    float top = max_lanes(peak);
    if (top < *largest) top = *largest;
    vf part = splat(0.0f);
    for (int i = 0; i < columns; i += LANES) {
        vf weight = vexp(load(scores + i) - splat(top));
        store(scores + i, weight * load(s->weight_factor + i));
        part += weight;
    }
    float fade = *largest == -INFINITY ? 0.0f : *largest == top ? 1.0f : expf(*largest - top);
    *total = *total * fade + sum_lanes(part);
    *largest = top;
    if (fade == 1.0f) return;
    for (ptrdiff_t d = 0; d < s->width; d += LANES) store(sum + d, load(sum + d) * splat(fade));
}

INLINE void score_rows(const int rows, const enum element kind, const struct scratch *s, const float *query, ptrdiff_t depth,
                       int columns) {
    for (int part = 0; part < columns / LANES; part += PANEL_VECS)
        score_tile(rows, kind, query, depth, s->key_part + part, s->key_step, s->scores + part * LANES);
}

INLINE void mix_rows(const int rows, const enum element kind, const struct scratch *s, float *sum, int first, int last) {
    for (ptrdiff_t column = 0; column < s->width; column += PANEL)
        mix_tile(rows, kind, s->scores, first, last, s->value_row, column, sum + column, s->width);
}

#define CASES_5(CASE, kind) CASE(1, kind) CASE(2, kind) CASE(3, kind) CASE(4, kind) CASE(5, kind)
#if TILE_ROWS >= 12
#define ALL_CASES(CASE, kind) \
    CASES_5(CASE, kind) CASE(6, kind) CASE(7, kind) CASE(8, kind) CASE(9, kind) CASE(10, kind) CASE(11, kind) CASE(12, kind)
#elif TILE_ROWS >= 6
#define ALL_CASES(CASE, kind) CASES_5(CASE, kind) CASE(6, kind)
#else
#define ALL_CASES(CASE, kind) CASES_5(CASE, kind)
#endif

/* One function per kind of element, and in it one piece of code per number of rows. */
#define FOR_KIND(kind)                                                                                                         \
    static void score_##kind(int rows, const struct scratch *s, const float *query, ptrdiff_t depth, int columns) {           \
        switch (rows) { ALL_CASES(SCORE_CASE, kind) }                                                                          \
    }                                                                                                                          \
    static void mix_##kind(int rows, const struct scratch *s, float *sum, int first, int last) {                              \
        switch (rows) { ALL_CASES(MIX_CASE, kind) }                                                                            \
    }
#define SCORE_CASE(n, kind) case n: score_rows(n, kind, s, query, depth, columns); break;
#define MIX_CASE(n, kind) case n: mix_rows(n, kind, s, sum, first, last); break;

FOR_KIND(FLOAT32)
FOR_KIND(INT8)
FOR_KIND(E4M3)

static void score_any(int rows, const struct scratch *s, const float *query, ptrdiff_t depth, int columns) {
    if (s->key_kind == FLOAT32) score_FLOAT32(rows, s, query, depth, columns);
    else if (s->key_kind == INT8) score_INT8(rows, s, query, depth, columns);
    else score_E4M3(rows, s, query, depth, columns);
}

static void mix_any(int rows, const struct scratch *s, float *sum, int first, int last) {
    if (s->value_kind == FLOAT32) mix_FLOAT32(rows, s, sum, first, last);
    else if (s->value_kind == INT8) mix_INT8(rows, s, sum, first, last);
    else mix_E4M3(rows, s, sum, first, last);
}

static ptrdiff_t at_least(ptrdiff_t value, ptrdiff_t bound) { return value < bound ? bound : value; }

static ptrdiff_t at_most(ptrdiff_t value, ptrdiff_t bound) { return value > bound ? bound : value; }

/* The positions that a query row may see: [*first, *last). */
static void visible(const struct attention *p, const struct item *item, ptrdiff_t row, ptrdiff_t *first, ptrdiff_t *last) {
    const int32_t *start = p->query_start + item->request;
    ptrdiff_t group = p->num_heads / p->num_kv_heads;
    ptrdiff_t position = p->seq_lens[item->request] - (start[1] - start[0]) + row / group;
    *first = p->window > 0 ? at_least(position - p->window + 1, 0) : 0;
    *last = position + 1;
}

/* Rows row.. of the item against the tile of positions from `tile`. */
static void attend_tile(const struct attention *p, const struct item *item, struct scratch *s, ptrdiff_t row, int rows,
                        ptrdiff_t tile) {
    ptrdiff_t place = row - item->first_row, first, last, unused;
    visible(p, item, row, &first, &unused);
    visible(p, item, row + rows - 1, &unused, &last);
    first = at_least(first - tile, 0);
    last = at_most(last - tile, KEY_TILE);
    if (first >= last) return;
    int columns = (int)((last + PANEL - 1) / PANEL * PANEL);
    score_any(rows, s, s->query + place * p->head_size, p->head_size, columns);
    for (int r = 0; r < rows; r++) {
        ptrdiff_t from, to;
        visible(p, item, row + r, &from, &to);
        from = at_most(at_least(from - tile, 0), KEY_TILE);
        to = at_most(at_least(to - tile, 0), KEY_TILE);
        float *scores = s->scores + r * KEY_TILE;
        if (from < to)
            soften(p, s, scores, (int)from, (int)to, columns, &s->part.largest[place + r], &s->part.total[place + r],
                   s->part.sum + (place + r) * s->width);
        else
            memset(scores, 0, (size_t)columns * sizeof(float));
    }
    mix_any(rows, s, s->part.sum + place * s->width, (int)first, (int)last);
}

static void clear_state(struct state *state, ptrdiff_t rows, ptrdiff_t width) {
    for (ptrdiff_t r = 0; r < rows; r++) state->largest[r] = -INFINITY;
    memset(state->total, 0, (size_t)rows * sizeof(float));
    memset(state->sum, 0, (size_t)(rows * width) * sizeof(float));
}

/* whole += part, each row relative to the larger of the two maxima. */
static void merge(struct state *whole, const struct state *part, ptrdiff_t rows, ptrdiff_t width) {
    for (ptrdiff_t r = 0; r < rows; r++) {
        if (part->largest[r] == -INFINITY && part->total[r] == 0.0f) continue; /* nothing was seen; a NaN has a total */
        float top = whole->largest[r] > part->largest[r] ? whole->largest[r] : part->largest[r];
        float old = expf(whole->largest[r] - top), new = expf(part->largest[r] - top);
        whole->largest[r] = top;
        whole->total[r] = whole->total[r] * old + part->total[r] * new;
        float *sum = whole->sum + r * width;
        const float *add = part->sum + r * width;
        for (ptrdiff_t d = 0; d < width; d += LANES) store(sum + d, load(sum + d) * splat(old) + load(add + d) * splat(new));
    }
}

static void copy_queries(const struct attention *p, const struct item *item, float *query) {
    ptrdiff_t group = p->num_heads / p->num_kv_heads, token = p->query_start[item->request];
    for (ptrdiff_t row = item->first_row; row < item->last_row; row++, query += p->head_size) {
        ptrdiff_t head = item->kv_head * group + row % group;
        memcpy(query, p->query + (token + row / group) * p->query_token + head * p->query_head, (size_t)p->head_size * sizeof(float));
    }
}

static void write_out(const struct attention *p, const struct item *item, const struct state *state) {
    ptrdiff_t group = p->num_heads / p->num_kv_heads, token = p->query_start[item->request];
    for (ptrdiff_t row = item->first_row; row < item->last_row; row++) {
        float *out = p->out + ((token + row / group) * p->num_heads + item->kv_head * group + row % group) * p->head_size;
        ptrdiff_t r = row - item->first_row;
        /* A request without a context pads a recorded step: zeros, not 0 / 0. */
        float total = state->total[r] == 0.0f ? 1.0f : state->total[r];
        for (ptrdiff_t d = 0; d < p->head_size; d++) out[d] = state->sum[r * width_of(p) + d] / total;
    }
}

/* The sections [*first, *last) that some row of the item sees. */
static void sections(const struct attention *p, const struct item *item, ptrdiff_t *first, ptrdiff_t *last) {
    ptrdiff_t from, to, unused;
    visible(p, item, item->first_row, &from, &unused);
    visible(p, item, item->last_row - 1, &unused, &to);
    *first = from / SECTION;
    *last = (to + SECTION - 1) / SECTION;
}

/* s->part = the item's rows over one section; s->query holds the queries. */
static void attend_section(const struct attention *p, const struct item *item, struct scratch *s, ptrdiff_t section) {
    ptrdiff_t first, last, unused;
    visible(p, item, item->first_row, &first, &unused);
    visible(p, item, item->last_row - 1, &unused, &last);
    first = at_least(first / KEY_TILE * KEY_TILE, section * SECTION);
    last = at_most(last, (section + 1) * SECTION);
    clear_state(&s->part, item->last_row - item->first_row, s->width);
    for (ptrdiff_t tile = first; tile < last; tile += KEY_TILE) {
        gather(p, item, s, tile, at_most(tile + KEY_TILE, last));
        for (ptrdiff_t row = item->first_row; row < item->last_row; row += TILE_ROWS)
            attend_tile(p, item, s, row, (int)at_most(TILE_ROWS, item->last_row - row), tile);
    }
}

static void attend(const struct attention *p, const struct item *item, struct scratch *s) {
    ptrdiff_t rows = item->last_row - item->first_row, section, last;
    copy_queries(p, item, s->query);
    clear_state(&s->whole, rows, s->width);
    for (sections(p, item, &section, &last); section < last; section++) {
        attend_section(p, item, s, section);
        merge(&s->whole, &s->part, rows, s->width);
    }
    write_out(p, item, &s->whole);
}

static ptrdiff_t num_rows(const struct attention *p, ptrdiff_t request) {
    return (p->query_start[request + 1] - p->query_start[request]) * (p->num_heads / p->num_kv_heads);
}

static ptrdiff_t num_blocks(ptrdiff_t rows) { return (rows + BLOCK_ROWS - 1) / BLOCK_ROWS; }

/* Items lie in the order of request, KV head and block of rows. */
static struct item item_at(const struct attention *p, ptrdiff_t index) {
    ptrdiff_t request = 0, rows = num_rows(p, 0);
    while (index >= num_blocks(rows) * p->num_kv_heads) {
        index -= num_blocks(rows) * p->num_kv_heads;
        rows = num_rows(p, ++request);
    }
    ptrdiff_t row = index % num_blocks(rows) * BLOCK_ROWS;
    return (struct item){request, index / num_blocks(rows), row, at_most(row + BLOCK_ROWS, rows)};
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
        copy_queries(p, &item, s.query);
        s.part = state_at(p, p->parts + first * (ptrdiff_t)state_size(p));
        attend_section(p, &item, &s, section);
    }
}

static void merge_parts(const struct attention *p, ptrdiff_t items) {
    struct scratch s = carve(p);
    for (ptrdiff_t i = 0; i < items; i++) {
        struct item item = item_at(p, i);
        ptrdiff_t rows = item.last_row - item.first_row, section, last;
        clear_state(&s.whole, rows, s.width);
        for (sections(p, &item, &section, &last); section < last; section++) {
            struct state part = state_at(p, p->parts + (i * p->num_sections + section) * (ptrdiff_t)state_size(p));
            merge(&s.whole, &part, rows, s.width);
        }
        write_out(p, &item, &s.whole);
    }
}

static void run(struct attention *p) {
    ptrdiff_t items = 0, pairs = 0, longest = 0;
    for (ptrdiff_t request = 0; request < p->num_requests; request++) {
        items += num_blocks(num_rows(p, request)) * p->num_kv_heads;
        pairs += num_rows(p, request) * p->num_kv_heads * p->seq_lens[request];
        longest = at_least(longest, p->seq_lens[request]);
    }
    if (items == 0) return;
    p->num_sections = (longest + SECTION - 1) / SECTION;
    int few = items < SPLIT_ITEMS * team_size() && team_size() > 1 && p->num_sections > 1 && pairs > 2 * PIECE_PAIRS;
    p->parts = few ? malloc((size_t)(items * p->num_sections) * state_size(p) * sizeof(float)) : NULL;
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
   cache: as cache_sizes.py lists it. The scales are NULL for float32. out is contiguous [T,H,D]. */
void twofold_paged_attention(const float *query, const void *key, const void *value, const float *key_scale,
                             const float *value_scale, float *out, const int32_t *query_start, const int32_t *seq_lens,
                             const int32_t *block_table, const ptrdiff_t *sizes, const ptrdiff_t *cache, float scale,
                             float soft_cap) {
    struct attention p = {.query = query, .out = out, .query_start = query_start, .seq_lens = seq_lens, .block_table = block_table};
    p.num_heads = sizes[0], p.num_kv_heads = sizes[1], p.head_size = sizes[2], p.block_size = sizes[3];
    p.num_requests = sizes[4], p.table_stride = sizes[5], p.window = sizes[6];
    p.query_token = sizes[7], p.query_head = sizes[8];
    p.key = cache_of(key, key_scale, cache, cache + KEY_STRIDES, cache + KEY_SCALE_STRIDES);
    p.value = cache_of(value, value_scale, cache, cache + VALUE_STRIDES, cache + VALUE_SCALE_STRIDES);
    p.scale = scale, p.soft_cap = soft_cap;
    run(&p);
}
