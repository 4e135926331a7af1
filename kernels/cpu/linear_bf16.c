/* y = x W^T + bias with x and W in bfloat16 and sums in float32, in tile registers.

   A tile of 16 output features times a tile of up to 16 rows of x, the latter as pairs of input features; over all of K one sum,
   32 features after the other, whatever the number of rows. So a row's result depends neither on its batch nor on the way a
   weight was expanded: step by step as it is used, for few rows, or a panel at once for many. */
#include "linear_bf16.h"
#include "parallel.h"

#if HAVE_AMX_BF16
/* Rows that pass in one go while a panel is expanded step by step. */
#define FUSED_MAX (2 * AMX_ROWS)
/* Rows of x per piece of work: so many that expanding a panel costs little, no more than a part of the L2 cache holds. */
#define CHUNK_BYTES (768 << 10)
#define MIN_CHUNK 64
#define MAX_CHUNK 512
/* Steps that lie in the L1 cache while many rows pass; sums of fewer than all wait in memory, which changes no bit. */
#define BLOCK_STEPS 18
/* Steps that are expanded ahead of the tiles (stored just before, they would be waited for), and how far ahead codes are asked for. */
#define LEAD 2
#define RING 4
#define AHEAD_BYTES 4096
#define A_BYTES (AMX_ROWS * STEP_BYTES)
#define SUM_FLOATS (AMX_ROWS * LANES)
/* Multiplications that are worth claiming by themselves, and floats of x: some microseconds. */
#define PIECE_WORK (1 << 21)
#define PIECE_FLOATS (1 << 14)
#define EXPANSION_ROWS 16

struct bf16_product {
    struct bf16_weights w;
    const float *x;
    ptrdiff_t x_stride, rows, in_features, out_features;
    const int64_t *perm;
    uint8_t *tiles; /* x: [row blocks][steps][STEP_K / 2 pairs][width][2] */
    ptrdiff_t width; /* rows of a block */
    ptrdiff_t chunk, chunks, piece_panels, panels, pieces;
    const float *bias;
    float *y;
};

static ptrdiff_t smaller(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

/* Sixteen rows of sixteen words become columns. */
INLINE void transpose(__m512 *r) {
    __m512 t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = (__m512)_mm512_unpacklo_pd((__m512d)t[i], (__m512d)t[i + 2]);
        r[i + 1] = (__m512)_mm512_unpackhi_pd((__m512d)t[i], (__m512d)t[i + 2]);
        r[i + 2] = (__m512)_mm512_unpacklo_pd((__m512d)t[i + 1], (__m512d)t[i + 3]);
        r[i + 3] = (__m512)_mm512_unpackhi_pd((__m512d)t[i + 1], (__m512d)t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512 low = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88), high = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xDD);
        __m512 low2 = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88), high2 = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xDD);
        t[i] = _mm512_shuffle_f32x4(low, low2, 0x88);
        t[i + 8] = _mm512_shuffle_f32x4(low, low2, 0xDD);
        t[i + 4] = _mm512_shuffle_f32x4(high, high2, 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(high, high2, 0xDD);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

/* STEP_K features of a row in bfloat16, 0 beyond K. */
INLINE __m512 round_step(const struct bf16_product *p, const float *x, ptrdiff_t k) {
    float gathered[STEP_K];
    const ptrdiff_t left = smaller(p->in_features - k, STEP_K);
    const __mmask16 low = (__mmask16)(left >= LANES ? -1 : (1 << left) - 1);
    const __mmask16 high = (__mmask16)(left >= STEP_K ? -1 : left > LANES ? (1 << (left - LANES)) - 1 : 0);
    if (p->perm)
        for (ptrdiff_t i = 0; i < left; i++) gathered[i] = x[p->perm[k + i]];
    const float *from = p->perm ? gathered : x + k;
    return (__m512)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(high, from + LANES), _mm512_maskz_loadu_ps(low, from));
}

/* Items are steps of blocks of rows. */
static void round_x(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct bf16_product *p = arg;
    for (ptrdiff_t item = first; item < last; item++) {
        const ptrdiff_t row = item / p->w.steps * p->width, k = item % p->w.steps * STEP_K;
        const ptrdiff_t rows = smaller(p->rows - row, p->width);
        float *out = (float *)(p->tiles + item * p->width * STEP_BYTES);
        __m512 tile[AMX_ROWS];
        if (p->width == 1) {
            _mm512_storeu_ps(out, round_step(p, p->x + row * p->x_stride, k));
            continue;
        }
#pragma GCC unroll 16
        for (int r = 0; r < AMX_ROWS; r++)
            tile[r] = r < rows ? round_step(p, p->x + (row + r) * p->x_stride, k) : _mm512_setzero_ps();
        transpose(tile);
        const __mmask16 used = (__mmask16)((1u << p->width) - 1);
#pragma GCC unroll 16
        for (int pair = 0; pair < AMX_ROWS; pair++) _mm512_mask_storeu_ps(out + pair * p->width, used, tile[pair]);
    }
}

/* Tiles 0 to 3 are sums [16 features][width], 4 and 5 weights, 6 and 7 x. */
static void configure(ptrdiff_t width) {
    struct amx_config config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.row_bytes[tile] = (uint16_t)(tile == 4 || tile == 5 ? STEP_BYTES : 4 * width);
        config.rows[tile] = AMX_ROWS;
    }
    amx_settle(&config);
    _tile_loadconfig(&config);
}

/* y's part of a block of rows and 16 features: sums [16 features][AMX_ROWS], or [16] of one row. */
INLINE void write_block(const struct bf16_product *p, const float *sums, ptrdiff_t row, ptrdiff_t last, ptrdiff_t feature) {
    const ptrdiff_t features = p->out_features - feature, rows = smaller(last - row, AMX_ROWS);
    if (features <= 0) return;
    const __mmask16 lanes = (__mmask16)(features >= LANES ? -1 : (1 << features) - 1);
    const __m512 bias = p->bias ? _mm512_maskz_loadu_ps(lanes, p->bias + feature) : _mm512_setzero_ps();
    float *y = p->y + row * p->out_features + feature;
    __m512 column[AMX_ROWS];
    if (p->width == 1) {
        column[0] = _mm512_load_ps(sums);
        _mm512_mask_storeu_ps(y, lanes, (__m512)(p->bias ? (vf)column[0] + (vf)bias : (vf)column[0]));
        return;
    }
#pragma GCC unroll 16
    for (int i = 0; i < AMX_ROWS; i++) column[i] = _mm512_load_ps(sums + i * AMX_ROWS);
    transpose(column);
#pragma GCC unroll 16
    for (int r = 0; r < AMX_ROWS; r++)
        if (r < rows) _mm512_mask_storeu_ps(y + r * p->out_features, lanes, (__m512)(p->bias ? (vf)column[r] + (vf)bias : (vf)column[r]));
}

INLINE void write_sums(const struct bf16_product *p, const int blocks, ptrdiff_t panel, ptrdiff_t row, ptrdiff_t last) {
    _Alignas(64) float sums[4][SUM_FLOATS];
    const ptrdiff_t stride = p->width == 1 ? 4 : VEC_BYTES;
    _tile_stored(0, sums[0], stride);
    _tile_stored(1, sums[1], stride);
    if (blocks == 2) {
        _tile_stored(2, sums[2], stride);
        _tile_stored(3, sums[3], stride);
    }
    amx_settle(sums);
    for (int i = 0; i < 2 * blocks; i++) write_block(p, sums[i], row + i / 2 * AMX_ROWS, last, panel * PANEL + i % 2 * LANES);
}

/* Sums of a panel's step, at `a`, and one or two blocks of rows. x passes the L1 cache by, so that the weights stay there. */
INLINE void multiply_step(const struct bf16_product *p, const int blocks, const uint8_t *a, const uint8_t *x, ptrdiff_t apart) {
    const ptrdiff_t stride = 4 * p->width;
    _tile_loadd(4, a, STEP_BYTES);
    if (blocks == 1)
        _tile_loadd(6, x, stride);
    else
        _tile_stream_loadd(6, x, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a + A_BYTES, STEP_BYTES);
    _tile_dpbf16ps(1, 5, 6);
    if (blocks == 1) return;
    _tile_stream_loadd(7, x + apart, stride);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
}

INLINE void clear_sums(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

static const uint8_t *x_block(const struct bf16_product *p, ptrdiff_t row) {
    return p->tiles + row / p->width * p->w.steps * p->width * STEP_BYTES;
}

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

/* The same while the panel is expanded, a step ahead of the tiles. */
INLINE void run_fused(const struct bf16_product *p, const int kind, const int coding, const int blocks, ptrdiff_t panel,
                      ptrdiff_t row, ptrdiff_t last) {
    _Alignas(64) uint8_t ring[RING][2 * A_BYTES];
    struct bf16_groups groups;
    const uint8_t *x = x_block(p, row), *codes = p->w.codes + panel * p->w.steps * p->w.step_bytes + AHEAD_BYTES;
    const ptrdiff_t x_step = p->width * STEP_BYTES, apart = p->w.steps * x_step;
    bf16_forget(&groups);
    clear_sums();
    for (ptrdiff_t s = 0; s < LEAD && s < p->w.steps; s++) bf16_expand(&p->w, kind, coding, panel, s, &groups, ring[s]);
    for (ptrdiff_t s = 0; s < p->w.steps; s++) {
        for (int line = 0; line < (kind == NIBBLES ? 8 : 16); line++) __builtin_prefetch(codes + 64 * line);
        codes += p->w.step_bytes;
        if (s + LEAD < p->w.steps) bf16_expand(&p->w, kind, coding, panel, s + LEAD, &groups, ring[(s + LEAD) % RING]);
        amx_settle(ring);
        multiply_step(p, blocks, ring[s % RING], x + s * x_step, apart);
    }
    write_sums(p, blocks, panel, row, last);
}

/* Rows first..last-1 of a panel. */
INLINE void run_panel(const struct bf16_product *p, const int kind, const int coding, ptrdiff_t panel, ptrdiff_t first,
                      ptrdiff_t last, uint8_t *scratch) {
    if (kind != FLOATS16 && last - first <= FUSED_MAX) {
        if (last - first <= AMX_ROWS)
            run_fused(p, kind, coding, 1, panel, first, last);
        else
            run_fused(p, kind, coding, 2, panel, first, last);
        return;
    }
    const ptrdiff_t steps = p->w.steps, blocks = last - first <= FUSED_MAX ? 1 : (steps + BLOCK_STEPS - 1) / BLOCK_STEPS;
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
    p->width = p->rows < AMX_ROWS ? p->rows : AMX_ROWS;
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
