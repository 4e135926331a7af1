/* Attention in float32 over the keys and values of one tile at a time, whatever the cache's elements are.

   Keys are read in place where LANES consecutive slots of a block lie side by side for each feature, values where a row of
   features is contiguous and a multiple of PANEL long; else the tile is first copied into that form. Codes and bfloat16 are decoded
   as they are read, or once per tile where several groups of rows read it. The scale of a key multiplies its score, the scale of a
   value its weight: one number each, however many features there are. */
#include "attention.h"
#include "linear_tile.h"

#define KEY_PARTS (KEY_TILE / LANES)
#define ITEM_ROWS (4 * TILE_ROWS)

#define MAX_GROUPS (ITEM_ROWS / TILE_ROWS)

/* Rows of an item that are computed together, TILE_ROWS of them from `row` on: the columns first..last of the tile at hand that one of
   them sees, the panels from..columns of these, and the columns that all see. */
struct group {
    int row, rows, computed; /* computed: rows and zeros, a number that tiles come in */
    int first, last, from, columns, all_from, all_to;
};

/* query [ITEM_ROWS][head_size]; scores [ITEM_ROWS][KEY_TILE]; peaks [ITEM_ROWS][LANES]: the tile's largest scores so far; rows of copied
   values are `width` floats: head_size rounded up to PANEL. */
struct work {
    float *query, *scores, *peaks, *keys, *values;
    struct state part; /* of the section at hand */
    ptrdiff_t width, rows;                       /* rows that are computed */
    ptrdiff_t first[ITEM_ROWS], last[ITEM_ROWS]; /* the positions that each row sees */
    /* The tile at hand: where the elements lie, and what a score and a weight of each position is multiplied by. */
    enum element key_kind, value_kind;
    const char *key_part[KEY_PARTS];
    ptrdiff_t key_step;
    const char *value_row[KEY_TILE];
    float score_factor[KEY_TILE], weight_factor[KEY_TILE];
};

/* Rows that are computed for so many of a group. */
static int computed_rows(ptrdiff_t rows) { return rows <= 8 ? (int)rows : TILE_ROWS; }

static size_t work_bytes(const struct attention *p) {
    size_t query = ITEM_ROWS * (size_t)p->head_size, scores = ITEM_ROWS * (KEY_TILE + LANES);
    size_t keys = KEY_TILE * (size_t)p->head_size, values = KEY_TILE * (size_t)width_of(p);
    size_t part = (size_t)p->state_rows * (width_of(p) + 2);
    return sizeof(struct work) + VEC_BYTES + (query + scores + keys + values + part) * sizeof(float);
}

static void begin(const struct attention *p, const struct item *item, void *work) {
    struct work *w = work;
    w->width = width_of(p);
    w->scores = (float *)(((uintptr_t)(w + 1) + VEC_BYTES - 1) / VEC_BYTES * VEC_BYTES);
    w->peaks = w->scores + ITEM_ROWS * KEY_TILE;
    w->values = w->peaks + ITEM_ROWS * LANES;
    w->keys = w->values + KEY_TILE * w->width;
    w->part.sum = w->keys + KEY_TILE * p->head_size;
    w->part.largest = w->part.sum + p->state_rows * w->width;
    w->part.total = w->part.largest + p->state_rows;
    w->query = w->part.total + p->state_rows;
    const ptrdiff_t rows = item->last_row - item->first_row;
    w->rows = rows - rows % TILE_ROWS + computed_rows(rows % TILE_ROWS);
    memset(w->query + rows * p->head_size, 0, (size_t)((w->rows - rows) * p->head_size) * sizeof(float));
    for (ptrdiff_t row = item->first_row, i = 0; row < item->last_row; row++, i++) {
        copy_query(p, item, row, w->query + i * p->head_size);
        visible(p, item, row, &w->first[i], &w->last[i]);
    }
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

/* Scores of PANEL columns of the tile: query [rows, depth] . keys, times a factor per column; peaks [rows][LANES]: raised to them. */
INLINE void score_tile(const int rows, const enum element kind, const float *query, ptrdiff_t depth, const char *const *part,
                       ptrdiff_t step, const float *factor, float *scores, float *peaks) {
    const int pointers = (rows + POINTER_ROWS - 1) / POINTER_ROWS;
    const float *place[(TILE_ROWS + POINTER_ROWS - 1) / POINTER_ROWS];
    const char *keys[PANEL_VECS];
    accumulators sum;
    UNROLL_VECS keys[v] = part[v];
    UNROLL_ROWS UNROLL_VECS sum[r][v] = (vf){0};
#pragma GCC unroll 4
    for (int i = 0; i < pointers; i++) place[i] = query + i * POINTER_ROWS * depth;
    for (ptrdiff_t d = 0, key = 0; d < depth; d++, key += step) {
        vf column[PANEL_VECS];
        UNROLL_VECS column[v] = load_elements(kind, keys[v], key), keep(&column[v]);
        UNROLL_ROWS {
            vf value = splat(place[r / POINTER_ROWS][r % POINTER_ROWS * depth]);
            UNROLL_VECS add_product(&sum[r][v], column[v], value);
        }
#pragma GCC unroll 4
        for (int i = 0; i < pointers; i++) place[i]++;
    }
    UNROLL_ROWS {
        vf peak = load(peaks + r * LANES);
        UNROLL_VECS {
            vf score = sum[r][v] * load(factor + v * LANES);
            store(scores + r * KEY_TILE + v * LANES, score);
            peak = vmax(score, peak);
        }
        store(peaks + r * LANES, peak);
    }
}

/* out [rows][width] (PANEL columns of it) += weights [rows][KEY_TILE] (columns first..last) . values */
INLINE void mix_tile(const int rows, const enum element kind, const float *weights, int first, int last,
                     const char *const *value_row, ptrdiff_t column, float *out, ptrdiff_t width) {
    accumulators sum;
    UNROLL_ROWS UNROLL_VECS sum[r][v] = load(out + r * width + v * LANES);
    for (int i = first; i < last; i++) {
        vf value[PANEL_VECS];
        UNROLL_VECS value[v] = load_elements(kind, value_row[i], column + v * LANES), keep(&value[v]);
        UNROLL_ROWS {
            vf weight = splat(weights[r * KEY_TILE + i]);
            UNROLL_VECS add_product(&sum[r][v], value[v], weight);
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

/* Cap a row's scores of a panel, and make them minus infinity but for columns first..last; peaks [LANES]: raised to them. */
static void mask_scores(float soft_cap, float *scores, int first, int last, float *peaks) {
    vf peak = load(peaks);
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int i = 0; i < PANEL; i += LANES) {
        vf score = load(scores + i);
        vi column = lane + splat_int(i);
        if (soft_cap != 0.0f) score = capped(score, soft_cap) * splat(LOG2_E);
        score = choose((column >= splat_int(first)) & (column < splat_int(last)), score, splat(-INFINITY));
        store(scores + i, score);
        peak = vmax(score, peak);
    }
    store(peaks, peak);
}

/* Turn one row's scores into weights relative to `top`, each times its value's scale. Returns their sum without these. */
static float weigh(const struct attention *p, const struct work *w, float *scores, float top, int from, int columns) {
    vf part = splat(0.0f);
    for (int i = from; i < columns; i += LANES) {
        vf weight = vexp2(load(scores + i) - splat(top));
        store(scores + i, p->value.scale ? weight * load(w->weight_factor + i) : weight);
        part += weight;
    }
    return sum_lanes(part);
}

#define CASES_5(CASE, kind) CASE(1, kind) CASE(2, kind) CASE(3, kind) CASE(4, kind) CASE(5, kind)
#if TILE_ROWS >= 12
#define CASES(CASE, kind) CASES_5(CASE, kind) CASE(6, kind) CASE(7, kind) CASE(8, kind) CASE(12, kind)
#elif TILE_ROWS >= 6
#define CASES(CASE, kind) CASES_5(CASE, kind) CASE(6, kind)
#else
#define CASES CASES_5
#endif

/* For each kind of element and number of rows a function: a compiler takes longer for all in one. */
#define NOINLINE __attribute__((noinline))
#define SCORE(n, kind)                                                                                                           \
    static NOINLINE void score_##n##_##kind(const float *query, ptrdiff_t depth, const char *const *part, ptrdiff_t step,       \
                                            const float *factor, float *scores, float *peaks) {                                  \
        score_tile(n, kind, query, depth, part, step, factor, scores, peaks);                                                    \
    }
#define MIX(n, kind)                                                                                                             \
    static NOINLINE void mix_##n##_##kind(const float *weights, int first, int last, const char *const *value_row,              \
                                          ptrdiff_t column, float *out, ptrdiff_t width) {                                       \
        mix_tile(n, kind, weights, first, last, value_row, column, out, width);                                                  \
    }
#define SCORE_NAME(n, kind) [n] = score_##n##_##kind,
#define MIX_NAME(n, kind) [n] = mix_##n##_##kind,

CASES(SCORE, FLOAT32) CASES(SCORE, INT8) CASES(SCORE, E4M3) CASES(SCORE, BFLOAT16)
CASES(MIX, FLOAT32) CASES(MIX, INT8) CASES(MIX, E4M3) CASES(MIX, BFLOAT16)

typedef void (*scorer)(const float *, ptrdiff_t, const char *const *, ptrdiff_t, const float *, float *, float *);
typedef void (*mixer)(const float *, int, int, const char *const *, ptrdiff_t, float *, ptrdiff_t);

static const scorer scorers[][TILE_ROWS + 1] = {
    [FLOAT32] = {CASES(SCORE_NAME, FLOAT32)}, [INT8] = {CASES(SCORE_NAME, INT8)},
    [E4M3] = {CASES(SCORE_NAME, E4M3)}, [BFLOAT16] = {CASES(SCORE_NAME, BFLOAT16)}};
static const mixer mixers[][TILE_ROWS + 1] = {
    [FLOAT32] = {CASES(MIX_NAME, FLOAT32)}, [INT8] = {CASES(MIX_NAME, INT8)},
    [E4M3] = {CASES(MIX_NAME, E4M3)}, [BFLOAT16] = {CASES(MIX_NAME, BFLOAT16)}};

/* What row i of the item sees of the tile's columns; nothing where *first >= *last. */
static void seen(const struct work *w, ptrdiff_t i, ptrdiff_t tile, int *first, int *last) {
    *first = (int)at_most(at_least(w->first[i] - tile, 0), KEY_TILE);
    *last = (int)at_most(at_least(w->last[i] - tile, 0), KEY_TILE);
}

/* The groups of rows that see something of the tile. */
static int find_groups(const struct work *w, int rows, ptrdiff_t tile, struct group *groups) {
    int count = 0;
    for (int row = 0; row < rows; row += TILE_ROWS) {
        struct group g = {.row = row, .rows = (int)at_most(TILE_ROWS, rows - row)};
        g.computed = computed_rows(g.rows);
        seen(w, row, tile, &g.first, &g.all_to);
        seen(w, row + g.rows - 1, tile, &g.all_from, &g.last);
        g.from = g.first / PANEL * PANEL, g.columns = (int)round_up(g.last, PANEL);
        if (g.first < g.last) groups[count++] = g;
    }
    return count;
}

/* Scores of a panel for the rows of a group. Rows that see it whole need no more than its products. */
static void score(const struct attention *p, const struct work *w, const struct group *g, int column, ptrdiff_t tile) {
    ALIGNED float unused[TILE_ROWS * LANES];
    float *scores = w->scores + g->row * KEY_TILE + column, *peaks = w->peaks + g->row * LANES;
    const int whole = column >= g->all_from && column + PANEL <= g->all_to && p->soft_cap == 0.0f;
    scorers[w->key_kind][g->computed](w->query + g->row * p->head_size, p->head_size, w->key_part + column / LANES, w->key_step,
                                      w->score_factor + column, scores, whole ? peaks : unused);
    for (int r = 0; !whole && r < g->rows; r++) {
        int first, last;
        seen(w, g->row + r, tile, &first, &last);
        mask_scores(p->soft_cap, scores + r * KEY_TILE, first - column, last - column, peaks + r * LANES);
    }
}

/* Scores become weights. Step by step for all rows of a group: what one row's step waits for does not hold up the others. */
static void soften(const struct attention *p, const struct work *w, const struct group *g, ptrdiff_t tile) {
    float top[TILE_ROWS], total[TILE_ROWS], *scores = w->scores + g->row * KEY_TILE;
    const struct state part = {w->part.largest + g->row, w->part.total + g->row, w->part.sum + g->row * w->width};
    for (int r = 0; r < g->rows; r++) {
        top[r] = max_lanes(load(w->peaks + (g->row + r) * LANES));
        if (top[r] < part.largest[r]) top[r] = part.largest[r];
    }
    for (int r = 0; r < g->rows; r++) {
        int first, last;
        seen(w, g->row + r, tile, &first, &last);
        if (first < last)
            total[r] = weigh(p, w, scores + r * KEY_TILE, top[r], g->from, g->columns);
        else
            total[r] = 0.0f, memset(scores + r * KEY_TILE, 0, (size_t)g->columns * sizeof(float));
    }
    for (int r = 0; r < g->rows; r++) {
        fade(&part.largest[r], top[r], &part.total[r], part.sum + r * w->width, w->width);
        part.total[r] += total[r];
    }
}

/* The item's rows against a tile of positions: panel by panel of keys, then of values, so that it stays in the L1 cache while the rows
   pass by. */
static void attend_tile(const struct attention *p, struct work *w, int rows, ptrdiff_t tile) {
    struct group groups[MAX_GROUPS];
    const int count = find_groups(w, rows, tile, groups);
    for (int r = 0; r < w->rows; r++) store(w->peaks + r * LANES, splat(-INFINITY));
    for (int column = 0; column < KEY_TILE; column += PANEL)
        for (const struct group *g = groups; g < groups + count; g++)
            if (column >= g->from && column < g->columns) score(p, w, g, column, tile);
    for (const struct group *g = groups; g < groups + count; g++) soften(p, w, g, tile);
    for (ptrdiff_t column = 0; column < w->width; column += PANEL)
        for (const struct group *g = groups; g < groups + count; g++)
            mixers[w->value_kind][g->computed](w->scores + g->row * KEY_TILE, g->first, g->last, w->value_row, column,
                                           w->part.sum + g->row * w->width + column, w->width);
}

static void attend(const struct attention *p, const struct item *item, void *work, const struct state *state, ptrdiff_t first,
                   ptrdiff_t last) {
    struct work *w = work;
    ptrdiff_t rows = item->last_row - item->first_row;
    clear_state(&w->part, w->rows, w->width);
    for (ptrdiff_t tile = first; tile < last; tile += KEY_TILE) {
        gather(p, item, w, tile, at_most(tile + KEY_TILE, last));
        attend_tile(p, w, (int)rows, tile);
    }
    merge(state, &w->part, rows, w->width);
}

const struct arithmetic float_arithmetic = {ITEM_ROWS, LANES, work_bytes, begin, attend};
