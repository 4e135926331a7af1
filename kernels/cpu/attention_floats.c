/* Attention in float32 over the keys and values of one tile at a time, whatever the cache's elements are.

   Keys are read in place where LANES consecutive slots of a block lie side by side for each feature, values where a row of
   features is contiguous and a multiple of PANEL long; else the tile is first copied into that form. Codes and bfloat16 are decoded
   as they are read, or once per tile where several groups of rows read it. The scale of a key multiplies its score, the scale of a
   value its weight: one number each, however many features there are. */
#include "attention.h"

#define KEY_PARTS (KEY_TILE / LANES)
#define ITEM_ROWS (4 * TILE_ROWS)

#define UNROLL_ROWS _Pragma("GCC unroll 12") for (int r = 0; r < rows; r++)
#define UNROLL_VECS _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECS; v++)

/* Rows of copied values are `width` floats: head_size rounded up to PANEL. */
struct work {
    float *query, *scores, *keys, *values;
    struct state part; /* of the section at hand */
    ptrdiff_t width;
    /* The tile at hand: where the elements lie, and what a score and a weight of each position is multiplied by. */
    enum element key_kind, value_kind;
    const char *key_part[KEY_PARTS];
    ptrdiff_t key_step;
    const char *value_row[KEY_TILE];
    float score_factor[KEY_TILE], weight_factor[KEY_TILE];
};

static size_t work_bytes(const struct attention *p) {
    size_t query = ITEM_ROWS * (size_t)p->head_size, scores = TILE_ROWS * KEY_TILE;
    size_t keys = KEY_TILE * (size_t)p->head_size, values = KEY_TILE * (size_t)width_of(p);
    size_t part = (size_t)p->state_rows * (width_of(p) + 2);
    return sizeof(struct work) + (query + scores + keys + values + part) * sizeof(float);
}

static void begin(const struct attention *p, const struct item *item, void *work) {
    struct work *w = work;
    w->width = width_of(p);
    w->scores = (float *)(w + 1);
    w->values = w->scores + TILE_ROWS * KEY_TILE;
    w->keys = w->values + KEY_TILE * w->width;
    w->query = w->keys + KEY_TILE * p->head_size;
    w->part.sum = w->query + ITEM_ROWS * p->head_size;
    w->part.largest = w->part.sum + p->state_rows * w->width;
    w->part.total = w->part.largest + p->state_rows;
    float *query = w->query;
    for (ptrdiff_t row = item->first_row; row < item->last_row; row++, query += p->head_size) copy_query(p, item, row, query);
    for (int i = 0; i < KEY_TILE; i++) w->score_factor[i] = p->scale, w->weight_factor[i] = 1.0f;
}

/* `count` positions of one block, from `place` of a cache on, which are positions `at`.. of the tile. */
struct run {
    ptrdiff_t place, at, count;
};

static void copy_keys(const struct attention *p, struct work *w, const struct run *run) {
    const struct cache *cache = &p->key;
    ptrdiff_t whole = cache->slot == 1 ? run->count / LANES * LANES : 0;
    for (ptrdiff_t d = 0; d < p->head_size; d++) {
        float *copy = w->keys + d * KEY_TILE + run->at;
        ptrdiff_t place = run->place + d * cache->feature;
        for (ptrdiff_t i = 0; i < whole; i += LANES) store(copy + i, load_elements(cache->kind, cache->data, place + i));
        for (ptrdiff_t i = whole; i < run->count; i++) copy[i] = load_element(cache->kind, cache->data, place + i * cache->slot);
    }
}

static void copy_values(const struct attention *p, struct work *w, const struct run *run) {
    const struct cache *cache = &p->value;
    ptrdiff_t whole = cache->feature == 1 ? p->head_size / LANES * LANES : 0;
    for (ptrdiff_t i = 0; i < run->count; i++) {
        float *copy = w->values + (run->at + i) * w->width;
        ptrdiff_t place = run->place + i * cache->slot;
        for (ptrdiff_t d = 0; d < whole; d += LANES) store(copy + d, load_elements(cache->kind, cache->data, place + d));
        for (ptrdiff_t d = whole; d < p->head_size; d++)
            copy[d] = load_element(cache->kind, cache->data, place + d * cache->feature);
        for (ptrdiff_t d = p->head_size; d < w->width; d++) copy[d] = 0.0f;
        w->value_row[run->at + i] = (const char *)copy;
    }
}

static void gather_scales(const struct cache *cache, ptrdiff_t block, ptrdiff_t offset, ptrdiff_t head, ptrdiff_t count, float unit,
                          float *factor) {
    const float *scale = cache->scale + block * cache->scale_block + offset * cache->scale_slot + head * cache->scale_head;
    for (ptrdiff_t i = 0; i < count; i++) factor[i] = unit * scale[i * cache->scale_slot];
}

/* Point w at the keys and values of positions first..last (one tile, of which only these exist). */
static void gather(const struct attention *p, const struct item *item, struct work *w, ptrdiff_t first, ptrdiff_t last) {
    int few = item->last_row - item->first_row <= TILE_ROWS, decode = p->key.kind != FLOAT32;
    int keys_stay = p->key.slot == 1 && p->block_size % LANES == 0 && (few || !decode);
    int values_stay = p->value.feature == 1 && w->width == p->head_size && (few || !decode);
    size_t bytes = element_size(p->key.kind);
    w->key_kind = keys_stay ? p->key.kind : FLOAT32;
    w->value_kind = values_stay ? p->value.kind : FLOAT32;
    w->key_step = keys_stay ? p->key.feature : KEY_TILE;
    for (int i = 0; i < KEY_PARTS; i++) w->key_part[i] = (const char *)(w->keys + i * LANES);
    for (ptrdiff_t position = first, next; position < last; position = next) {
        ptrdiff_t offset = position % p->block_size, at = position - first, head = item->kv_head;
        ptrdiff_t block = block_of(p, item, position);
        next = at_most(position - offset + p->block_size, last);
        struct run keys = {place_of(&p->key, block, offset, head), at, next - position};
        struct run values = {place_of(&p->value, block, offset, head), at, next - position};
        if (!keys_stay) copy_keys(p, w, &keys);
        for (ptrdiff_t i = 0; keys_stay && i < keys.count; i += LANES)
            w->key_part[(at + i) / LANES] = p->key.data + (keys.place + i) * bytes;
        if (!values_stay) copy_values(p, w, &values);
        for (ptrdiff_t i = 0; values_stay && i < values.count; i++)
            w->value_row[at + i] = p->value.data + (values.place + i * p->value.slot) * bytes;
        if (!p->key.scale) continue;
        float unit = code_unit(p->key.kind);
        gather_scales(&p->key, block, offset, head, keys.count, unit * p->scale, w->score_factor + at);
        gather_scales(&p->value, block, offset, head, keys.count, unit, w->weight_factor + at);
    }
    /* Past the context there are no keys: any readable ones do, their scores are discarded. */
    for (ptrdiff_t part = (last - first + LANES - 1) / LANES; keys_stay && part < KEY_PARTS; part++) w->key_part[part] = w->key_part[0];
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

/* A row's maximum rises from *largest to `top`: its sums so far count for less by a factor. */
INLINE void fade(float *largest, float top, float *total, float *sum, ptrdiff_t width) {
    if (*largest == top) return;
    float factor = exp2f(*largest - top);
    *largest = top;
    *total *= factor;
    for (ptrdiff_t d = 0; d < width; d += LANES) store(sum + d, load(sum + d) * splat(factor));
}

/* Turn one row's scores into weights relative to its running maximum, each times its value's scale; [first, last) are the columns
   it may see, of those from `from` on (a multiple of LANES) that the tile reads. */
static void soften(const struct attention *p, const struct work *w, float *scores, int first, int last, int from, int columns,
                   float *largest, float *total, float *sum) {
    vf peak = splat(-INFINITY);
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int i = from; i < columns; i += LANES) {
        vf score = load(scores + i) * load(w->score_factor + i);
        if (p->soft_cap != 0.0f) score = capped(score, p->soft_cap) * splat(LOG2_E);
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
    for (int i = from; i < columns; i += LANES) {
        vf weight = vexp2(load(scores + i) - splat(top));
        store(scores + i, weight * load(w->weight_factor + i));
        part += weight;
    }
    fade(largest, top, total, sum, w->width);
    *total += sum_lanes(part);
}

INLINE void score_rows(const int rows, const enum element kind, const struct work *w, const float *query, ptrdiff_t depth, int first,
                       int columns) {
    for (int part = first / LANES; part < columns / LANES; part += PANEL_VECS)
        score_tile(rows, kind, query, depth, w->key_part + part, w->key_step, w->scores + part * LANES);
}

INLINE void mix_rows(const int rows, const enum element kind, const struct work *w, float *sum, int first, int last) {
    for (ptrdiff_t column = 0; column < w->width; column += PANEL)
        mix_tile(rows, kind, w->scores, first, last, w->value_row, column, sum + column, w->width);
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
    static void score_##kind(int rows, const struct work *w, const float *query, ptrdiff_t depth, int first, int columns) {   \
        switch (rows) { ALL_CASES(SCORE_CASE, kind) }                                                                          \
    }                                                                                                                          \
    static void mix_##kind(int rows, const struct work *w, float *sum, int first, int last) {                                 \
        switch (rows) { ALL_CASES(MIX_CASE, kind) }                                                                            \
    }
#define SCORE_CASE(n, kind) case n: score_rows(n, kind, w, query, depth, first, columns); break;
#define MIX_CASE(n, kind) case n: mix_rows(n, kind, w, sum, first, last); break;

FOR_KIND(FLOAT32)
FOR_KIND(INT8)
FOR_KIND(E4M3)
FOR_KIND(BFLOAT16)

static void score_any(int rows, const struct work *w, const float *query, ptrdiff_t depth, int first, int columns) {
    if (w->key_kind == FLOAT32) score_FLOAT32(rows, w, query, depth, first, columns);
    else if (w->key_kind == INT8) score_INT8(rows, w, query, depth, first, columns);
    else if (w->key_kind == E4M3) score_E4M3(rows, w, query, depth, first, columns);
    else score_BFLOAT16(rows, w, query, depth, first, columns);
}

static void mix_any(int rows, const struct work *w, float *sum, int first, int last) {
    if (w->value_kind == FLOAT32) mix_FLOAT32(rows, w, sum, first, last);
    else if (w->value_kind == INT8) mix_INT8(rows, w, sum, first, last);
    else if (w->value_kind == E4M3) mix_E4M3(rows, w, sum, first, last);
    else mix_BFLOAT16(rows, w, sum, first, last);
}

/* Rows row.. of the item against the tile of positions from `tile`. */
static void attend_rows(const struct attention *p, const struct item *item, struct work *w, const struct state *state, ptrdiff_t row,
                        int rows, ptrdiff_t tile) {
    ptrdiff_t place = row - item->first_row;
    int first, last, unused;
    visible_columns(p, item, row, tile, KEY_TILE, &first, &unused);
    visible_columns(p, item, row + rows - 1, tile, KEY_TILE, &unused, &last);
    if (first >= last) return;
    int from = first / PANEL * PANEL, columns = (int)round_up(last, PANEL);
    score_any(rows, w, w->query + place * p->head_size, p->head_size, from, columns);
    for (int r = 0; r < rows; r++) {
        int begin, end;
        visible_columns(p, item, row + r, tile, KEY_TILE, &begin, &end);
        float *scores = w->scores + r * KEY_TILE;
        if (begin < end)
            soften(p, w, scores, begin, end, from, columns, &state->largest[place + r], &state->total[place + r],
                   state->sum + (place + r) * w->width);
        else
            memset(scores, 0, (size_t)columns * sizeof(float));
    }
    mix_any(rows, w, state->sum + place * w->width, first, last);
}

static void attend(const struct attention *p, const struct item *item, void *work, const struct state *state, ptrdiff_t first,
                   ptrdiff_t last) {
    struct work *w = work;
    ptrdiff_t rows = item->last_row - item->first_row;
    clear_state(&w->part, rows, w->width);
    for (ptrdiff_t tile = first; tile < last; tile += KEY_TILE) {
        gather(p, item, w, tile, at_most(tile + KEY_TILE, last));
        for (ptrdiff_t row = item->first_row; row < item->last_row; row += TILE_ROWS)
            attend_rows(p, item, w, &w->part, row, (int)at_most(TILE_ROWS, item->last_row - row), tile);
    }
    merge(state, &w->part, rows, w->width);
}

const struct arithmetic float_arithmetic = {ITEM_ROWS, LANES, work_bytes, begin, attend};
