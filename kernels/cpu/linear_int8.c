/* y = x W^T + bias with x in 8 bits and integer weights of 2, 4 or 8 bits, in linear.c's panels.

   Over each block of features, in which neither x's scale nor the weight's changes, products of codes are summed exactly in 32
   bits; the sums are scaled and added in float32, block after block. So a row's result depends neither on its batch nor on the
   instructions that made the sums.

   A second plane of x (int8_rows.h) follows behind the first, those blocks that some row has; a row without one adds 0 there. */
#include "dot.h"
#include "linear_int8.h"
#include "parallel.h"

/* Rows of x per piece of work: many, because each expands its panels' codes to bytes anew, but no more codes of x than a part
   of the L2 cache holds. Multiples of a tile's rows. */
#define MAX_CHUNK 256
#define MIN_CHUNK 64
#define CHUNK_BYTES (512 << 10)
/* Up to so many rows the weights' way from memory is what takes time. */
#define FEW_ROWS (2 * DOT_ROWS)
/* Weights that are worth claiming by themselves, per tile of rows: a few microseconds. */
#define PIECE_WORK (1 << 17)

static void run_any(const struct product *p, ptrdiff_t panel, ptrdiff_t first, ptrdiff_t last, void *scratch) {
#if HAVE_AMX
    if (p->tiles) {
        int8_tiles_run(p, panel, first, last, scratch);
        return;
    }
#endif
    int8_panels_run(p, panel, 1, first, last, scratch);
}

/* A panel of gates and its ups, to parts [2][rows][PANEL] first. */
static void run_gated(const struct product *p, ptrdiff_t panel, ptrdiff_t first, ptrdiff_t last, float *parts, void *scratch) {
    struct product at = *p;
    for (int side = 0; side < 2; side++) {
        const ptrdiff_t of_side = panel + side * p->w.ups;
        at.w = linear_part(&p->w, first, of_side, parts + side * (last - first) * PANEL, PANEL);
        run_any(&at, of_side, first, last, scratch);
    }
    linear_gate(&p->w, first, last, panel, 1, parts);
}

/* Items: pieces of panels, each with chunks of rows one after the other. */
static void run_items(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct product *p = arg;
    const struct linear *w = &p->w;
    const ptrdiff_t panels = linear_panels(w);
    size_t bytes = w->rows > FEW_ROWS ? (size_t)(w->words * 8 / w->bits * PANEL) * sizeof(int32_t) : 0;
#if HAVE_AMX
    if (p->tiles) {
        bytes = int8_tiles_scratch(p);
        amx_configure(p->tile_words);
    }
#endif
    const size_t parts = w->gate ? 2 * sizeof(float) * (size_t)(smaller(p->chunk, w->rows) * PANEL) : 0;
    uint8_t *scratch = bytes + parts ? thread_scratch(bytes + parts) : NULL;
    for (ptrdiff_t item = first; item < last; item++) {
        ptrdiff_t row = item % p->chunks * p->chunk, start = item / p->chunks * w->piece_panels;
        ptrdiff_t end = smaller(row + p->chunk, w->rows);
        for (ptrdiff_t panel = start; panel < start + w->piece_panels && panel < panels; panel++) {
            if (w->gate)
                run_gated(p, panel, row, end, (float *)scratch, scratch + parts);
            else
                run_any(p, panel, row, end, scratch);
        }
    }
#if HAVE_AMX
    if (p->tiles) _tile_release();
#endif
}

/* Where an item's panels begin. Of uneven parts the larger come first: two threads, with every other part each, end together. */
static ptrdiff_t first_panel(const struct product *p, ptrdiff_t item) {
    return (linear_panels(&p->w) * item + p->pieces - 1) / p->pieces;
}

/* Items: even parts of the panels, for few rows. */
static void run_few(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct product *p = arg;
    const ptrdiff_t end = first_panel(p, last);
    for (ptrdiff_t panel = first_panel(p, first), item = first; panel < end; item++)
        for (ptrdiff_t left; (left = first_panel(p, item + 1) - panel) > 0;) {
            const ptrdiff_t together = left / ((left + INT8_PANELS - 1) / INT8_PANELS);
            int8_panels_run(p, panel, (int)together, 0, p->w.rows, NULL);
            panel += together;
        }
}

/* Pieces for few rows: as many for each thread, of INT8_PANELS panels or somewhat less, unless such are not worth claiming. */
static ptrdiff_t few_pieces(const struct product *p) {
    const ptrdiff_t panels = linear_panels(&p->w), threads = team_size();
    const ptrdiff_t together = INT8_PANELS * threads, wanted = (panels + together - 1) / together * threads;
    const ptrdiff_t worth = panels * PANEL * p->w.in_features / PIECE_WORK;
    if (worth >= wanted) return smaller(wanted, panels);
    if (worth >= threads) return worth / threads * threads;
    return worth < 1 ? 1 : worth;
}

/* Rows of x's codes come in multiples of CAPACITY, bytes of a row in multiples of STRIDE, as in linear_int8.py. */
#define CAPACITY 32
#define STRIDE 64

enum { IN_FEATURES, OUT_FEATURES, WORDS, GROUPS, GROUP_SIZE, BITS, INPUT_GROUP, BLOCK, SCALE_TYPE, PLANES };
enum { CODES, SCALES, ZEROS, OFFSETS, PERM };

static struct product describe(const ptrdiff_t *sizes, const void *const *tensors, ptrdiff_t rows) {
    struct product p = {.w = {.rows = rows, .in_features = sizes[IN_FEATURES], .out_features = sizes[OUT_FEATURES],
                              .codes = tensors[CODES], .scales = tensors[SCALES], .zeros = tensors[ZEROS],
                              .offsets = tensors[OFFSETS], .words = sizes[WORDS], .groups = sizes[GROUPS],
                              .group_size = sizes[GROUP_SIZE], .bits = (int)sizes[BITS],
                              .scale_type = (enum float_type)sizes[SCALE_TYPE]}};
    p.x.block = sizes[BLOCK];
    p.x.planes = (int)sizes[PLANES];
    p.x.blocks = (sizes[IN_FEATURES] + sizes[BLOCK] - 1) / sizes[BLOCK];
    p.x.stride = (sizes[IN_FEATURES] + STRIDE - 1) / STRIDE * STRIDE;
    p.coding = p.w.offsets ? OFFSET : p.w.zeros ? ZERO : CENTRED;
    p.block_words = p.x.blocks == 1 ? p.w.words : sizes[BLOCK] * sizes[BITS] / 32;
    p.blocks_per_group = (sizes[GROUP_SIZE] + sizes[BLOCK] - 1) / sizes[BLOCK];
    p.x.capacity = (rows + CAPACITY - 1) / CAPACITY * CAPACITY;
    p.chunk = CHUNK_BYTES / p.x.stride / MIN_CHUNK * MIN_CHUNK;
    p.chunk = p.chunk < MIN_CHUNK ? MIN_CHUNK : p.chunk > MAX_CHUNK ? MAX_CHUNK : p.chunk;
    p.chunks = (rows + p.chunk - 1) / p.chunk;
    return p;
}

/* Lists the blocks that rows of each set have in a second plane, as in struct product. */
static void find_extra(const struct int8_rows *x, int32_t *extra) {
    const ptrdiff_t set = int8_rows_set(x);
    for (ptrdiff_t row = 0; row < x->capacity; row += set, extra += 1 + x->blocks) {
        const float *scales = x->scales + int8_rows_place(x, row) + x->blocks * set;
        extra[0] = 0;
        for (ptrdiff_t b = 0; b < x->blocks; b++, scales += set) {
            int any = 0;
            for (ptrdiff_t r = 0; r < set; r++) any |= scales[r] != 0.0f;
            if (any) extra[++extra[0]] = (int32_t)b;
        }
    }
}

static void run(struct product *p, const float *x, ptrdiff_t x_stride, const void *const *tensors, const ptrdiff_t *sizes, float input_scale,
                void *workspace) {
    const ptrdiff_t rows = p->w.rows;
    int8_tiles_plan(p);
    if (!p->x.tiled) p->x.capacity = rows; /* scales of one row lie side by side, in few lines for other cores to fetch */
    struct int8_input input = {.x = x, .x_stride = x_stride, .rows = rows, .columns = sizes[IN_FEATURES], .perm = tensors[PERM],
                               .group = sizes[INPUT_GROUP], .scale = input_scale, .bits = p->w.bits,
                               .factor = p->coding != CENTRED ? 1 : p->tiles ? 0 : -(1 << (p->w.bits - 1))};
    int8_rows_make(&input, workspace, &p->x);
    if (p->x.planes == 2) {
        int32_t *extra = p->x.sums + p->x.capacity * p->x.planes * p->x.blocks;
        find_extra(&p->x, extra);
        p->extra = extra;
    }
    if (rows <= FEW_ROWS && !p->tiles && !p->w.gate) {
        p->pieces = few_pieces(p);
        team_run(run_few, p, p->pieces, 1);
        return;
    }
    const ptrdiff_t panels = linear_panels(&p->w), sides = p->w.gate ? 2 : 1;
    p->w.piece_panels = linear_piece(panels * p->chunks);
    ptrdiff_t pieces = (panels + p->w.piece_panels - 1) / p->w.piece_panels, chunk = rows < p->chunk ? rows : p->chunk;
    ptrdiff_t grain = team_grain(PIECE_WORK, (chunk + DOT_ROWS - 1) / DOT_ROWS * p->w.in_features * sides * p->w.piece_panels * PANEL);
    team_run(run_items, p, pieces * p->chunks, team_even_grain(pieces * p->chunks, grain));
}

/* y [rows][OUT_FEATURES], or with a gate half as many, contiguous. sizes: in the order of the names above; INPUT_GROUP features of
   x share a scale (0: a row's do), BLOCK features a scale of x and one of the weight, PLANES is 1 or 2. tensors: as in linear.h, and
   perm int64 or NULL. A fixed `input_scale`, or 0: each from its values. workspace: for each of the rows, in multiples of CAPACITY,
   PLANES rows of codes, 8 bytes per block and plane, and with two planes lists as in struct product. */
void twofold_linear_int8(const float *x, ptrdiff_t x_stride, ptrdiff_t rows, const void *const *tensors, const ptrdiff_t *sizes,
                         float input_scale, void *workspace, const float *bias, float *y, int gate) {
    struct product p = describe(sizes, tensors, rows);
    p.w.bias = bias;
    p.w.y = y;
    p.w.y_stride = gate ? sizes[OUT_FEATURES] / 2 : sizes[OUT_FEATURES];
    linear_set_gate(&p.w, gate);
    run(&p, x, x_stride, tensors, sizes, input_scale, workspace);
}
