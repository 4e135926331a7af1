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

/* Stores that go past the caches: nothing reads panels before all are packed, and no line of them is fetched for this. */
INLINE void stream(uint32_t *out, vi value) {
#if defined(__AVX512F__)
    _mm512_stream_si512((void *)out, (__m512i)value);
#elif defined(__AVX__)
    _mm256_stream_si256((void *)out, (__m256i)value);
#else
    memcpy(out, &value, sizeof value);
#endif
}

static void end_of_stream(void) {
#if defined(__AVX__)
    _mm_sfence();
#endif
}

#if defined(__GNUC__) && !defined(__clang__)
/* LANES x LANES words: squares of 2 x 2 are transposed, then those of 4 x 4 made of them, and so on. */
INLINE void transpose(vi *rows) {
#pragma GCC unroll 8
    for (int d = 1; d < LANES; d *= 2) {
        vi upper, lower;
        for (int j = 0; j < LANES; j++) {
            upper[j] = j & d ? LANES + j - d : j;
            lower[j] = j & d ? LANES + j : j + d;
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & d) continue;
            vi a = rows[i], b = rows[i + d];
            rows[i] = __builtin_shuffle(a, b, upper);
            rows[i + d] = __builtin_shuffle(a, b, lower);
        }
    }
}
#else
static void transpose(vi *rows) {
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < i; j++) {
            int32_t value = rows[i][j];
            rows[i][j] = rows[j][i];
            rows[j][i] = value;
        }
}
#endif

/* `count` columns (a multiple of LANES) of PANEL rows, `stride` words apart, to a panel's [count][PANEL]. */
static void pack_squares(const uint32_t *rows, ptrdiff_t stride, ptrdiff_t count, uint32_t flip, uint32_t *out) {
    for (ptrdiff_t k = 0; k < count; k += LANES)
        for (int half = 0; half < PANEL; half += LANES) {
            vi square[LANES];
            for (int i = 0; i < LANES; i++) square[i] = load_int((const int32_t *)rows + (half + i) * stride + k) ^ splat_int((int32_t)flip);
            transpose(square);
            for (int i = 0; i < LANES; i++) stream(out + (k + i) * PANEL + half, square[i]);
        }
}

/* Rows from..to-1 of the source, whose columns lie side by side, to lanes of one panel. */
static void pack_panel(const struct packing *p, ptrdiff_t from, ptrdiff_t to, uint32_t *out) {
    const int whole = to - from == PANEL;
    ptrdiff_t done = 0;
    if (whole && p->kind == WORDS && p->column_stride == 1) {
        done = p->columns / LANES * LANES;
        pack_squares((const uint32_t *)p->source + from * p->row_stride, p->row_stride, done, p->flip, out);
    }
    for (ptrdiff_t k = done; k < p->columns; k += TILE_K) {
        ptrdiff_t count = p->columns - k < TILE_K ? p->columns - k : TILE_K, squares = whole ? count / LANES * LANES : 0;
        uint32_t values[PANEL][TILE_K];
        for (ptrdiff_t row = from; row < to; row++) convert(p, row, k, count, values[row - from]);
        pack_squares(values[0], TILE_K, squares, 0, out + k * PANEL);
        for (ptrdiff_t row = 0; row < to - from; row++)
            for (ptrdiff_t j = squares; j < count; j++) out[(k + j) * PANEL + row] = values[row][j];
    }
}

/* Panels first..first+count-1 of a source whose rows lie side by side: one column after the other, so that what is read of each
   is long. */
static void pack_columns(const struct packing *p, ptrdiff_t first, ptrdiff_t count) {
    for (ptrdiff_t k = 0; k < p->columns; k++) {
        const uint32_t *column = (const uint32_t *)p->source + k * p->column_stride;
        for (ptrdiff_t panel = first; panel < first + count; panel++) {
            ptrdiff_t row = panel * PANEL - p->first_row;
            uint32_t *out = p->panels + (panel * p->columns + k) * PANEL;
            if (row >= 0 && row + PANEL <= p->rows) {
                for (int half = 0; half < PANEL; half += LANES)
                    stream(out + half, load_int((const int32_t *)column + row + half) ^ splat_int((int32_t)p->flip));
                continue;
            }
            for (int lane = 0; lane < PANEL; lane++)
                if (row + lane >= 0 && row + lane < p->rows) out[lane] = column[row + lane] ^ p->flip;
        }
    }
}

/* Items are panels. */
static void pack_rows(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct packing *p = arg;
    ptrdiff_t start = p->first_row / PANEL;
    if (p->kind == WORDS && p->row_stride == 1) {
        pack_columns(p, start + first, last - first);
        end_of_stream();
        return;
    }
    for (ptrdiff_t panel = start + first; panel < start + last; panel++) {
        ptrdiff_t from = panel * PANEL - p->first_row, to = from + PANEL;
        int lane = from < 0 ? (int)-from : 0;
        if (from < 0) from = 0;
        if (to > p->rows) to = p->rows;
        pack_panel(p, from, to, p->panels + panel * p->columns * PANEL + lane);
    }
    end_of_stream();
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

struct group_packing {
    const void *source;
    ptrdiff_t size, rows, columns, row_stride, column_stride, first_row;
    void *panels;
};

INLINE void pack_group_lanes(const struct group_packing *p, const int size, ptrdiff_t panel, ptrdiff_t from, ptrdiff_t to) {
    const char *source = p->source;
    char *out = (char *)p->panels + panel * p->columns * PANEL * size;
    for (ptrdiff_t k = 0; k < p->columns; k++)
        for (ptrdiff_t row = from; row < to; row++)
            memcpy(out + (k * PANEL + (p->first_row + row) % PANEL) * size,
                   source + (row * p->row_stride + k * p->column_stride) * size, (size_t)size);
}

/* Items are panels. */
static void pack_groups(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct group_packing *p = arg;
    for (ptrdiff_t panel = p->first_row / PANEL + first; panel < p->first_row / PANEL + last; panel++) {
        ptrdiff_t from = panel * PANEL - p->first_row, to = from + PANEL;
        from = from < 0 ? 0 : from;
        to = to > p->rows ? p->rows : to;
        if (p->size == 2)
            pack_group_lanes(p, 2, panel, from, to);
        else
            pack_group_lanes(p, 1, panel, from, to);
    }
}

/* The same for elements of one byte or two that stay as they are: zeros and scales of groups. */
void twofold_pack_groups(const void *source, ptrdiff_t size, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t row_stride,
                         ptrdiff_t column_stride, ptrdiff_t first_row, void *panels) {
    struct group_packing p = {source, size, rows, columns, row_stride, column_stride, first_row, panels};
    if (rows <= 0) return;
    ptrdiff_t count = (first_row + rows - 1) / PANEL - first_row / PANEL + 1;
    team_run(pack_groups, &p, count, team_grain(PIECE_WORK, columns * PANEL));
}
