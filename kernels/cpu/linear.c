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
/* So few tiles of rows take about as long as their weights take to arrive: panel by panel, the next being asked for meanwhile, of
   at least so many side by side. */
#define FEW_TILES 4
#define FEW_PANELS 3

/* Rows of x per piece of work: many enough to pay for decoding a panel, few enough to share out a prompt evenly. */
#define ROW_CHUNK (TILE_ROWS * 16)
/* Weights that are worth claiming by themselves, per PIECE_ROWS rows: some microseconds. */
#define PIECE_WORK (1 << 16)
#define PIECE_ROWS (TILE_ROWS * 2 / 3)

int twofold_panel_width(void) { return PANEL; }

/* Floats in a cache line, features per turn of dense_tile's loop. */
#define LINE 16
#define UNROLL_K 4

/* sum += the weights of one feature times x, `k` floats after each row's place. */
INLINE void dense_feature(const int rows, const float *const *x, ptrdiff_t stride, int k, const float *w, accumulators sum) {
    vf column[PANEL_VECS];
    UNROLL_VECS column[v] = load(w + v * LANES), keep(&column[v]);
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

INLINE void run_tile(const struct linear *p, const int rows, struct place at) {
    ALIGNED float so_far[TILE_ROWS * PANEL];
    for (at.begin = at.first, at.end = at.last; at.first < at.end; at.first = at.last) {
        at.last = at.first + SUM_K < at.end ? at.first + SUM_K : at.end;
        accumulators sum;
        UNROLL_ROWS UNROLL_VECS sum[r][v] = (vf){0};
        const float *x = p->x + at.row * p->x_stride + at.first;
        dense_tile(rows, x, p->x_stride, at.dense, at.last - at.first, at.ahead, at.step, sum);
        write_part(p, rows, sum, at, so_far);
        at.dense += SUM_K * PANEL;
        at.ahead += SUM_K * at.step;
    }
}

#define CASE(n) \
    case n: run_tile(p, n, at); break;

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

static ptrdiff_t smaller(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

static ptrdiff_t larger(ptrdiff_t a, ptrdiff_t b) { return a > b ? a : b; }

ptrdiff_t linear_panels(const struct linear *p) { return p->gate ? p->ups : (p->out_features + PANEL - 1) / PANEL; }

static ptrdiff_t num_chunks(const struct linear *p) { return (p->rows + ROW_CHUNK - 1) / ROW_CHUNK; }

/* Rows and panels of y that are computed together. */
struct share {
    ptrdiff_t first_panel, last_panel, first_row, last_row;
};

static ptrdiff_t num_tiles(ptrdiff_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }

static int is_few(ptrdiff_t rows) { return rows > TILE_ROWS && num_tiles(rows) <= FEW_TILES; }

/* Panels that a share's rows pass by in turn, or that are computed in step: even parts of the share. */
static ptrdiff_t group_panels(const struct share *share) {
    const ptrdiff_t panels = share->last_panel - share->first_panel, groups = (panels + GROUP_PANELS - 1) / GROUP_PANELS;
    return is_few(share->last_row - share->first_row) ? 1 : (panels + groups - 1) / groups;
}

/* The weights of panel i of the block that follows block k of the group at `panel`, or of this one at the end. */
static const float *block_after(const struct linear *p, const struct share *share, ptrdiff_t panel, ptrdiff_t k, ptrdiff_t block,
                                ptrdiff_t i) {
    ptrdiff_t next_k = k + block < p->in_features ? k + block : 0;
    ptrdiff_t next = next_k ? panel + i : panel + group_panels(share) + i;
    if (next >= share->last_panel) next = panel + i;
    return p->weight + (next * p->in_features + next_k) * PANEL;
}

/* What a feature's codes take of a panel, in floats. */
static ptrdiff_t code_floats(const struct linear *p) {
    const int bits = p->bits == E4M3_BITS ? 8 : p->bits == E2M1_BITS ? 4 : p->bits < 16 ? p->bits : 16;
    return PANEL * bits / 32;
}

/* The only tile of rows: a part after the other decoded into the L1 cache while the next part's codes arrive. */
static void low_bit_tile(const struct linear *p, int rows, struct place at, float *scratch) {
    const ptrdiff_t last = at.last;
    at.dense = scratch, at.step = code_floats(p);
    at.ahead = (const float *)(const void *)(p->codes + at.panel * p->words * PANEL) + (at.first + SUM_K) * at.step;
    for (; at.first < last; at.first = at.last, at.ahead += SUM_K * at.step) {
        at.last = smaller(at.first + SUM_K, last);
        expand_block(p, at, scratch);
        dense_rows(p, rows, at);
    }
}

/* All the share's rows for one block of K and one group of panels. */
static void run_block(const struct linear *p, const struct share *share, ptrdiff_t panel, ptrdiff_t k, ptrdiff_t block, float *scratch) {
    struct place at = {.first = k, .last = k + block < p->in_features ? k + block : p->in_features};
    const ptrdiff_t num_panels = smaller(share->last_panel - panel, group_panels(share));
    const ptrdiff_t num_rows = share->last_row - share->first_row, tiles = num_tiles(num_rows);
    if (p->codes && is_in_registers(p, num_rows)) {
        at.panel = panel, at.panels = (int)num_panels, at.row = share->first_row;
        low_bit_rows(p, (int)num_rows, at);
        return;
    }
    if (p->codes && tiles > 1)
        for (ptrdiff_t i = 0; i < num_panels; i++) {
            at.panel = panel + i;
            expand_block(p, at, scratch + i * BLOCK_K * PANEL);
        }
    for (ptrdiff_t t = 0; t < tiles; t++) {
        at.row = share->first_row + num_rows * t / tiles;
        int rows = (int)(share->first_row + num_rows * (t + 1) / tiles - at.row);
        for (ptrdiff_t i = 0; i < num_panels; i++) {
            at.panel = panel + i;
            if (p->codes && tiles == 1) {
                low_bit_tile(p, rows, at, scratch);
                continue;
            }
            at.dense = p->codes ? scratch + i * BLOCK_K * PANEL : p->weight + (at.panel * p->in_features + k) * PANEL;
            at.ahead = at.dense + PREFETCH_K * PANEL;
            at.step = PANEL;
            const int is_new = panel == share->first_panel && k == 0 && t == 0; /* nobody has asked for it */
            if (tiles > 1 && !p->codes && !is_new) {
                at.step = PANEL / tiles;
                at.ahead = block_after(p, share, panel, k, block, i) + (at.last - k) * PANEL * t / tiles;
            }
            dense_rows(p, rows, at);
        }
    }
}

static void run_share(const struct linear *p, const struct share *share, float *scratch) {
    ptrdiff_t sums = (p->in_features + SUM_K - 1) / SUM_K, blocks = (p->in_features + BLOCK_K - 1) / BLOCK_K;
    ptrdiff_t block = blocks ? (sums + blocks - 1) / blocks * SUM_K : SUM_K;
    for (ptrdiff_t panel = share->first_panel; panel < share->last_panel; panel += group_panels(share))
        for (ptrdiff_t k = 0; k < p->in_features; k += block) run_block(p, share, panel, k, block, scratch);
}

struct linear linear_part(const struct linear *p, ptrdiff_t row, ptrdiff_t panel, float *part, ptrdiff_t width) {
    struct linear at = *p;
    at.y = part - row * width - panel * PANEL;
    at.y_stride = width;
    at.gate = NO_GATE;
    return at;
}

void linear_set_gate(struct linear *p, int gate) {
    p->gate = gate;
    p->ups = gate ? p->out_features / 2 / PANEL : 0;
}

void linear_gate(const struct linear *p, ptrdiff_t first, ptrdiff_t last, ptrdiff_t panel, ptrdiff_t panels, const float *parts) {
    const ptrdiff_t width = panels * PANEL;
    const float *gate = parts, *up = parts + (last - first) * width;
    float *y = p->y + first * p->y_stride + panel * PANEL;
    for (ptrdiff_t row = first; row < last; row++, gate += width, up += width, y += p->y_stride)
        for (ptrdiff_t i = 0; i < width; i += LANES) {
            const vf value = load(gate + i);
            store(y + i, (p->gate == SILU ? silu(value) : gelu_tanh(value)) * load(up + i));
        }
}

/* A share of the gates, and the same of the ups. */
static void run_gated(const struct linear *p, struct share share, float *scratch, float *parts) {
    const ptrdiff_t first = share.first_panel, panels = share.last_panel - first, rows = share.last_row - share.first_row;
    for (int side = 0; side < 2; side++, share.first_panel += p->ups, share.last_panel += p->ups) {
        float *part = parts + side * rows * panels * PANEL;
        const struct linear at = linear_part(p, share.first_row, share.first_panel, part, panels * PANEL);
        run_share(&at, &share, scratch);
    }
    linear_gate(p, share.first_row, share.last_row, first, panels, parts);
}

/* Items of a product: groups of panels, each with chunks of ROW_CHUNK rows one after the other, so that weights are read from
   memory once and then found in a cache. */
void linear_run_items(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct linear *p = arg;
    ptrdiff_t panels = linear_panels(p), chunks = num_chunks(p);
    const ptrdiff_t codes = p->codes ? GROUP_PANELS * BLOCK_K * PANEL : 0, parts = p->gate ? 2 * ROW_CHUNK * GROUP_PANELS * PANEL : 0;
    float *scratch = codes + parts ? thread_scratch((codes + parts) * sizeof(float)) : NULL;
    const ptrdiff_t together = chunks == 1 && !p->gate ? last - first : 1;
    for (ptrdiff_t item = first; item < last; item += together) {
        ptrdiff_t row = item % chunks * ROW_CHUNK, start = item / chunks * p->piece_panels;
        struct share share = {start, smaller(start + together * p->piece_panels, panels), row, smaller(row + ROW_CHUNK, p->rows)};
        if (p->gate)
            run_gated(p, share, scratch, scratch + codes);
        else
            run_share(p, &share, scratch);
    }
}

/* One panel of one chunk of rows is the smallest item. */
ptrdiff_t linear_grid(const struct linear *p) { return linear_panels(p) * num_chunks(p); }

/* Few pieces would leave threads idle at the end, tiny ones cost more to claim than to compute. */
ptrdiff_t linear_piece(ptrdiff_t all_items) {
    return smaller(larger(all_items / (8 * (ptrdiff_t)team_size()), 1), GROUP_PANELS);
}

ptrdiff_t linear_num_items(const struct linear *p) {
    return num_chunks(p) * ((linear_panels(p) + p->piece_panels - 1) / p->piece_panels);
}

ptrdiff_t linear_item_grain(const struct linear *p) {
    ptrdiff_t tiles = (smaller(p->rows, ROW_CHUNK) + PIECE_ROWS - 1) / PIECE_ROWS;
    ptrdiff_t grain = team_grain(PIECE_WORK, tiles * p->in_features * p->piece_panels * PANEL);
    if (is_few(p->rows)) return larger(grain, FEW_PANELS / p->piece_panels);
    if (!p->codes || !is_in_registers(p, p->rows)) return grain;
    return larger(grain, smaller(GROUP_PANELS, linear_panels(p) / team_size()) / p->piece_panels);
}

static void run(struct linear p, int gate) {
    linear_set_gate(&p, gate);
    p.piece_panels = linear_piece(linear_grid(&p));
    ptrdiff_t items = linear_num_items(&p);
    team_run(linear_run_items, &p, items, team_even_grain(items, linear_item_grain(&p)));
}

/* y [rows][out_features], or with a gate half as many. */
void twofold_linear_dense(const float *x, ptrdiff_t x_stride, ptrdiff_t rows, ptrdiff_t in_features, ptrdiff_t out_features,
                          const float *weight, const float *bias, float *y, ptrdiff_t y_stride, int gate) {
    run((struct linear){.x = x, .x_stride = x_stride, .rows = rows, .in_features = in_features, .out_features = out_features,
                        .bias = bias, .y = y, .y_stride = y_stride, .weight = weight},
        gate);
}

void twofold_linear_low_bit(const float *x, ptrdiff_t x_stride, ptrdiff_t rows, ptrdiff_t in_features, ptrdiff_t out_features,
                            const int32_t *codes, const void *scales, const uint8_t *zeros, const void *offsets,
                            int scale_type, ptrdiff_t words, ptrdiff_t groups, ptrdiff_t group_size, int bits,
                            const float *bias, float *y, ptrdiff_t y_stride, int gate) {
    run((struct linear){.x = x, .x_stride = x_stride, .rows = rows, .in_features = in_features, .out_features = out_features,
                        .bias = bias, .y = y, .y_stride = y_stride, .codes = codes, .scales = scales, .zeros = zeros,
                        .offsets = offsets, .scale_type = scale_type, .words = words, .groups = groups, .group_size = group_size,
                        .bits = bits},
        gate);
}
