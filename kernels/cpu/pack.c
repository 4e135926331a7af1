/* Weights into panels: rows of a matrix, as a checkpoint stores them, to [N/PANEL][K][PANEL] of 32 bits each.

   Rows come part by part (q, k and v, or a few megabytes of a large matrix), each to its place, so that nothing but the panels
   and what was just read is ever in memory. Every value is what torch's conversion and multiplication give, bit for bit. */
#include "parallel.h"
#include "half.h"
#include "simd.h"

/* What one element of the source is; linear.py has the same numbers. */
enum kind { WORDS, BFLOAT16, FLOAT16, CODES8, CODES4 };

/* Features that are converted at once: the panel's part that they fill stays in the L1 cache. */
#define TILE_K 128
#define PIECE_WORK (1 << 15)

struct packing {
    const void *source;
    int kind;
    ptrdiff_t rows, columns;            /* of the source */
    ptrdiff_t row_stride, column_stride; /* in elements, of CODES4 in bytes along rows; column_stride is 1 but for WORDS */
    uint32_t flip;                      /* WORDS: bits to invert */
    const float *table;                 /* CODES: the value of each code */
    const float *scales;                /* CODES: [ceil(rows/block_rows)][scale_columns] */
    ptrdiff_t block_rows, block_columns, scale_columns;
    ptrdiff_t first_row; /* of the panels, that row 0 of the source becomes */
    uint32_t *panels;
};

/* Columns first..first+count of one row as 32 bits each. */
static void convert(const struct packing *p, ptrdiff_t row, ptrdiff_t first, ptrdiff_t count, uint32_t *out) {
    const ptrdiff_t start = row * p->row_stride + first;
    if (p->kind == WORDS) {
        const uint32_t *from = (const uint32_t *)p->source + row * p->row_stride + first * p->column_stride;
        for (ptrdiff_t k = 0; k < count; k++) out[k] = from[k * p->column_stride] ^ p->flip;
        return;
    }
    if (p->kind == BFLOAT16) {
        const uint16_t *from = (const uint16_t *)p->source + start;
        for (ptrdiff_t k = 0; k < count; k++) out[k] = (uint32_t)from[k] << 16;
        return;
    }
    if (p->kind == FLOAT16) {
        const uint16_t *from = (const uint16_t *)p->source + start;
        for (ptrdiff_t k = 0; k < count; k++) out[k] = half_to_float(from[k]);
        return;
    }
    const uint8_t *codes = (const uint8_t *)p->source + row * p->row_stride;
    const float *scales = p->scales + row / p->block_rows * p->scale_columns;
    for (ptrdiff_t k = 0; k < count;) {
        ptrdiff_t block = (first + k) / p->block_columns, end = (block + 1) * p->block_columns - first;
        const float scale = scales[block];
        for (end = end < count ? end : count; k < end; k++) {
            ptrdiff_t column = first + k;
            int code = p->kind == CODES8 ? codes[column] : codes[column / 2] >> (column % 2 * 4) & 15;
            float value = p->table[code] * scale;
            memcpy(out + k, &value, sizeof value);
        }
    }
}

/* Items are panels; those of a transposed source are read along its columns, which are neighbours in memory. */
static void pack_rows(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct packing *p = arg;
    ptrdiff_t start = p->first_row / PANEL;
    for (ptrdiff_t panel = start + first; panel < start + last; panel++) {
        ptrdiff_t from = panel * PANEL - p->first_row, to = from + PANEL;
        int lane = from < 0 ? (int)-from : 0;
        if (from < 0) from = 0;
        if (to > p->rows) to = p->rows;
        uint32_t *out = p->panels + panel * p->columns * PANEL + lane;
        if (p->kind == WORDS && p->row_stride == 1) {
            const uint32_t *words = (const uint32_t *)p->source + from;
            for (ptrdiff_t k = 0; k < p->columns; k++)
                for (ptrdiff_t row = 0; row < to - from; row++)
                    out[k * PANEL + row] = words[k * p->column_stride + row] ^ p->flip;
            continue;
        }
        for (ptrdiff_t k = 0; k < p->columns; k += TILE_K) {
            ptrdiff_t count = p->columns - k < TILE_K ? p->columns - k : TILE_K;
            for (ptrdiff_t row = from; row < to; row++) {
                uint32_t values[TILE_K];
                convert(p, row, k, count, values);
                uint32_t *place = out + k * PANEL + (row - from);
                for (ptrdiff_t j = 0; j < count; j++) place[j * PANEL] = values[j];
            }
        }
    }
}

void twofold_pack_rows(const void *source, int kind, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t row_stride,
                       ptrdiff_t column_stride, uint32_t flip, const float *table, const float *scales,
                       const ptrdiff_t *block, ptrdiff_t first_row, uint32_t *panels) {
    struct packing p = {source, kind, rows, columns, row_stride, column_stride, flip, table, scales, 1, 1, 1, first_row, panels};
    if (block) {
        p.block_rows = block[0];
        p.block_columns = block[1];
        p.scale_columns = block[2];
    }
    if (rows <= 0) return;
    ptrdiff_t count = (first_row + rows - 1) / PANEL - first_row / PANEL + 1;
    team_run(pack_rows, &p, count, team_grain(PIECE_WORK, columns * PANEL));
}

struct byte_packing {
    const uint8_t *source;
    ptrdiff_t rows, columns, row_stride, column_stride, first_row;
    uint8_t *panels;
};

static void pack_bytes(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct byte_packing *p = arg;
    for (ptrdiff_t row = first; row < last; row++) {
        ptrdiff_t place = p->first_row + row;
        uint8_t *out = p->panels + place / PANEL * p->columns * PANEL + place % PANEL;
        const uint8_t *from = p->source + row * p->row_stride;
        for (ptrdiff_t k = 0; k < p->columns; k++) out[k * PANEL] = from[k * p->column_stride];
    }
}

/* The same for one byte per element: zeros of groups. */
void twofold_pack_bytes(const uint8_t *source, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t row_stride, ptrdiff_t column_stride,
                        ptrdiff_t first_row, uint8_t *panels) {
    struct byte_packing p = {source, rows, columns, row_stride, column_stride, first_row, panels};
    team_run(pack_bytes, &p, rows, team_grain(PIECE_WORK, columns));
}
