/* y = x W^T + bias with x in 8 bits and integer weights of 2, 4 or 8 bits, in linear.c's panels.

   Over each block of features, in which neither x's scale nor the weight's changes, products of codes are summed exactly in 32
   bits; the sums are scaled and added in float32, block after block. So a row's result depends neither on its batch nor on the
   instructions that made the sums.

   A second plane of x (int8_rows.h) follows behind the first, those blocks that some row has; a row without one adds 0 there. */
#include "dot.h"
#include "groups.h"
#include "linear_int8.h"
#include "parallel.h"

/* Rows of x per piece of work: many, because each expands its panels' codes to bytes anew, but no more codes of x than a part
   of the L2 cache holds. Multiples of a tile's rows. */
#define MAX_CHUNK 256
#define MIN_CHUNK 64
#define CHUNK_BYTES (512 << 10)
/* How far ahead codes are asked for when each is used once, in words. */
#define PREFETCH_WORDS 24
/* Weights that are worth claiming by themselves, per tile of rows: a few microseconds. */
#define PIECE_WORK (1 << 17)

#define UNROLL_ROWS _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)

/* Where a tile is, and its panel's codes: as they are stored, or expanded to one byte each. */
struct tile {
    const int32_t *codes;
    ptrdiff_t panel, row;
};

/* Scales and zeros of a panel's group. */
struct group {
    vf scale[PANEL_VECS], offset[PANEL_VECS];
    vi zero[PANEL_VECS];
};

INLINE struct group load_group(const struct linear *w, const int coding, ptrdiff_t panel, ptrdiff_t index) {
    struct group group;
    ptrdiff_t place = (panel * w->groups + index) * PANEL;
    UNROLL_VECS {
        group.scale[v] = load_floats(w->scales, w->scale_type, place + v * LANES);
        group.offset[v] = coding == OFFSET ? load_floats(w->offsets, w->scale_type, place + v * LANES) : splat(0.0f);
        group.zero[v] = coding == ZERO ? load_zeros(w->zeros + place + v * LANES) : splat_int(0);
    }
    return group;
}

/* A panel's part of y from its totals [rows][PANEL]. */
INLINE void write_rows(const struct linear *w, const int rows, const vf *totals, const struct tile *at) {
    float *y = w->y + at->row * w->y_stride + at->panel * PANEL;
    const float *bias = w->bias ? w->bias + at->panel * PANEL : NULL;
    ptrdiff_t width = w->out_features - at->panel * PANEL;
    for (int r = 0; r < rows; r++, y += w->y_stride) {
        if (width >= PANEL) {
            UNROLL_VECS {
                vf total = totals[r * PANEL_VECS + v];
                store(y + v * LANES, bias ? total + load(bias + v * LANES) : total);
            }
            continue;
        }
        float edge[PANEL];
        UNROLL_VECS store(edge + v * LANES, totals[r * PANEL_VECS + v]);
        for (ptrdiff_t n = 0; n < width; n++) y[n] = bias ? edge[n] + bias[n] : edge[n];
    }
}

/* One panel and up to DOT_ROWS rows over all features. The codes come in `packed` bits, and are `wide` if some pass 15. */
INLINE void run_rows(const struct product *p, const int rows, const int packed, const int wide, const int coding,
                     const struct tile *at) {
    const struct linear *w = &p->w;
    const int per_byte = 8 / packed;
    const ptrdiff_t apart = p->x.planes * p->x.stride;
    const int8_t *const row = p->x.codes + at->row * apart, *x = row;
    const float *x_scales = p->x.scales + at->row;
    const int32_t *x_sums = p->x.sums + at->row, *extra = extra_blocks(p, at->row);
    const int32_t *word = at->codes, *end = word + w->words * packed / w->bits * PANEL;
    const ptrdiff_t step = p->block_words * packed / w->bits * PANEL;
    vf total[DOT_ROWS * PANEL_VECS];
    UNROLL_ROWS UNROLL_VECS total[r * PANEL_VECS + v] = splat(0.0f);
    for (ptrdiff_t i = 0, group = 0, left = p->blocks_per_group; i < p->x.blocks + extra[0]; i++) {
        ptrdiff_t b = i;
        if (i >= p->x.blocks) {
            const ptrdiff_t block = extra[1 + i - p->x.blocks];
            b = p->x.blocks + block;
            int none = 1;
            UNROLL_ROWS none &= x_scales[b * p->x.capacity + r] == 0.0f;
            if (none) continue;
            word = at->codes + block * step;
            x = row + p->x.stride + block * p->x.block;
            group = block / p->blocks_per_group;
            left = 0;
        }
        const int32_t *stop = end - word > step ? word + step : end;
        vi sum[DOT_ROWS][PANEL_VECS];
        UNROLL_ROWS UNROLL_VECS sum[r][v] = splat_int(coding == CENTRED ? x_sums[b * p->x.capacity + r] : 0);
        for (; word < stop; word += PANEL, x += 4 * per_byte) {
            vi codes[PANEL_VECS];
            UNROLL_VECS {
                codes[v] = load_int(word + v * LANES);
                __builtin_prefetch(word + PREFETCH_WORDS * PANEL + v * LANES);
            }
#pragma GCC unroll 4
            for (int j = 0; j < per_byte; j++) {
                vi part[PANEL_VECS];
                UNROLL_VECS part[v] =
                    packed == 8 ? codes[v] : (codes[v] >> (packed * j)) & splat_int(((1 << packed) - 1) * 0x01010101);
                UNROLL_ROWS {
                    vi value = splat_bytes(x + r * apart + 4 * j);
                    UNROLL_VECS sum[r][v] = dot4(sum[r][v], part[v], value, wide);
                }
            }
        }
        struct group scales = load_group(w, coding, at->panel, group);
        UNROLL_ROWS UNROLL_VECS total[r * PANEL_VECS + v] =
            add_block(total[r * PANEL_VECS + v], sum[r][v], coding, scales.scale[v], scales.zero[v], scales.offset[v],
                      x_scales[b * p->x.capacity + r], x_sums[b * p->x.capacity + r]);
        if (--left == 0) group++, left = p->blocks_per_group;
    }
    write_rows(w, rows, total, at);
}

/* What run_rows' codes are: those stored in 2, 4 or 8 bits, or narrow ones expanded to bytes. */
enum form { TWO, FOUR, EIGHT, EXPANDED, NUM_FORMS };

#define VARIANT(form, coding) ((form) * 3 + (coding))
#define CASE(n, form, packed, coding) \
    case n * 3 * NUM_FORMS + VARIANT(form, coding): run_rows(p, n, packed, form == EIGHT, coding, at); break;
#define FORM(n, form, packed) CASE(n, form, packed, CENTRED) CASE(n, form, packed, ZERO) CASE(n, form, packed, OFFSET)
#define CASES(n) FORM(n, TWO, 2) FORM(n, FOUR, 4) FORM(n, EIGHT, 8)

static void choose_rows(const struct product *p, int rows, enum form form, const struct tile *at) {
    switch (rows * 3 * NUM_FORMS + VARIANT(form, p->coding)) {
#if DOT_ROWS >= 8
        CASES(3) CASES(4) CASES(5) CASES(6) CASES(8)
#elif DOT_ROWS >= 3
        CASES(3)
#endif
        CASES(1) CASES(2) FORM(DOT_ROWS, EXPANDED, 8)
    }
}
#undef CASES
#undef FORM
#undef CASE

static enum form stored_form(const struct linear *w) { return w->bits == 2 ? TWO : w->bits == 4 ? FOUR : EIGHT; }

/* All rows first..last of a panel. */
static void run_panel(const struct product *p, ptrdiff_t panel, ptrdiff_t first, ptrdiff_t last, int32_t *scratch) {
    const struct linear *w = &p->w;
    struct tile at = {w->codes + panel * w->words * PANEL, panel, first};
    enum form form = stored_form(w);
    if (last - first > 2 * DOT_ROWS && w->bits < 8) {
        expand(w, at.codes, 0, scratch, PANEL, LANES);
        at.codes = scratch;
        form = EXPANDED;
    }
    for (; last - at.row >= DOT_ROWS; at.row += DOT_ROWS) choose_rows(p, DOT_ROWS, form, &at);
    at.codes = w->codes + panel * w->words * PANEL;
    int rest = (int)(last - at.row);
    if (rest == 7) { /* each case costs the compiler's time */
        choose_rows(p, 4, stored_form(w), &at);
        at.row += 4;
        rest = 3;
    }
    if (rest) choose_rows(p, rest, stored_form(w), &at);
}

static void run_any(const struct product *p, ptrdiff_t panel, ptrdiff_t first, ptrdiff_t last, void *scratch) {
#if HAVE_AMX
    if (p->tiles) {
        int8_tiles_run(p, panel, first, last, scratch);
        return;
    }
#endif
    run_panel(p, panel, first, last, scratch);
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
    size_t bytes = w->rows > DOT_ROWS ? (size_t)(w->words * 8 / w->bits * PANEL) * sizeof(int32_t) : 0;
#if HAVE_AMX
    if (p->tiles) {
        bytes = int8_tiles_scratch(p);
        amx_configure(p->tile_words);
    }
#endif
    const size_t parts = w->gated ? 2 * sizeof(float) * (size_t)(smaller(p->chunk, w->rows) * PANEL) : 0;
    uint8_t *scratch = bytes + parts ? thread_scratch(bytes + parts) : NULL;
    for (ptrdiff_t item = first; item < last; item++) {
        ptrdiff_t row = item % p->chunks * p->chunk, start = item / p->chunks * w->piece_panels;
        ptrdiff_t end = smaller(row + p->chunk, w->rows);
        for (ptrdiff_t panel = start; panel < start + w->piece_panels && panel < panels; panel++) {
            if (w->gated)
                run_gated(p, panel, row, end, (float *)scratch, scratch + parts);
            else
                run_any(p, panel, row, end, scratch);
        }
    }
#if HAVE_AMX
    if (p->tiles) _tile_release();
#endif
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

static void run(struct product p, const float *x, ptrdiff_t x_stride, const void *const *tensors, const ptrdiff_t *sizes, float input_scale,
                void *workspace) {
    const ptrdiff_t rows = p.w.rows;
    int8_tiles_plan(&p);
    if (!p.x.tiled) p.x.capacity = rows; /* scales of one row lie side by side, in few lines for other cores to fetch */
    struct int8_input input = {.x = x, .x_stride = x_stride, .rows = rows, .columns = sizes[IN_FEATURES], .perm = tensors[PERM],
                               .group = sizes[INPUT_GROUP], .scale = input_scale, .bits = p.w.bits,
                               .factor = p.coding != CENTRED ? 1 : p.tiles ? 0 : -(1 << (p.w.bits - 1))};
    int8_rows_make(&input, workspace, &p.x);
    if (p.x.planes == 2) {
        int32_t *extra = p.x.sums + p.x.capacity * p.x.planes * p.x.blocks;
        find_extra(&p.x, extra);
        p.extra = extra;
    }
    const ptrdiff_t panels = linear_panels(&p.w), sides = p.w.gated ? 2 : 1;
    p.w.piece_panels = linear_piece(panels * p.chunks);
    ptrdiff_t pieces = (panels + p.w.piece_panels - 1) / p.w.piece_panels, chunk = rows < p.chunk ? rows : p.chunk;
    ptrdiff_t grain = team_grain(PIECE_WORK, (chunk + DOT_ROWS - 1) / DOT_ROWS * p.w.in_features * sides * p.w.piece_panels * PANEL);
    team_run(run_items, &p, pieces * p.chunks, team_even_grain(pieces * p.chunks, grain));
}

/* y [rows][OUT_FEATURES], contiguous. sizes: in the order of the names above; INPUT_GROUP features of x share a scale (0: a row's
   do), BLOCK features a scale of x and one of the weight, PLANES is 1 or 2. tensors: as in linear.h, and perm int64 or NULL. A fixed `input_scale`,
   or 0: each from its values. workspace: for each of the rows, in multiples of CAPACITY, PLANES rows of codes, 8 bytes per block and plane, and with two planes lists as in struct product. */
void twofold_linear_int8(const float *x, ptrdiff_t x_stride, ptrdiff_t rows, const void *const *tensors, const ptrdiff_t *sizes,
                         float input_scale, void *workspace, const float *bias, float *y) {
    struct product p = describe(sizes, tensors, rows);
    p.w.bias = bias;
    p.w.y = y;
    p.w.y_stride = sizes[OUT_FEATURES];
    run(p, x, x_stride, tensors, sizes, input_scale, workspace);
}

/* The same with silu of y's first half times the second: out [rows][OUT_FEATURES / 2], a multiple of PANEL. */
void twofold_gated_int8(const float *x, ptrdiff_t x_stride, ptrdiff_t rows, const void *const *tensors, const ptrdiff_t *sizes,
                        float input_scale, void *workspace, const float *bias, float *out) {
    struct product p = describe(sizes, tensors, rows);
    p.w.bias = bias;
    p.w.gated = out;
    p.w.ups = sizes[OUT_FEATURES] / 2 / PANEL;
    run(p, x, x_stride, tensors, sizes, input_scale, workspace);
}
