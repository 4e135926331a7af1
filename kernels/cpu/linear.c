/* y[M,N] = x[M,K] W[N,K]^T + bias, all float32 sums; weights packed into panels of PANEL output features.

   Every output is summed over k in the same order whatever M, the thread count or the row's place in the batch: SUM_K
   features in one accumulator, then these sums one after the other. So a row's result does not depend on its batch, and a
   packed low-bit weight gives bit for bit what its dequantized matrix gives. */
#include "groups.h"
#include "linear.h"
#include "linear_tile.h"
#include "parallel.h"
#include "simd.h"

/* A thread works on GROUP_PANELS panels and at most BLOCK_K features at a time: that much weight stays in the L2 cache while
   the rows of x pass by, and one tile's rows of x stay in the L1 cache. A multiple of SUM_K. */
#define BLOCK_K 640
#define GROUP_PANELS 4

/* Rows of x per piece of work: many enough to pay for decoding a panel, few enough to share out a prompt evenly. */
#define ROW_CHUNK (TILE_ROWS * 16)
/* Weights that are worth claiming by themselves, per FUSED_ROWS rows: some microseconds. */
#define PIECE_WORK (1 << 16)

int twofold_panel_width(void) { return PANEL; }

/* Floats in a cache line, features per turn of dense_tile's loop, rows of x that share a pointer: one or two strides further are
   addresses that cost nothing. */
#define LINE 16
#define UNROLL_K 4
#define POINTER_ROWS 3

/* sum += the weights of one feature times x, `k` floats after each row's place. */
INLINE void dense_feature(const int rows, const float *const *x, ptrdiff_t stride, int k, const float *w, accumulators sum) {
    vf column[PANEL_VECS];
    UNROLL_VECS column[v] = load(w + v * LANES);
    UNROLL_ROWS {
        const float *place = x[r / POINTER_ROWS] + r % POINTER_ROWS * stride + k;
        if (r % POINTER_ROWS == 0) {
            UNROLL_VECS add_product_with(&sum[r][v], column[v], place);
            continue;
        }
        vf value = splat(*place);
        UNROLL_VECS add_product(&sum[r][v], column[v], value);
    }
}

/* Ask for the weights at `ahead`, `step` floats for each of UNROLL_K features. */
INLINE void ask_ahead(const float *ahead, ptrdiff_t step) {
    __builtin_prefetch(ahead, 0, 2);
    if (step <= LINE / UNROLL_K) return;
#pragma GCC unroll 4
    for (int j = 0; j < UNROLL_K; j++) {
        if (j) __builtin_prefetch(ahead + j * step, 0, 2);
        if (PANEL > LINE && step > LINE) __builtin_prefetch(ahead + j * step + LINE, 0, 2);
    }
}

/* sum [rows][PANEL] += x [rows, depth] w [depth, PANEL], asking meanwhile for the weights at `ahead`, `step` floats per k. */
INLINE void dense_tile(const int rows, const float *x, ptrdiff_t stride, const float *w, ptrdiff_t depth,
                       const float *ahead, ptrdiff_t step, accumulators sum) {
    const int pointers = (rows + POINTER_ROWS - 1) / POINTER_ROWS;
    const float *place[(TILE_ROWS + POINTER_ROWS - 1) / POINTER_ROWS];
    ptrdiff_t k = 0;
#pragma GCC unroll 4
    for (int i = 0; i < pointers; i++) place[i] = x + i * POINTER_ROWS * stride;
    for (; k + UNROLL_K <= depth; k += UNROLL_K, w += UNROLL_K * PANEL, ahead += UNROLL_K * step) {
        ask_ahead(ahead, step);
#pragma GCC unroll 4
        for (int j = 0; j < UNROLL_K; j++) dense_feature(rows, place, stride, j, w + j * PANEL, sum);
#pragma GCC unroll 4
        for (int i = 0; i < pointers; i++) place[i] += UNROLL_K;
    }
    for (; k < depth; k++, w += PANEL) {
        dense_feature(rows, place, stride, 0, w, sum);
#pragma GCC unroll 4
        for (int i = 0; i < pointers; i++) place[i]++;
    }
}

/* How codes become weights: the zeros may be stored, half the codes' range where a table of codes minus zero makes the difference
   free, or replaced by an offset; or a code is a float of 16 bits. */
enum coding { ZERO, CENTRED, OFFSET, BFLOAT, HALF, NUM_CODINGS };

static enum coding coding_of(const struct linear *p) {
    if (p->bits >= BFLOAT16_BITS) return p->bits == BFLOAT16_BITS ? BFLOAT : HALF;
    return p->offsets ? OFFSET : p->bits == 4 && !p->zeros ? CENTRED : ZERO;
}

/* The scale and zero, or offset, of one group of one panel. */
struct group {
    vf scale[PANEL_VECS];
    vf zero[PANEL_VECS];
};

INLINE struct group load_group(const struct linear *p, const int bits, const int coding, ptrdiff_t panel, ptrdiff_t index) {
    struct group group;
    ptrdiff_t place = (panel * p->groups + index) * PANEL;
    if (coding == BFLOAT || coding == HALF) {
        UNROLL_VECS group.scale[v] = group.zero[v] = splat(0.0f);
        return group;
    }
    UNROLL_VECS {
        group.scale[v] = load_floats(p->scales, p->scale_type, place + v * LANES);
        if (coding == OFFSET)
            group.zero[v] = load_floats(p->offsets, p->scale_type, place + v * LANES);
        else if (p->zeros)
            group.zero[v] = to_float(load_zeros(p->zeros + place + v * LANES));
        else
            group.zero[v] = splat((float)(1 << (bits - 1)));
    }
    return group;
}

/* The weight that code number j of each lane's word stands for: (code - zero) * scale, the difference being exact, or
   code * scale + zero with an offset as `zero`; that product is exact for scales of up to 16 bits. */
INLINE vf decode(vi word, const int bits, const int coding, int j, vf scale, vf zero) {
    vi code = word >> (bits * j);
    if (coding == BFLOAT) return (vf)(j ? word & splat_int(-65536) : word << 16);
    if (coding == HALF) {
        vf magnitude = (vf)((code & splat_int(0x7fff)) << 13) * splat(0x1p112f);
        vi special = ((code & splat_int(0x7c00)) == splat_int(0x7c00)) & splat_int(0x7f800000); /* infinity and NaN */
        return (vf)((vi)magnitude | special | (code & splat_int(0x8000)) << 16);
    }
#if defined(__AVX512F__)
    if (bits == 4) {
        const float shift = coding == CENTRED ? -8.0f : 0.0f;
        const vf value = (vf)_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15) + splat(shift);
        vf difference = (vf)_mm512_permutexvar_ps((__m512i)code, (__m512)value);
        if (coding == OFFSET) return difference * scale + zero;
        return (coding == CENTRED ? difference : difference - zero) * scale;
    }
#endif
    vf value = to_float(code & splat_int((1 << bits) - 1));
    return coding == OFFSET ? value * scale + zero : (value - zero) * scale;
}

/* dense_tile on features first..last of a low-bit panel, decoding in registers. */
INLINE void low_bit_tile(const struct linear *p, const int bits, const int coding, const int rows, const float *x, ptrdiff_t panel,
                         ptrdiff_t first, ptrdiff_t last, accumulators sum) {
    const int per_word = 32 / bits;
    const int32_t *codes = p->codes + panel * p->words * PANEL;
    for (ptrdiff_t k = first; k < last;) {
        ptrdiff_t index = k / p->group_size, end = (index + 1) * p->group_size;
        if (end > last) end = last;
        struct group group = load_group(p, bits, coding, panel, index);
        for (; k < end; k += per_word) {
            const int32_t *place = codes + k / per_word * PANEL;
            vi word[PANEL_VECS];
            UNROLL_VECS {
                __builtin_prefetch(place + PREFETCH_K * PANEL / 4 + v * LANES);
                word[v] = load_int(place + v * LANES);
            }
            int count = end - k < per_word ? (int)(end - k) : per_word;
            if (count == per_word) {
#pragma GCC unroll 8
                for (int j = 0; j < per_word; j++) {
                    vf column[PANEL_VECS];
                    UNROLL_VECS column[v] = decode(word[v], bits, coding, j, group.scale[v], group.zero[v]);
                    UNROLL_ROWS {
                        vf value = splat(x[r * p->x_stride + k + j]);
                        UNROLL_VECS sum[r][v] += column[v] * value;
                    }
                }
            } else {
                for (int j = 0; j < count; j++) {
                    vf column[PANEL_VECS];
                    UNROLL_VECS column[v] = decode(word[v], bits, coding, j, group.scale[v], group.zero[v]);
                    UNROLL_ROWS {
                        vf value = splat(x[r * p->x_stride + k + j]);
                        UNROLL_VECS sum[r][v] += column[v] * value;
                    }
                }
            }
        }
    }
}

/* out [last-first][PANEL]: the weights of features first..last of a low-bit panel. */
INLINE void expand(const struct linear *p, const int bits, const int coding, ptrdiff_t panel, ptrdiff_t first, ptrdiff_t last,
                   float *out) {
    const int per_word = 32 / bits;
    const int32_t *codes = p->codes + panel * p->words * PANEL;
    for (ptrdiff_t k = first; k < last;) {
        ptrdiff_t index = k / p->group_size, end = (index + 1) * p->group_size;
        if (end > last) end = last;
        struct group group = load_group(p, bits, coding, panel, index);
        for (; k < end; k += per_word) {
            const int32_t *place = codes + k / per_word * PANEL;
            int count = end - k < per_word ? (int)(end - k) : per_word;
            for (int j = 0; j < count; j++, out += PANEL)
                UNROLL_VECS store(out + v * LANES,
                                  decode(load_int(place + v * LANES), bits, coding, j, group.scale[v], group.zero[v]));
        }
    }
}

INLINE void run_part(const struct linear *p, const int rows, const int bits, const int coding, struct place at, float *so_far) {
    accumulators sum;
    UNROLL_ROWS UNROLL_VECS sum[r][v] = (vf){0};
    const float *x = p->x + at.row * p->x_stride;
    if (bits == 0)
        dense_tile(rows, x + at.first, p->x_stride, at.dense, at.last - at.first, at.ahead, at.step, sum);
    else
        low_bit_tile(p, bits, coding, rows, x, at.panel, at.first, at.last, sum);
    write_part(p, rows, sum, at, so_far);
}

INLINE void run_tile(const struct linear *p, const int rows, const int bits, const int coding, struct place at) {
    ALIGNED float so_far[TILE_ROWS * PANEL];
    for (at.begin = at.first, at.end = at.last; at.first < at.end; at.first = at.last) {
        at.last = at.first + SUM_K < at.end ? at.first + SUM_K : at.end;
        run_part(p, rows, bits, coding, at, so_far);
        at.dense += SUM_K * PANEL;
        at.ahead += SUM_K * at.step;
    }
}

#define CASE(n) \
    case n: run_tile(p, n, 0, 0, at); break;

static void dense_rows(const struct linear *p, int rows, struct place at) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
#if TILE_ROWS >= 6
        CASE(6)
#endif
#if TILE_ROWS >= 12
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}
#undef CASE

static int code_bits(const struct linear *p) { return p->bits < 16 ? p->bits : 16; }

#define VARIANT(bits, coding) (NUM_CODINGS * (bits) + (coding))
#define CASE(n, bits, coding) \
    case 128 * n + VARIANT(bits, coding): run_tile(p, n, bits, coding, at); break;
#define CASES(n) \
    CASE(n, 2, ZERO) CASE(n, 4, ZERO) CASE(n, 4, CENTRED) CASE(n, 4, OFFSET) CASE(n, 8, ZERO) CASE(n, 8, OFFSET) \
    CASE(n, 16, BFLOAT) CASE(n, 16, HALF)

/* Exactly `rows`, one of the cases. */
static void low_bit_case(const struct linear *p, int rows, struct place at) {
    if (is_small_float(p)) {
        small_float_case(p, rows, at);
        return;
    }
    switch (128 * rows + VARIANT(code_bits(p), coding_of(p))) {
        CASES(1) CASES(2) CASES(3)
#if FUSED_ROWS >= 4
        CASES(4)
#endif
#if FUSED_ROWS >= 8
        CASES(6) CASES(8)
#endif
    }
}

/* Five rows are three and two, seven four and three: each case costs a tenth of a second of the compiler's time per coding. */
static void low_bit_rows(const struct linear *p, int rows, struct place at) {
    if (rows == 5 || rows == 7) {
        const int half = rows / 2;
        low_bit_case(p, rows - half, at);
        at.row += rows - half;
        rows = half;
    }
    low_bit_case(p, rows, at);
}
#undef CASES
#undef CASE

static void expand_block(const struct linear *p, struct place at, float *out) {
    if (is_small_float(p)) {
        expand_small_floats(p, at, out);
        return;
    }
    switch (VARIANT(code_bits(p), coding_of(p))) {
        case VARIANT(16, BFLOAT): expand(p, 16, BFLOAT, at.panel, at.first, at.last, out); break;
        case VARIANT(16, HALF): expand(p, 16, HALF, at.panel, at.first, at.last, out); break;
        case VARIANT(4, CENTRED): expand(p, 4, CENTRED, at.panel, at.first, at.last, out); break;
        case VARIANT(2, ZERO): expand(p, 2, ZERO, at.panel, at.first, at.last, out); break;
        case VARIANT(4, ZERO): expand(p, 4, ZERO, at.panel, at.first, at.last, out); break;
        case VARIANT(4, OFFSET): expand(p, 4, OFFSET, at.panel, at.first, at.last, out); break;
        case VARIANT(8, ZERO): expand(p, 8, ZERO, at.panel, at.first, at.last, out); break;
        case VARIANT(8, OFFSET): expand(p, 8, OFFSET, at.panel, at.first, at.last, out); break;
    }
}

static ptrdiff_t smaller(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

static ptrdiff_t larger(ptrdiff_t a, ptrdiff_t b) { return a > b ? a : b; }

static ptrdiff_t num_panels(const struct linear *p) { return (p->out_features + PANEL - 1) / PANEL; }

static ptrdiff_t num_chunks(const struct linear *p) { return (p->rows + ROW_CHUNK - 1) / ROW_CHUNK; }

/* Rows and panels of y that are computed together. */
struct share {
    ptrdiff_t first_panel, last_panel, first_row, last_row;
};

/* The weights of panel i of the block that follows block k of the group at `panel`, or of this one at the end. */
static const float *block_after(const struct linear *p, const struct share *share, ptrdiff_t panel, ptrdiff_t k, ptrdiff_t block,
                                ptrdiff_t i) {
    ptrdiff_t next_k = k + block < p->in_features ? k + block : 0;
    ptrdiff_t next = next_k ? panel + i : panel + GROUP_PANELS + i;
    if (next >= share->last_panel) next = panel + i;
    return p->weight + (next * p->in_features + next_k) * PANEL;
}

/* All the share's rows for one block of K and one group of panels. */
static void run_block(const struct linear *p, const struct share *share, ptrdiff_t panel, ptrdiff_t k, ptrdiff_t block, float *scratch) {
    struct place at = {.first = k, .last = k + block < p->in_features ? k + block : p->in_features};
    ptrdiff_t num_panels = share->last_panel - panel < GROUP_PANELS ? share->last_panel - panel : GROUP_PANELS;
    ptrdiff_t num_rows = share->last_row - share->first_row, num_tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
    int in_registers = p->codes && num_rows <= FUSED_ROWS;
    if (p->codes && !in_registers)
        for (ptrdiff_t i = 0; i < num_panels; i++) {
            at.panel = panel + i;
            expand_block(p, at, scratch + i * BLOCK_K * PANEL);
        }
    for (ptrdiff_t t = 0; t < num_tiles; t++) {
        at.row = share->first_row + num_rows * t / num_tiles;
        int rows = (int)(share->first_row + num_rows * (t + 1) / num_tiles - at.row);
        for (ptrdiff_t i = 0; i < num_panels; i++) {
            at.panel = panel + i;
            if (in_registers) {
                low_bit_rows(p, rows, at);
                continue;
            }
            at.dense = p->codes ? scratch + i * BLOCK_K * PANEL : p->weight + (at.panel * p->in_features + k) * PANEL;
            at.ahead = at.dense + PREFETCH_K * PANEL;
            at.step = PANEL;
            if (num_tiles > 1 && !p->codes) {
                at.step = PANEL / num_tiles;
                at.ahead = block_after(p, share, panel, k, block, i) + (at.last - k) * PANEL * t / num_tiles;
            }
            dense_rows(p, rows, at);
        }
    }
}

/* Items of a product: groups of panels, each with chunks of ROW_CHUNK rows one after the other, so that weights are read from
   memory once and then found in a cache. */
void linear_run_items(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct linear *p = arg;
    ptrdiff_t panels = num_panels(p), chunks = num_chunks(p);
    float *scratch = p->codes ? thread_scratch(GROUP_PANELS * BLOCK_K * PANEL * sizeof(float)) : NULL;
    ptrdiff_t sums = (p->in_features + SUM_K - 1) / SUM_K, blocks = (p->in_features + BLOCK_K - 1) / BLOCK_K;
    ptrdiff_t block = blocks ? (sums + blocks - 1) / blocks * SUM_K : SUM_K;
    for (ptrdiff_t item = first; item < last; item++) {
        ptrdiff_t row = item % chunks * ROW_CHUNK, start = item / chunks * p->piece_panels;
        struct share share = {start, smaller(start + p->piece_panels, panels), row, smaller(row + ROW_CHUNK, p->rows)};
        for (ptrdiff_t panel = share.first_panel; panel < share.last_panel; panel += GROUP_PANELS)
            for (ptrdiff_t k = 0; k < p->in_features; k += block) run_block(p, &share, panel, k, block, scratch);
    }
}

/* One panel of one chunk of rows is the smallest item. */
ptrdiff_t linear_grid(const struct linear *p) { return num_panels(p) * num_chunks(p); }

/* Few pieces would leave threads idle at the end, tiny ones cost more to claim than to compute. */
ptrdiff_t linear_piece(ptrdiff_t all_items) {
    return smaller(larger(all_items / (8 * (ptrdiff_t)team_size()), 1), GROUP_PANELS);
}

ptrdiff_t linear_num_items(const struct linear *p) {
    return num_chunks(p) * ((num_panels(p) + p->piece_panels - 1) / p->piece_panels);
}

ptrdiff_t linear_item_grain(const struct linear *p) {
    ptrdiff_t tiles = (smaller(p->rows, ROW_CHUNK) + FUSED_ROWS - 1) / FUSED_ROWS;
    return team_grain(PIECE_WORK, tiles * p->in_features * p->piece_panels * PANEL);
}

static void run(struct linear *p) {
    p->piece_panels = linear_piece(linear_grid(p));
    ptrdiff_t items = linear_num_items(p);
    team_run(linear_run_items, p, items, team_even_grain(items, linear_item_grain(p)));
}

void twofold_linear_dense(const float *x, ptrdiff_t x_stride, ptrdiff_t rows, ptrdiff_t in_features, ptrdiff_t out_features,
                          const float *weight, const float *bias, float *y, ptrdiff_t y_stride) {
    struct linear p = {x, x_stride, rows, in_features, out_features, bias, y, y_stride, .weight = weight};
    run(&p);
}

void twofold_linear_low_bit(const float *x, ptrdiff_t x_stride, ptrdiff_t rows, ptrdiff_t in_features, ptrdiff_t out_features,
                            const int32_t *codes, const void *scales, const uint8_t *zeros, const void *offsets,
                            int scale_type, ptrdiff_t words, ptrdiff_t groups, ptrdiff_t group_size, int bits,
                            const float *bias, float *y, ptrdiff_t y_stride) {
    struct linear p = {x, x_stride, rows, in_features, out_features, bias, y, y_stride, NULL,
                       codes, scales, zeros, offsets, scale_type, words, groups, group_size, bits, 0};
    run(&p);
}
