/* y = x W^T + bias with x in 8 bits and integer weights of 2, 4 or 8 bits, in linear.c's panels.

   Over each block of features, in which neither x's scale nor the weight's changes, products of codes are summed exactly in 32
   bits; the sums are scaled and added in float32, block after block. So a row's result depends neither on its batch nor on the
   instructions that made the sums. */
#include "amx.h"
#include "dot.h"
#include "groups.h"
#include "int8_rows.h"
#include "linear.h"
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
#define MAX_TILE_WORDS 16
/* Fewer rows than this leave so much of a tile register unused that vectors are faster. */
#define MIN_TILE_ROWS 9
/* From so many features on a block keeps tile registers busy long enough. */
#define WIDE_BLOCK 128

#define UNROLL_ROWS _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
#define UNROLL_VECS _Pragma("GCC unroll 4") for (int v = 0; v < PANEL_VECS; v++)

/* How codes become weights: (code - zero) * scale with the middle of the codes' range as zero, or with stored zeros, or
   code * scale + offset. */
enum coding { CENTRED, ZERO, OFFSET };

/* Whether tile registers multiply, and which of their kernels: for a block's sums in one tile, or in four. */
enum tiles { NONE, NARROW, WIDE };

struct product {
    struct linear w;
    struct int8_rows x;
    enum coding coding;
    ptrdiff_t block_words, blocks_per_group; /* words as they are stored */
    ptrdiff_t chunk, chunks; /* rows of x per piece, pieces */
    enum tiles tiles;      /* from MIN_TILE_ROWS on, */
    int tile_words;        /* so many words of bytes at a time, */
    ptrdiff_t block_steps; /* so many times for each block, */
    ptrdiff_t steps;       /* and in all; the last step may reach beyond K, where zeros follow in both buffers */
};

/* Where a tile is, and its panel's codes: as they are stored, or expanded to one byte each. */
struct tile {
    const int32_t *codes;
    ptrdiff_t panel, row;
};

/* total += one block of one row: the sum of its products, scaled. */
INLINE vf add_block(vf total, vi sum, const int coding, vf scale, vi zero, vf offset, float x_scale, int32_t x_sum) {
    if (coding == ZERO) sum -= zero * splat_int(x_sum);
    total += to_float(sum) * (scale * splat(x_scale));
    if (coding == OFFSET) total += offset * splat(x_scale * (float)x_sum);
    return total;
}

static ptrdiff_t smaller(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

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
    const int8_t *x = p->x.codes + at->row * p->x.stride;
    const float *x_scales = p->x.scales + at->row;
    const int32_t *x_sums = p->x.sums + at->row;
    const int32_t *word = at->codes, *end = word + w->words * packed / w->bits * PANEL;
    const ptrdiff_t step = p->block_words * packed / w->bits * PANEL;
    vf total[DOT_ROWS * PANEL_VECS];
    UNROLL_ROWS UNROLL_VECS total[r * PANEL_VECS + v] = splat(0.0f);
    for (ptrdiff_t b = 0, group = 0, left = p->blocks_per_group; b < p->x.blocks; b++) {
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
                    vi value = splat_bytes(x + r * p->x.stride + 4 * j);
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

/* A panel's codes as bytes, `centre` less. */
INLINE void expand_bits(const struct linear *w, const int bits, const int32_t *codes, int centre, int32_t *out) {
    typedef uint8_t bytes __attribute__((vector_size(VEC_BYTES)));
    const bytes less = (uint8_t)centre - (bytes){0};
    for (ptrdiff_t word = 0; word < w->words; word++, codes += PANEL)
        for (int j = 0; j < 8 / bits; j++, out += PANEL)
            UNROLL_VECS {
                vi part = load_int(codes + v * LANES);
                if (bits < 8) part = (part >> (bits * j)) & splat_int(((1 << bits) - 1) * 0x01010101);
                part = (vi)((bytes)part - less);
                memcpy(out + v * LANES, &part, sizeof part);
            }
}

static void expand(const struct linear *w, const int32_t *codes, int centre, int32_t *out) {
    switch (w->bits) {
        case 2: expand_bits(w, 2, codes, centre, out); break;
        case 4: expand_bits(w, 4, codes, centre, out); break;
        case 8: expand_bits(w, 8, codes, centre, out); break;
    }
}

#if HAVE_AMX
#define UNROLL_TILE _Pragma("GCC unroll 16") for (int r = 0; r < AMX_ROWS; r++)

/* y's part of up to AMX_ROWS rows and one vector of a panel from its totals. */
INLINE void write_column(const struct linear *w, int rows, const int v, const vf *total, const struct tile *at) {
    ptrdiff_t first = at->panel * PANEL + v * LANES, width = w->out_features - first;
    float *y = w->y + at->row * w->y_stride + first;
    if (width <= 0) return;
    const __mmask16 lanes = width < LANES ? (__mmask16)((1 << width) - 1) : (__mmask16)-1;
    const vf bias = w->bias ? (vf)_mm512_maskz_loadu_ps(lanes, w->bias + first) : splat(0.0f);
    UNROLL_TILE if (r < rows)
        _mm512_mask_storeu_ps(y + r * w->y_stride, lanes, (__m512)(w->bias ? total[r] + bias : total[r]));
}

/* One vector of a panel and up to AMX_ROWS rows; the buffers of x have as many. Each block's sums are scaled while the tiles
   compute the next one's. */
INLINE void run_narrow(const struct product *p, const int coding, int rows, const int v, const struct tile *at) {
    const ptrdiff_t step = p->tile_words * PANEL;
    const int32_t *word = at->codes + v * LANES;
    const int8_t *x = p->x.codes + at->row * p->x.stride;
    _Alignas(64) int32_t sums[2][AMX_ROWS][LANES];
    vf total[AMX_ROWS];
    UNROLL_TILE total[r] = splat(0.0f);
    for (ptrdiff_t b = -1, group = 0, left = p->blocks_per_group; b < p->x.blocks; b++) {
        if (b + 1 < p->x.blocks) {
            _tile_zero(0);
            const ptrdiff_t block_end = smaller((b + 2) * p->block_steps, p->steps);
            for (ptrdiff_t i = (b + 1) * p->block_steps; i < block_end; i++, word += step, x += 4 * p->tile_words) {
                _tile_loadd(4, x, p->x.stride);
                _tile_loadd(6, word, PANEL * 4);
                AMX_DOT(0, 4, 6, coding == CENTRED);
            }
        }
        if (b >= 0) {
            const float *x_scales = p->x.scales + b * p->x.capacity + at->row;
            const int32_t *x_sums = p->x.sums + b * p->x.capacity + at->row;
            struct group scales = load_group(&p->w, coding, at->panel, group);
            UNROLL_TILE total[r] = add_block(total[r], load_int(sums[b & 1][r]), coding, scales.scale[v], scales.zero[v],
                                             scales.offset[v], x_scales[r], x_sums[r]);
            if (--left == 0) group++, left = p->blocks_per_group;
        }
        if (b + 1 < p->x.blocks) _tile_stored(0, sums[(b + 1) & 1], VEC_BYTES);
    }
    write_column(&p->w, rows, v, total, at);
}

/* One panel and up to 2 AMX_ROWS rows, for long blocks: four sums keep the tiles busy. */
INLINE void run_wide(const struct product *p, const int coding, int rows, const struct tile *at) {
    const int32_t *word = at->codes;
    const int8_t *x = p->x.codes + at->row * p->x.stride, *below = x + AMX_ROWS * p->x.stride;
    _Alignas(64) int32_t sums[PANEL_VECS][2 * AMX_ROWS][LANES];
    vf total[PANEL_VECS][2 * AMX_ROWS];
    memset(total, 0, sizeof total);
    for (ptrdiff_t b = 0, group = 0, left = p->blocks_per_group; b < p->x.blocks; b++) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        const ptrdiff_t block_end = smaller((b + 1) * p->block_steps, p->steps);
        for (ptrdiff_t i = b * p->block_steps; i < block_end; i++, word += 16 * PANEL, x += 64, below += 64) {
            _tile_loadd(4, x, p->x.stride);
            _tile_loadd(5, below, p->x.stride);
            _tile_loadd(6, word, PANEL * 4);
            _tile_loadd(7, word + LANES, PANEL * 4);
            AMX_DOT(0, 4, 6, coding == CENTRED);
            AMX_DOT(1, 5, 6, coding == CENTRED);
            AMX_DOT(2, 4, 7, coding == CENTRED);
            AMX_DOT(3, 5, 7, coding == CENTRED);
        }
        _tile_stored(0, sums[0], VEC_BYTES);
        _tile_stored(1, sums[0][AMX_ROWS], VEC_BYTES);
        _tile_stored(2, sums[1], VEC_BYTES);
        _tile_stored(3, sums[1][AMX_ROWS], VEC_BYTES);
        const float *x_scales = p->x.scales + b * p->x.capacity + at->row;
        const int32_t *x_sums = p->x.sums + b * p->x.capacity + at->row;
        struct group scales = load_group(&p->w, coding, at->panel, group);
        UNROLL_VECS for (int r = 0; r < rows; r++) total[v][r] =
            add_block(total[v][r], load_int(sums[v][r]), coding, scales.scale[v], scales.zero[v], scales.offset[v], x_scales[r],
                      x_sums[r]);
        if (--left == 0) group++, left = p->blocks_per_group;
    }
    for (int v = 0; v < PANEL_VECS; v++) {
        struct tile lower = {at->codes, at->panel, at->row + AMX_ROWS};
        write_column(&p->w, rows, v, total[v], at);
        write_column(&p->w, rows - AMX_ROWS, v, total[v] + AMX_ROWS, &lower);
    }
}

/* All rows first..last of a panel whose codes were expanded. */
INLINE void run_tiles(const struct product *p, const int coding, struct tile at, ptrdiff_t last) {
    const ptrdiff_t step = p->tiles == WIDE ? 2 * AMX_ROWS : AMX_ROWS;
    for (; at.row < last; at.row += step) {
        int rows = (int)(last - at.row < step ? last - at.row : step);
        if (p->tiles == WIDE) {
            run_wide(p, coding, rows, &at);
        } else {
            run_narrow(p, coding, rows, 0, &at);
            run_narrow(p, coding, rows, 1, &at);
        }
    }
}

static void choose_tiles(const struct product *p, struct tile at, ptrdiff_t last) {
    switch (p->coding) {
        case CENTRED: run_tiles(p, CENTRED, at, last); break;
        case ZERO: run_tiles(p, ZERO, at, last); break;
        case OFFSET: run_tiles(p, OFFSET, at, last); break;
    }
}
#endif

static enum form stored_form(const struct linear *w) { return w->bits == 2 ? TWO : w->bits == 4 ? FOUR : EIGHT; }

/* All rows first..last of a panel. */
static void run_panel(const struct product *p, ptrdiff_t panel, ptrdiff_t first, ptrdiff_t last, int32_t *scratch) {
    const struct linear *w = &p->w;
    struct tile at = {w->codes + panel * w->words * PANEL, panel, first};
#if HAVE_AMX
    if (p->tiles && last - first >= MIN_TILE_ROWS) {
        expand(w, at.codes, p->coding == CENTRED ? 1 << (w->bits - 1) : 0, scratch);
        at.codes = scratch;
        amx_settle(scratch);
        choose_tiles(p, at, last);
        return;
    }
#endif
    enum form form = stored_form(w);
    if (last - first > 2 * DOT_ROWS && w->bits < 8) {
        expand(w, at.codes, 0, scratch);
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

/* Items: pieces of panels, each with chunks of rows one after the other. */
static void run_items(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct product *p = arg;
    const struct linear *w = &p->w;
    ptrdiff_t panels = (w->out_features + PANEL - 1) / PANEL, used = w->words * 8 / w->bits * PANEL;
    int32_t *scratch = NULL;
    if (w->rows > DOT_ROWS) {
        scratch = thread_scratch((used + MAX_TILE_WORDS * PANEL) * sizeof *scratch);
        memset(scratch + used, 0, MAX_TILE_WORDS * PANEL * sizeof *scratch);
    }
#if HAVE_AMX
    if (p->tiles) amx_configure(p->tile_words);
#endif
    for (ptrdiff_t item = first; item < last; item++) {
        ptrdiff_t row = item % p->chunks * p->chunk, start = item / p->chunks * w->piece_panels;
        ptrdiff_t end = smaller(row + p->chunk, w->rows);
        for (ptrdiff_t panel = start; panel < start + w->piece_panels && panel < panels; panel++)
            run_panel(p, panel, row, end, scratch);
    }
#if HAVE_AMX
    if (p->tiles) _tile_release();
#endif
}

/* Tiles take whole steps of 64 or 32 features. */
static void plan_tiles(struct product *p) {
    p->tiles = NONE;
#if HAVE_AMX
    const int one = p->x.blocks == 1;
    ptrdiff_t block = one ? p->x.stride : p->x.block;
    if (p->w.rows < MIN_TILE_ROWS || block % 32 || !amx_allowed()) return;
    p->tiles = one || (block % 64 == 0 && block >= WIDE_BLOCK) ? WIDE : NARROW;
    p->tile_words = block % 64 ? 8 : 16;
    p->block_steps = block / (4 * p->tile_words);
    p->steps = (p->w.words * 8 / p->w.bits + p->tile_words - 1) / p->tile_words;
#endif
}

/* Rows of x's codes come in multiples of CAPACITY, bytes of a row in multiples of STRIDE, as in linear_int8.py. */
#define CAPACITY 32
#define STRIDE 64

enum { IN_FEATURES, OUT_FEATURES, WORDS, GROUPS, GROUP_SIZE, BITS, INPUT_GROUP, BLOCK, SCALE_TYPE };
enum { CODES, SCALES, ZEROS, OFFSETS, PERM };

static struct product describe(const ptrdiff_t *sizes, const void *const *tensors, ptrdiff_t rows) {
    struct product p = {.w = {.rows = rows, .in_features = sizes[IN_FEATURES], .out_features = sizes[OUT_FEATURES],
                              .codes = tensors[CODES], .scales = tensors[SCALES], .zeros = tensors[ZEROS],
                              .offsets = tensors[OFFSETS], .words = sizes[WORDS], .groups = sizes[GROUPS],
                              .group_size = sizes[GROUP_SIZE], .bits = (int)sizes[BITS],
                              .scale_type = (enum float_type)sizes[SCALE_TYPE]}};
    p.x.block = sizes[BLOCK];
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

/* y [rows][OUT_FEATURES], contiguous. sizes: in the order of the names above; INPUT_GROUP features of x share a scale (0: a row's
   do), BLOCK features a scale of x and one of the weight. tensors: as in linear.h, and perm int64 or NULL. A fixed `input_scale`,
   or 0: each from its values. workspace: for each of the rows, in multiples of CAPACITY, a row of codes and 8 bytes per block. */
void twofold_linear_int8(const float *x, ptrdiff_t x_stride, ptrdiff_t rows, const void *const *tensors, const ptrdiff_t *sizes,
                         float input_scale, void *workspace, const float *bias, float *y) {
    struct product p = describe(sizes, tensors, rows);
    p.w.bias = bias;
    p.w.y = y;
    p.w.y_stride = sizes[OUT_FEATURES];
    struct int8_input input = {.x = x, .x_stride = x_stride, .rows = rows, .columns = sizes[IN_FEATURES], .perm = tensors[PERM],
                               .group = sizes[INPUT_GROUP], .scale = input_scale, .bits = p.w.bits,
                               .factor = p.coding == CENTRED ? -(1 << (p.w.bits - 1)) : 1};
    int8_rows_make(&input, workspace, &p.x);
    plan_tiles(&p);
    ptrdiff_t panels = (p.w.out_features + PANEL - 1) / PANEL;
    p.w.piece_panels = linear_piece(panels * p.chunks);
    ptrdiff_t pieces = (panels + p.w.piece_panels - 1) / p.w.piece_panels, chunk = rows < p.chunk ? rows : p.chunk;
    ptrdiff_t grain = team_grain(PIECE_WORK, (chunk + DOT_ROWS - 1) / DOT_ROWS * p.w.in_features * p.w.piece_panels * PANEL);
    team_run(run_items, &p, pieces * p.chunks, team_even_grain(pieces * p.chunks, grain));
}
