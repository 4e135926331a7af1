/* A few rows of x in 8 bits times panels of integer weights, by vectors.

   Several panels are computed together, block by block: each is a stream of its own, and memory that is read as one stream gives
   two fifths more in several (two threads, 2 MiB pages: 24 GB/s from one stream each, 34 from eight). Totals of all
   panels wait in the L1 cache meanwhile. */
#include "dot.h"
#include "groups.h"
#include "linear_int8.h"

/* How far ahead codes are asked for, in words of their own panel, 1 KiB: the other panels come in between. */
#define PREFETCH_WORDS (256 / PANEL)

#define UNROLL_ROWS _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)

/* Where panels and rows are, and the panels' codes `apart` words: as they are stored, or expanded to one byte each. */
struct tile {
    const int32_t *codes;
    ptrdiff_t apart, panel, row;
    int panels;
};

/* Holds a vector in a register: gcc loads codes again for each of two or three rows, which took those half as long again. */
INLINE void keep(vi *v) {
#if defined(__AVX__)
    __asm__("" : "+v"(*v));
#elif defined(__aarch64__)
    __asm__("" : "+w"(*v));
#else
    (void)v;
#endif
}

/* sum [rows][PANEL] += the codes of a panel's word times x. The codes come in `packed` bits, and are `wide` if some pass 15. */
INLINE void sum_word(const int rows, const int packed, const int wide, const int32_t *word, const int8_t *x, ptrdiff_t apart,
                     vi sum[DOT_ROWS][PANEL_VECS]) {
    vi codes[PANEL_VECS];
    UNROLL_VECS {
        codes[v] = load_int(word + v * LANES);
        if (packed == 8) keep(&codes[v]);
        __builtin_prefetch(word + PREFETCH_WORDS * PANEL + v * LANES);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 8 / packed; j++) {
        vi part[PANEL_VECS];
        UNROLL_VECS part[v] =
            packed == 8 ? codes[v] : (codes[v] >> (packed * j)) & splat_int(((1 << packed) - 1) * 0x01010101);
        UNROLL_ROWS {
            vi value = splat_bytes(x + r * apart + 4 * j);
            UNROLL_VECS sum[r][v] = dot4(sum[r][v], part[v], value, wide);
        }
    }
}

/* The same for a block's words. */
INLINE void sum_block(const int rows, const int packed, const int wide, const int32_t *word, ptrdiff_t words, const int8_t *x,
                      ptrdiff_t apart, vi sum[DOT_ROWS][PANEL_VECS]) {
    const int32_t *const stop = word + words;
    const int features = 32 / packed; /* of a word */
    if (packed == 4) { /* unrolled, bytes took a tenth longer */
#pragma GCC unroll 2
        for (; word < stop; word += PANEL, x += features) sum_word(rows, packed, wide, word, x, apart, sum);
        return;
    }
    for (; word < stop; word += PANEL, x += features) sum_word(rows, packed, wide, word, x, apart, sum);
}

/* PANEL scales or offsets. */
INLINE void load_panel(const void *values, enum float_type type, ptrdiff_t place, vf out[PANEL_VECS]) {
    if (type == FLOATS32) {
        UNROLL_VECS out[v] = load((const float *)values + place + v * LANES);
        return;
    }
    const uint16_t *p = (const uint16_t *)values + place;
    if (type == HALVES16) {
        UNROLL_VECS out[v] = load_halves(p + v * LANES);
        return;
    }
    UNROLL_VECS out[v] = load_bfloats(p + v * LANES);
}

/* total [rows][PANEL] += a block's sums with the weight's scales and zeros at `place`, as add_block does. Here the coding is looked
   at once per block: a case for each would take the compiler three times as long. */
INLINE void add_sums(const struct product *p, const int rows, vi sum[DOT_ROWS][PANEL_VECS], ptrdiff_t place, const float *x_scales,
                     const int32_t *x_sums, vf *total) {
    const struct linear *w = &p->w;
    vf scale[PANEL_VECS];
    load_panel(w->scales, w->scale_type, place, scale);
    if (p->coding == ZERO) {
        UNROLL_VECS {
            vi zero = load_zeros(w->zeros + place + v * LANES);
            UNROLL_ROWS sum[r][v] -= zero * splat_int(x_sums[r]);
        }
    }
    UNROLL_ROWS UNROLL_VECS total[r * PANEL_VECS + v] =
        add_scaled(total[r * PANEL_VECS + v], to_float(sum[r][v]), scale[v] * splat(x_scales[r]));
    if (p->coding == OFFSET) {
        vf offset[PANEL_VECS];
        load_panel(w->offsets, w->scale_type, place, offset);
        UNROLL_ROWS UNROLL_VECS total[r * PANEL_VECS + v] =
            add_scaled(total[r * PANEL_VECS + v], offset[v], splat(x_scales[r] * (float)x_sums[r]));
    }
}

/* A panel's part of y from its totals [rows][PANEL]. */
INLINE void write_rows(const struct linear *w, const int rows, const vf *totals, ptrdiff_t panel, ptrdiff_t row) {
    float *y = w->y + row * w->y_stride + panel * PANEL;
    const float *bias = w->bias ? w->bias + panel * PANEL : NULL;
    ptrdiff_t width = w->out_features - panel * PANEL;
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

/* A tile's panels and up to DOT_ROWS rows over all features. */
INLINE void run_rows(const struct product *p, const int rows, const int packed, const int wide, const struct tile *at) {
    const struct linear *w = &p->w;
    const ptrdiff_t apart = p->x.planes * p->x.stride, set = p->x.capacity, panel_places = w->groups * PANEL;
    const int32_t *extra = extra_blocks(p, at->row);
    const ptrdiff_t step = p->block_words * packed / w->bits * PANEL, end = w->words * packed / w->bits * PANEL;
    static const int32_t zeros[DOT_ROWS];
    vf total[INT8_PANELS][DOT_ROWS * PANEL_VECS];
    for (int c = 0; c < at->panels; c++) UNROLL_ROWS UNROLL_VECS total[c][r * PANEL_VECS + v] = splat(0.0f);
    for (ptrdiff_t i = 0, group = 0, left = p->blocks_per_group; i < p->x.blocks + extra[0]; i++) {
        ptrdiff_t block = i;
        const int8_t *x = p->x.codes + at->row * apart;
        const float *x_scales = p->x.scales + at->row + i * set;
        const int32_t *x_sums = p->x.sums + at->row + i * set;
        if (i >= p->x.blocks) {
            block = extra[1 + i - p->x.blocks];
            x_scales += (p->x.blocks + block - i) * set;
            x_sums += (p->x.blocks + block - i) * set;
            int none = 1;
            UNROLL_ROWS none &= x_scales[r] == 0.0f;
            if (none) continue;
            x += p->x.stride;
            group = block / p->blocks_per_group;
            left = 0;
        }
        x += block * p->x.block;
        const int32_t *start = p->coding == CENTRED ? x_sums : zeros;
        const int32_t *word = at->codes + block * step;
        const ptrdiff_t words = smaller(step, end - block * step);
        ptrdiff_t place = at->panel * panel_places + group * PANEL;
        for (int c = 0; c < at->panels; c++, word += at->apart, place += panel_places) {
            vi sum[DOT_ROWS][PANEL_VECS];
            UNROLL_ROWS UNROLL_VECS sum[r][v] = splat_int(start[r]);
            sum_block(rows, packed, wide, word, words, x, apart, sum);
            add_sums(p, rows, sum, place, x_scales, x_sums, total[c]);
        }
        if (--left == 0) group++, left = p->blocks_per_group;
    }
    for (int c = 0; c < at->panels; c++) write_rows(w, rows, total[c], at->panel + c, at->row);
}

/* What run_rows' codes are: those stored in 2, 4 or 8 bits, or narrow ones expanded to bytes. */
enum form { TWO, FOUR, EIGHT, EXPANDED, NUM_FORMS };

#define CASE(n, form, packed) \
    case n * NUM_FORMS + form: run_rows(p, n, packed, form == EIGHT, at); break;
#define CASES(n) CASE(n, TWO, 2) CASE(n, FOUR, 4) CASE(n, EIGHT, 8)

static void choose_rows(const struct product *p, int rows, enum form form, const struct tile *at) {
    switch (rows * NUM_FORMS + form) {
#if DOT_ROWS >= 8
        CASES(3) CASES(4) CASES(5) CASES(6) CASES(8)
#elif DOT_ROWS >= 3
        CASES(3)
#endif
        CASES(1) CASES(2) CASE(DOT_ROWS, EXPANDED, 8)
    }
}
#undef CASES
#undef CASE

static enum form stored_form(const struct linear *w) { return w->bits == 2 ? TWO : w->bits == 4 ? FOUR : EIGHT; }

void int8_panels_run(const struct product *p, ptrdiff_t panel, int panels, ptrdiff_t first, ptrdiff_t last, int32_t *scratch) {
    const struct linear *w = &p->w;
    const int32_t *const codes = w->codes + panel * w->words * PANEL;
    struct tile at = {codes, w->words * PANEL, panel, first, panels};
    enum form form = stored_form(w);
    if (last - first > 2 * DOT_ROWS && w->bits < 8) {
        expand(w, codes, 0, scratch, PANEL, LANES);
        at.codes = scratch;
        form = EXPANDED;
    }
    for (; last - at.row >= DOT_ROWS; at.row += DOT_ROWS) choose_rows(p, DOT_ROWS, form, &at);
    at.codes = codes;
    int rest = (int)(last - at.row);
    if (rest == 7) { /* each case costs the compiler's time */
        choose_rows(p, 4, stored_form(w), &at);
        at.row += 4;
        rest = 3;
    }
    if (rest) choose_rows(p, rest, stored_form(w), &at);
}
