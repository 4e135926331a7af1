/* The product of linear_bf16.c for many rows: tiles of x times tiles of weights, sums row by row.

   Groups of panels are expanded for hundreds of rows at once, turned into pairs of input features, and lie in the L2 cache. A pair
   of tiles' rows of x, part by part of K in the L1 cache, passes them all, so that y grows along its rows. Sums of a part wait in
   memory for the next one, which changes no bit: each is over K in the order of linear_bf16_few.c. */
#include "bf16_rows.h"
#include "bf16_tiles.h"

#if HAVE_AMX_BF16
#define PAIR_ROWS (2 * AMX_ROWS)
#define STEP_TILES (2 * A_BYTES)
#define UNIT_FLOATS (2 * SUM_FLOATS)
/* Rows for which panels are expanded once. */
#define MAX_CHUNK 1024
/* Steps whose x is kept in the L1 cache, and steps that are expanded before sums wait for the others. */
#define BLOCK_STEPS 18
#define PART_STEPS 64
/* Expanded weights that a thread works with in the L2 cache. */
#define GROUP_BYTES (896 << 10)

struct many {
    const struct bf16_product *p;
    struct bf16_rows x;
    struct bf16_gate gate;
    ptrdiff_t panels, up; /* panels with items; where the other half's begin, 0 without a gate */
    ptrdiff_t part_steps, chunk, chunks, group, groups;
};

/* Two sums [2][16 rows][16 features], of a pair's rows from `row` on and half a panel's features. */
struct unit {
    const uint8_t *b; /* its expanded steps */
    float *sums;
    ptrdiff_t row, feature, done; /* rows of gates, and of the ups in the next sums, that are gated */
};

/* Sixteen rows of sixteen pairs become columns. */
INLINE void turn(const uint8_t *from, uint8_t *to) {
    __m512 tile[AMX_ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < AMX_ROWS; i++) tile[i] = _mm512_loadu_ps(from + i * STEP_BYTES);
    transpose(tile);
#pragma GCC unroll 16
    for (int i = 0; i < AMX_ROWS; i++) _mm512_store_ps(to + i * STEP_BYTES, tile[i]);
}

/* Steps of a panel as two tiles each, [STEP_K / 2 pairs][16 output features][2]: those of its first half, and `apart` bytes on
   those of the other. */
static void expand(const struct bf16_weights *w, ptrdiff_t panel, ptrdiff_t step, ptrdiff_t end, uint8_t *out, ptrdiff_t apart) {
    _Alignas(64) uint8_t lines[STEP_TILES];
    struct bf16_groups groups;
    bf16_forget(&groups);
    for (; step < end; step++, out += A_BYTES) {
        const uint8_t *from = w->codes + (panel * w->steps + step) * w->step_bytes;
        if (w->kind != FLOATS16) bf16_expand(w, panel, step, &groups, lines), from = lines;
        turn(from, out);
        turn(from + A_BYTES, out + apart);
    }
}

/* To y, for the last rows and features of all, or with a bias. */
static void write_rows(const struct bf16_product *p, const struct unit *unit) {
    const ptrdiff_t rows = smaller(p->rows - unit->row, PAIR_ROWS), features = p->out_features - unit->feature;
    if (features <= 0) return;
    const __mmask16 lanes = (__mmask16)(features >= LANES ? -1 : (1 << features) - 1);
    const vf bias = p->bias ? (vf)_mm512_maskz_loadu_ps(lanes, p->bias + unit->feature) : splat(0.0f);
    for (ptrdiff_t r = 0; r < rows; r++) {
        const vf sum = load(unit->sums + r * LANES);
        float *y = p->y + (unit->row + r) * p->out_features + unit->feature;
        _mm512_mask_storeu_ps(y, lanes, (__m512)(p->bias ? sum + bias : sum));
    }
}

/* The next row of a unit of gates and the ups beside them, rounded. */
INLINE void gate_row(const struct many *m, struct unit *unit) {
    const struct bf16_product *p = m->p;
    const float *sums = unit->sums + unit->done * LANES;
    vf gate = load(sums), up = load(sums + UNIT_FLOATS);
    if (p->bias) {
        gate += load(p->bias + unit->feature);
        up += load(p->bias + m->up * PANEL + unit->feature);
    }
    uint16_t *out = m->gate.out + (unit->row + unit->done++) * m->gate.stride + unit->feature;
    _mm256_storeu_si256((__m256i *)out, (__m256i)_mm512_cvtneps_pbh((__m512)(silu(gate) * up)));
}

INLINE void gate_rows(const struct many *m, struct unit *unit, ptrdiff_t count) {
    const ptrdiff_t end = smaller(unit->done + count, smaller(m->p->rows - unit->row, PAIR_ROWS));
    while (unit->done < end) gate_row(m, unit);
}

/* What is written soon, which lies far apart and often in no cache: a row of y, or of what the gate takes. */
INLINE void ask_for(const struct many *m, const struct unit *unit, ptrdiff_t row) {
    const struct bf16_product *p = m->p;
    if (unit->row + row >= p->rows) return;
    if (m->up)
        __builtin_prefetch(m->gate.out + (unit->row + row) * m->gate.stride + unit->feature, 1);
    else
        __builtin_prefetch(p->y + (unit->row + row) * p->out_features + unit->feature, 1);
}

/* Steps step..end-1 of a unit. Weights pass the L1 cache by, so that x stays there. `before`, gates and ups whose sums are ready,
   is worked on while tiles are busy.

   Four tiles at a time: a core that shares its registers with another thread's has few beyond the eight that there are names for,
   and a load waits for one. Two sums and two factors need more loads than four and four, and run twice as fast there. */
static void run_unit(const struct many *m, const uint8_t *x, ptrdiff_t x_row, const struct unit *unit, struct unit *before,
                     ptrdiff_t step, ptrdiff_t end) {
    const struct bf16_product *p = m->p;
    const uint8_t *below = x + AMX_ROWS * x_row, *b = unit->b;
    const int ends = end == p->w.steps;
    _tile_zero(0);
    _tile_zero(1);
    if (step) {
        _tile_loadd(0, unit->sums, VEC_BYTES);
        _tile_loadd(1, unit->sums + SUM_FLOATS, VEC_BYTES);
    }
    for (ptrdiff_t row = 0; step < end; step++, row += 2) {
        _tile_stream_loadd(3, b, STEP_BYTES);
        _tile_loadd(2, x, x_row);
        _tile_dpbf16ps(0, 2, 3);
        _tile_loadd(2, below, x_row);
        _tile_dpbf16ps(1, 2, 3);
        x += STEP_BYTES, below += STEP_BYTES, b += A_BYTES;
        if (m->up) gate_rows(m, before, 1);
        if (ends && row < PAIR_ROWS) {
            ask_for(m, unit, row);
            ask_for(m, unit, row + 1);
        }
    }
    if (ends && !m->up && !p->bias && unit->row + PAIR_ROWS <= p->rows && unit->feature + LANES <= p->out_features) {
        float *y = p->y + unit->row * p->out_features + unit->feature;
        _tile_stored(0, y, p->out_features * sizeof(float));
        _tile_stored(1, y + AMX_ROWS * p->out_features, p->out_features * sizeof(float));
        return;
    }
    _tile_stored(0, unit->sums, VEC_BYTES);
    _tile_stored(1, unit->sums + SUM_FLOATS, VEC_BYTES);
    amx_settle(unit->sums);
    if (ends && !m->up) write_rows(p, unit);
}

/* A pair's rows of x; the last ones of all are copied to `spare` [PAIR_ROWS], behind them there may be no memory. */
static struct bf16_rows pair_of(const struct many *m, ptrdiff_t row, uint8_t *spare) {
    const ptrdiff_t rows = m->p->rows - row, bytes = m->p->w.steps * STEP_BYTES;
    struct bf16_rows pair = {(const uint8_t *)m->x.x + row * m->x.stride, m->x.stride};
    if (rows >= PAIR_ROWS) return pair;
    for (ptrdiff_t r = 0; r < PAIR_ROWS; r++) {
        if (r < rows)
            memcpy(spare + r * bytes, (const uint8_t *)pair.x + r * pair.stride, bytes);
        else
            memset(spare + r * bytes, 0, bytes);
    }
    amx_settle(spare);
    return (struct bf16_rows){spare, bytes};
}

static ptrdiff_t num_sides(const struct many *m) { return m->up ? 2 : 1; }

/* Units of a group: halves of its panels, each half of gates followed by that of their ups. */
static ptrdiff_t num_units(const struct many *m, ptrdiff_t panels) { return 2 * num_sides(m) * panels; }

/* A pair's rows times steps start..end-1 of a group's panels, expanded at `b`, those of ups behind the gates'. */
static void run_pair(const struct many *m, struct bf16_rows x, ptrdiff_t row, ptrdiff_t first_panel, ptrdiff_t panels, const uint8_t *b,
                     float *sums, ptrdiff_t start, ptrdiff_t end) {
    const ptrdiff_t half_bytes = m->part_steps * A_BYTES, sides = num_sides(m), units = num_units(m, panels);
    const ptrdiff_t blocks = (end - start + BLOCK_STEPS - 1) / BLOCK_STEPS;
    struct unit before = {.row = row, .done = PAIR_ROWS};
    for (ptrdiff_t block = 0; block < blocks; block++) {
        const ptrdiff_t from = start + (end - start) * block / blocks, to = start + (end - start) * (block + 1) / blocks;
        for (ptrdiff_t u = 0; u < units; u++) {
            const ptrdiff_t half = u / sides, side = u % sides;
            const struct unit unit = {.b = b + (side * 2 * panels + half) * half_bytes + (from - start) * A_BYTES,
                                      .sums = sums + u * UNIT_FLOATS, .row = row, .feature = first_panel * PANEL + half * LANES};
            run_unit(m, (const uint8_t *)x.x + from * STEP_BYTES, x.stride, &unit, &before, from, to);
            if (side && to == m->p->w.steps) {
                gate_rows(m, &before, PAIR_ROWS);
                before = unit;
                before.sums -= UNIT_FLOATS;
            }
        }
    }
    if (m->up) gate_rows(m, &before, PAIR_ROWS);
}

static ptrdiff_t sums_bytes(const struct many *m) {
    const ptrdiff_t pairs = m->part_steps < m->p->w.steps ? (m->chunk + PAIR_ROWS - 1) / PAIR_ROWS : 1;
    return pairs * num_units(m, m->group) * UNIT_FLOATS * sizeof(float);
}

static void run_item(const struct many *m, ptrdiff_t item, uint8_t *scratch) {
    const struct bf16_product *p = m->p;
    const ptrdiff_t chunk = item / m->groups, group = item % m->groups, panel_bytes = m->part_steps * STEP_TILES;
    const ptrdiff_t first_row = chunk * m->chunk, last_row = smaller(first_row + m->chunk, p->rows);
    const ptrdiff_t first = m->panels * group / m->groups, panels = m->panels * (group + 1) / m->groups - first;
    float *sums = (float *)(scratch + num_sides(m) * m->group * panel_bytes);
    uint8_t *spare = (uint8_t *)sums + sums_bytes(m);
    for (ptrdiff_t start = 0; start < p->w.steps; start += m->part_steps) {
        const ptrdiff_t end = smaller(start + m->part_steps, p->w.steps);
        for (ptrdiff_t i = 0; i < num_sides(m) * panels; i++)
            expand(&p->w, first + i % panels + i / panels * m->up, start, end, scratch + i * panel_bytes, panel_bytes / 2);
        amx_settle(scratch);
        for (ptrdiff_t row = first_row; row < last_row; row += PAIR_ROWS) {
            const ptrdiff_t waiting = m->part_steps < p->w.steps ? (row - first_row) / PAIR_ROWS * num_units(m, m->group) : 0;
            run_pair(m, pair_of(m, row, spare), row, first, panels, scratch, sums + waiting * UNIT_FLOATS, start, end);
        }
    }
}

/* Items: chunks of rows, each with groups of panels one after the other. */
static void run_items(void *arg, ptrdiff_t item, ptrdiff_t last) {
    const struct many *m = arg;
    const ptrdiff_t weights = num_sides(m) * m->group * m->part_steps * STEP_TILES, spare = PAIR_ROWS * m->p->w.steps * STEP_BYTES;
    uint8_t *scratch = thread_scratch(weights + sums_bytes(m) + spare);
    /* Tiles 0 and 1 are sums, 2 is rows of x, 3 weights. */
    const struct amx_config config = amx_whole_tiles();
    amx_load(&config);
    for (; item < last; item++) run_item(m, item, scratch);
    _tile_release();
}

/* Groups of as many panels as the L2 cache holds, or one for each thread: all of x passes each. */
static void plan(struct many *m) {
    const ptrdiff_t rows = m->p->rows, steps = m->p->w.steps, threads = team_size();
    const ptrdiff_t parts = (steps + PART_STEPS - 1) / PART_STEPS;
    m->part_steps = (steps + parts - 1) / parts;
    m->chunks = (rows + MAX_CHUNK - 1) / MAX_CHUNK;
    m->chunk = ((rows + m->chunks - 1) / m->chunks + PAIR_ROWS - 1) / PAIR_ROWS * PAIR_ROWS;
    m->chunks = (rows + m->chunk - 1) / m->chunk;
    const ptrdiff_t most = GROUP_BYTES / (num_sides(m) * m->part_steps * STEP_TILES), least = (m->panels + most - 1) / most;
    const ptrdiff_t wanted = (threads + m->chunks - 1) / m->chunks;
    m->groups = least > wanted ? (least + threads - 1) / threads * threads : wanted;
    m->groups = smaller(m->groups, m->panels);
    m->group = (m->panels + m->groups - 1) / m->groups;
}

void linear_bf16_many(const struct bf16_product *p, struct bf16_rows x, const struct bf16_gate *gate) {
    struct many m = {.p = p, .x = x, .panels = (p->out_features + PANEL - 1) / PANEL};
    if (gate) {
        m.gate = *gate;
        m.panels = m.up = p->out_features / 2 / PANEL;
    }
    plan(&m);
    team_run(run_items, &m, m.groups * m.chunks, 1);
}
#endif
