/* y = x W^T + bias with x and W in bfloat16 and sums in float32, in tile registers.

   A tile of 16 output features times a tile of up to 16 rows of x, the latter as pairs of input features; over all of K one sum,
   32 features after the other, whatever the number of rows. So a row's result depends neither on its batch nor on the way a
   weight was expanded: step by step as it is used, for few rows (linear_bf16_few.c), or some at once for many. */
#include "bf16_tiles.h"

#if HAVE_AMX_BF16
/* Rows of x per piece of work: so many that expanding a panel costs little, no more than a part of the L2 cache holds. */
#define CHUNK_BYTES (768 << 10)
#define MIN_CHUNK 64
#define MAX_CHUNK 512
/* Steps that lie in the L1 cache while many rows pass; sums of fewer than all wait in memory, which changes no bit. */
#define BLOCK_STEPS 18
/* Multiplications that are worth claiming by themselves, and floats of x: some microseconds. */
#define PIECE_WORK (1 << 21)
#define PIECE_FLOATS (1 << 14)
#define EXPANSION_ROWS 16

/* Steps of a panel, expanded from `a` on, and all of its sums that wait, [row blocks][2][16 features][AMX_ROWS]. */
struct part {
    const uint8_t *a;
    float *sums;
    ptrdiff_t panel, first_step, last_step;
};

INLINE void load_sums(const int blocks, const float *sums) {
    _tile_loadd(0, sums, VEC_BYTES);
    _tile_loadd(1, sums + SUM_FLOATS, VEC_BYTES);
    if (blocks == 1) return;
    _tile_loadd(2, sums + 2 * SUM_FLOATS, VEC_BYTES);
    _tile_loadd(3, sums + 3 * SUM_FLOATS, VEC_BYTES);
}

INLINE void store_sums(const int blocks, float *sums) {
    _tile_stored(0, sums, VEC_BYTES);
    _tile_stored(1, sums + SUM_FLOATS, VEC_BYTES);
    if (blocks == 1) return;
    _tile_stored(2, sums + 2 * SUM_FLOATS, VEC_BYTES);
    _tile_stored(3, sums + 3 * SUM_FLOATS, VEC_BYTES);
}

/* One or two blocks of rows from `row` on of a chunk that begins at `first`. */
INLINE void run_part(const struct bf16_product *p, const int blocks, const struct part *part, ptrdiff_t first, ptrdiff_t row,
                     ptrdiff_t last) {
    const ptrdiff_t x_step = p->width * STEP_BYTES, apart = p->w.steps * x_step, steps = part->last_step - part->first_step;
    const uint8_t *x = x_block(p, row) + part->first_step * x_step;
    const int ends = part->last_step == p->w.steps;
    const float *line = p->y + row * p->out_features + part->panel * PANEL, *end = p->y + p->rows * p->out_features;
    float *sums = part->sums + (row - first) / AMX_ROWS * 2 * SUM_FLOATS;
    if (part->first_step)
        load_sums(blocks, sums);
    else
        clear_sums();
    for (ptrdiff_t s = 0; s < steps; s++) {
        /* y's lines, which lie far apart and often in no cache. */
        for (int i = 0; ends && i < 2 && line < end; i++, line += p->out_features) {
            __builtin_prefetch(line, 1);
            __builtin_prefetch(line + LANES, 1);
        }
        multiply_step(p, blocks, part->a + s * 2 * A_BYTES, x + s * x_step, apart);
    }
    if (ends)
        write_sums(p, blocks, part->panel, row, last);
    else
        store_sums(blocks, sums);
}

/* Rows first..last-1 of a panel. */
INLINE void run_panel(const struct bf16_product *p, const int kind, const int coding, ptrdiff_t panel, ptrdiff_t first,
                      ptrdiff_t last, uint8_t *scratch) {
    const ptrdiff_t steps = p->w.steps, blocks = (steps + BLOCK_STEPS - 1) / BLOCK_STEPS;
    struct bf16_groups groups;
    bf16_forget(&groups);
    for (ptrdiff_t b = 0; b < blocks; b++) {
        struct part part = {scratch, (float *)(scratch + BLOCK_STEPS * 2 * A_BYTES), panel, steps * b / blocks, steps * (b + 1) / blocks};
        if (kind == FLOATS16) part.a = p->w.codes + (panel * steps + part.first_step) * p->w.step_bytes;
        for (ptrdiff_t s = part.first_step; kind != FLOATS16 && s < part.last_step; s++)
            bf16_expand(&p->w, kind, coding, panel, s, &groups, scratch + (s - part.first_step) * 2 * A_BYTES);
        amx_settle(scratch);
        ptrdiff_t row = first;
        for (; last - row > p->width; row += 2 * p->width) run_part(p, 2, &part, first, row, last);
        if (row < last) run_part(p, 1, &part, first, row, last);
    }
}

#define VARIANT(kind, coding) (4 * (kind) + (coding))
#define CASE(kind, coding) \
    case VARIANT(kind, coding): run_panel(p, kind, coding, panel, first, last, scratch); break;

static void run_any(const struct bf16_product *p, ptrdiff_t panel, ptrdiff_t first, ptrdiff_t last, uint8_t *scratch) {
    switch (VARIANT(p->w.kind, p->w.coding)) {
        CASE(NIBBLES, BF16_CENTRED) CASE(NIBBLES, BF16_ZERO) CASE(NIBBLES, BF16_OFFSET) CASE(NIBBLES, BF16_E2M1)
        CASE(BYTES, BF16_CENTRED) CASE(BYTES, BF16_ZERO) CASE(BYTES, BF16_OFFSET)
        CASE(FLOATS8, BF16_CENTRED) CASE(FLOATS16, BF16_CENTRED)
    }
}
#undef CASE

/* Items: chunks of rows, each with pieces of panels one after the other: a chunk of x stays in the L2 cache. */
static void run_items(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct bf16_product *p = arg;
    uint8_t *scratch = thread_scratch(BLOCK_STEPS * 2 * A_BYTES + (MAX_CHUNK / AMX_ROWS + 1) * 2 * SUM_FLOATS * sizeof(float));
    configure(p->width);
    for (ptrdiff_t item = first; item < last; item++) {
        ptrdiff_t row = item / p->pieces * p->chunk, start = item % p->pieces * p->piece_panels;
        ptrdiff_t end = smaller(row + p->chunk, p->rows);
        for (ptrdiff_t panel = start; panel < start + p->piece_panels && panel < p->panels; panel++)
            run_any(p, panel, row, end, scratch);
    }
    _tile_release();
}

static void plan(struct bf16_product *p) {
    p->width = AMX_ROWS;
    p->chunk = CHUNK_BYTES / (p->w.steps * STEP_BYTES + 1) / MIN_CHUNK * MIN_CHUNK;
    p->chunk = p->chunk < MIN_CHUNK ? MIN_CHUNK : p->chunk > MAX_CHUNK ? MAX_CHUNK : p->chunk;
    p->chunks = (p->rows + p->chunk - 1) / p->chunk;
    p->panels = (p->out_features + PANEL - 1) / PANEL;
    p->piece_panels = linear_piece(p->panels * p->chunks);
    p->pieces = (p->panels + p->piece_panels - 1) / p->piece_panels;
}
#endif

/* Whether this processor has the tiles, the compiler used them, and the system allows it: 1 or 0. */
int twofold_bf16_tiles(void) {
#if HAVE_AMX_BF16
    return amx_allowed();
#else
    return 0;
#endif
}

/* In the order of linear_bf16.py. */
enum { IN_FEATURES, OUT_FEATURES, STEPS, STEP_SIZE, GROUPS, GROUP_SIZE, KIND, CODING, CENTRE, SCALE_TYPE };
enum { CODES, SCALES, ZEROS, OFFSETS, PERM };

/* y [rows][OUT_FEATURES], contiguous. tensors: steps as of twofold_pack_bf16_steps, and the rest as in linear_int8.c. workspace:
   STEPS * STEP_BYTES for each row, in multiples of AMX_ROWS. For processors where twofold_bf16_tiles() says yes. */
void twofold_linear_bf16(const float *x, ptrdiff_t x_stride, ptrdiff_t rows, const void *const *tensors, const ptrdiff_t *sizes,
                         void *workspace, const float *bias, float *y) {
#if HAVE_AMX_BF16
    struct bf16_product p = {.w = {.codes = tensors[CODES], .scales = tensors[SCALES], .zeros = tensors[ZEROS],
                                   .offsets = tensors[OFFSETS], .scale_type = (enum float_type)sizes[SCALE_TYPE],
                                   .kind = (enum step_kind)sizes[KIND], .coding = (enum bf16_coding)sizes[CODING],
                                   .centre = (float)sizes[CENTRE], .steps = sizes[STEPS], .step_bytes = sizes[STEP_SIZE],
                                   .groups = sizes[GROUPS], .group_size = sizes[GROUP_SIZE]},
                             .x = x, .x_stride = x_stride, .rows = rows, .in_features = sizes[IN_FEATURES],
                             .out_features = sizes[OUT_FEATURES], .perm = tensors[PERM], .tiles = workspace, .bias = bias, .y = y};
    if (rows == 0 || !amx_allowed()) return;
    if (rows <= FEW_ROWS) {
        linear_bf16_few(&p);
        return;
    }
    plan(&p);
    ptrdiff_t blocks = (rows + p.width - 1) / p.width;
    team_run(round_x, &p, blocks * p.w.steps, team_grain(PIECE_FLOATS, p.width * STEP_K));
    ptrdiff_t chunk = smaller(rows, p.chunk);
    ptrdiff_t grain = team_grain(PIECE_WORK, (chunk + EXPANSION_ROWS) * p.in_features * p.piece_panels * PANEL);
    team_run(run_items, &p, p.pieces * p.chunks, team_even_grain(p.pieces * p.chunks, grain));
#else
    (void)x, (void)x_stride, (void)rows, (void)tensors, (void)sizes, (void)workspace, (void)bias, (void)y;
#endif
}
