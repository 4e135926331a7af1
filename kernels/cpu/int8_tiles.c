/* linear_int8's products in tile registers, for many rows.

   A panel is expanded once for all rows of a piece: each of its vectors' bytes one after the other, so that they stay in the L1
   cache while rows pass, in tiles as well. Each block's sums go through memory to the vectors, which scale them while the tiles
   compute the next block, across the ends of rows too. */
#include "groups.h"
#include "linear_int8.h"

#if HAVE_AMX
/* Fewer rows than these leave so much of a tile register unused that vectors are faster. */
#define MIN_WIDE_ROWS 9
#define MIN_NARROW_ROWS 17
/* Up to so many features a block is one step. */
#define NARROW_BLOCK 64
/* Bytes of a row, of which a panel and AMX_ROWS fit 48 KiB with what else passes through. */
#define SHORT_ROW 640
#define TILE_BYTES (AMX_ROWS * X_TILE)

#define UNROLL_TILE _Pragma("GCC unroll 16") for (int r = 0; r < AMX_ROWS; r++)

/* A panel as bytes and its groups' numbers, [vector][words of bytes or groups][LANES]. */
struct expanded {
    int32_t *codes;
    float *scales, *offsets;
    int32_t *zeros;
    ptrdiff_t words; /* in whole tiles */
    ptrdiff_t panel;
};

static struct expanded carve(const struct product *p, void *scratch) {
    struct expanded e;
    e.words = p->steps * p->tile_words;
    e.codes = scratch;
    e.scales = (float *)(e.codes + e.words * PANEL);
    e.offsets = e.scales + p->w.groups * PANEL;
    e.zeros = (int32_t *)(e.offsets + p->w.groups * PANEL);
    return e;
}

size_t int8_tiles_scratch(const struct product *p) {
    struct expanded e = carve(p, NULL);
    return sizeof(int32_t) * (size_t)((e.words + 3 * p->w.groups) * PANEL);
}

static struct expanded expand_panel(const struct product *p, ptrdiff_t panel, void *scratch) {
    const struct linear *w = &p->w;
    struct expanded e = carve(p, scratch);
    e.panel = panel;
    expand(w, w->codes + panel * w->words * PANEL, p->coding == CENTRED ? 1 << (w->bits - 1) : 0, e.codes, LANES, e.words * LANES);
    for (ptrdiff_t g = 0; g < w->groups; g++) UNROLL_VECS {
        ptrdiff_t from = (panel * w->groups + g) * PANEL + v * LANES, to = (v * w->groups + g) * LANES;
        store(e.scales + to, load_floats(w->scales, w->scale_type, from));
        if (p->coding == OFFSET) store(e.offsets + to, load_floats(w->offsets, w->scale_type, from));
        if (p->coding == ZERO) {
            vi zero = load_zeros(w->zeros + from);
            memcpy(e.zeros + to, &zero, sizeof zero);
        }
    }
    amx_settle(e.codes);
    return e;
}

/* y's part of up to AMX_ROWS rows and one vector of a panel from its totals. */
INLINE void write_column(const struct linear *w, ptrdiff_t row, ptrdiff_t last, ptrdiff_t panel, const int v, const vf *total) {
    ptrdiff_t first = panel * PANEL + v * LANES, width = w->out_features - first;
    float *y = w->y + row * w->y_stride + first;
    if (width <= 0) return;
    const __mmask16 lanes = width < LANES ? (__mmask16)((1 << width) - 1) : (__mmask16)-1;
    const vf bias = w->bias ? (vf)_mm512_maskz_loadu_ps(lanes, w->bias + first) : splat(0.0f);
    UNROLL_TILE if (r < last - row)
        _mm512_mask_storeu_ps(y + r * w->y_stride, lanes, (__m512)(w->bias ? total[r] + bias : total[r]));
}

/* Ask for a line that write_column will write: y's rows lie far apart, often in no cache, and many at once hold up the tiles. */
INLINE void expect_row(const struct linear *w, ptrdiff_t row, ptrdiff_t last, ptrdiff_t panel, const int v) {
    if (row < last) __builtin_prefetch(w->y + row * w->y_stride + panel * PANEL + v * LANES, 1);
}

/* Step `step` of a row of tiles of x. */
INLINE const int8_t *x_tile(const struct product *p, const int8_t *x, ptrdiff_t step) {
    const int halves = p->tile_words == 8;
    return x + (step >> halves) * TILE_BYTES + (step & halves) * (X_TILE / 2);
}

/* Where the tiles are: at one of the blocks of a spot, each a step, those of the first plane before those of the second. */
struct feed {
    const int8_t *x;
    const int32_t *word;
    ptrdiff_t left, near, far; /* blocks of the row; bytes to the next of x, and from there to the one behind it */
    const int32_t *extra;      /* those of the second plane that follow */
    ptrdiff_t num_extra;
    const int8_t *first_x;
    const int32_t *first_word;
    ptrdiff_t index; /* of the spot */
};

/* A vector of a panel and AMX_ROWS rows. */
struct spot {
    ptrdiff_t row;
    int v;
};

/* Where the panel and a set of rows fit the L1 cache all vectors of the panel follow for the same rows, and write their parts of y
   side by side; else a vector stays for all rows. */
static struct spot spot_at(const struct product *p, ptrdiff_t first, ptrdiff_t sets, ptrdiff_t index) {
    if (p->x.stride <= SHORT_ROW) return (struct spot){first + index / PANEL_VECS * AMX_ROWS, (int)(index % PANEL_VECS)};
    return (struct spot){first + index % sets * AMX_ROWS, (int)(index / sets)};
}

static struct feed feed_at(const struct product *p, const struct expanded *e, ptrdiff_t first, ptrdiff_t sets, ptrdiff_t index) {
    const struct spot at = spot_at(p, first, sets, index);
    const ptrdiff_t near = p->tile_words == 8 ? X_TILE / 2 : TILE_BYTES;
    const int8_t *x = p->x.codes + at.row * p->x.planes * p->x.stride;
    const int32_t *word = e->codes + at.v * e->words * LANES, *extra = extra_blocks(p, at.row);
    return (struct feed){x, word, p->x.blocks, near, p->tile_words == 8 ? TILE_BYTES - near : near, extra + 1, extra[0], x, word, index};
}

/* Where the feed's spot ends it goes on to the next. Behind the very last block come some in vain. */
INLINE void next_spot(const struct product *p, const struct expanded *e, ptrdiff_t first, ptrdiff_t sets, ptrdiff_t spots, const int two,
                      struct feed *f) {
    if (f->left + (two ? f->num_extra : 0) == 0) *f = feed_at(p, e, first, sets, smaller(f->index + 1, spots - 1));
}

/* The sums of the feed's block, over AMX_ROWS rows and one vector of weights, in tile 0. */
INLINE void multiply_block(const struct product *p, struct feed *f, const int coding, const int two, ptrdiff_t words) {
    if (two && f->left <= 0) {
        const ptrdiff_t step = *f->extra++;
        f->x = x_tile(p, f->first_x, step + p->x.stride / (4 * p->tile_words));
        f->word = f->first_word + step * words;
    }
    _tile_loadd(2, f->x, X_TILE);
    _tile_loadd(3, f->word, VEC_BYTES);
    _tile_zero(0);
    AMX_DOT(0, 2, 3, coding == CENTRED);
    const ptrdiff_t near = f->near;
    f->x += near, f->word += words, f->near = f->far, f->far = near;
    f->left--;
}

/* A panel and rows first..last-1; `two` planes. Tiles are two blocks ahead: a store right behind the product would wait for it. */
INLINE void run_narrow(const struct product *p, const int coding, const int two, const struct expanded *e, ptrdiff_t first, ptrdiff_t last) {
    const ptrdiff_t blocks = p->x.blocks, per_group = p->blocks_per_group, words = p->tile_words * LANES;
    const ptrdiff_t sets = (last - first + AMX_ROWS - 1) / AMX_ROWS, spots = sets * PANEL_VECS;
    _Alignas(64) int32_t sums[2][AMX_ROWS][LANES];
    int32_t(*now)[LANES] = sums[0], (*next)[LANES] = sums[1];
    struct feed feed = feed_at(p, e, first, sets, 0);
    multiply_block(p, &feed, coding, two, words);
    _tile_stored(0, now, VEC_BYTES);
    next_spot(p, e, first, sets, spots, two, &feed);
    multiply_block(p, &feed, coding, two, words);
    for (ptrdiff_t index = 0; index < spots; index++) {
        const struct spot at = spot_at(p, first, sets, index);
        const ptrdiff_t place = at.v * p->w.groups * LANES, x_place = int8_rows_place(&p->x, at.row);
        const int32_t *extra = two ? extra_blocks(p, at.row) : NULL;
        const ptrdiff_t all = two ? blocks + extra[0] : blocks;
        vf total[AMX_ROWS];
        UNROLL_TILE total[r] = splat(0.0f);
        const float *x_scales = p->x.scales + x_place, *scales = e->scales + place, *offsets = e->offsets + place;
        const int32_t *x_sums = p->x.sums + x_place, *zeros = e->zeros + place;
        for (ptrdiff_t b = 0, left = per_group; b < all; b++, x_scales += X_ROWS) {
            _tile_stored(0, next, VEC_BYTES);
            next_spot(p, e, first, sets, spots, two, &feed);
            multiply_block(p, &feed, coding, two, words);
            if (b < AMX_ROWS) expect_row(&p->w, at.row + b, last, e->panel, at.v);
            if (two && b >= blocks) {
                const ptrdiff_t block = extra[1 + b - blocks], group = place + block / per_group * LANES;
                const ptrdiff_t x_group = x_place + (blocks + block) * X_ROWS;
                x_scales = p->x.scales + x_group, x_sums = p->x.sums + x_group;
                scales = e->scales + group, offsets = e->offsets + group, zeros = e->zeros + group;
                left = 0;
            }
            const vf scale = load(scales), offset = coding == OFFSET ? load(offsets) : splat(0.0f);
            const vi zero = coding == ZERO ? load_int(zeros) : splat_int(0);
            UNROLL_TILE total[r] = add_block(total[r], load_int(now[r]), coding, scale, zero, offset, x_scales[r],
                                             coding == CENTRED ? 0 : x_sums[r]);
            int32_t(*old)[LANES] = now;
            now = next, next = old;
            if (coding != CENTRED) x_sums += X_ROWS;
            if (--left) continue;
            left = per_group, scales += LANES;
            if (coding == OFFSET) offsets += LANES;
            if (coding == ZERO) zeros += LANES;
        }
        write_column(&p->w, at.row, last, e->panel, at.v, total);
    }
}

/* The sums of a long block, over AMX_ROWS rows and a panel, in tiles 0 and 1. */
INLINE void multiply_wide(const struct product *p, const int coding, const struct expanded *e, ptrdiff_t row, ptrdiff_t block) {
    const int8_t *x = p->x.codes + row * p->x.stride;
    const ptrdiff_t words = p->tile_words * LANES, beside = e->words * LANES, stop = smaller((block + 1) * p->block_steps, p->steps);
    _tile_zero(0);
    _tile_zero(1);
    for (ptrdiff_t step = block * p->block_steps; step < stop; step++) {
        const int32_t *word = e->codes + step * words;
        _tile_loadd(2, x_tile(p, x, step), X_TILE);
        _tile_loadd(3, word, VEC_BYTES);
        AMX_DOT(0, 2, 3, coding == CENTRED);
        _tile_loadd(3, word + beside, VEC_BYTES);
        AMX_DOT(1, 2, 3, coding == CENTRED);
    }
}

/* A panel and rows first..last-1, for long blocks. A block's sums are stored and scaled while tiles compute the next, as above. */
INLINE void run_wide(const struct product *p, const int coding, const struct expanded *e, ptrdiff_t first, ptrdiff_t last) {
    _Alignas(64) int32_t sums[PANEL_VECS][AMX_ROWS][LANES];
    vf total[PANEL_VECS][AMX_ROWS];
    multiply_wide(p, coding, e, first, 0);
    for (ptrdiff_t row = first; row < last; row += AMX_ROWS) {
        UNROLL_VECS for (int r = 0; r < AMX_ROWS; r++) expect_row(&p->w, row + r, last, e->panel, v);
        memset(total, 0, sizeof total);
        for (ptrdiff_t b = 0; b < p->x.blocks; b++) {
            _tile_stored(0, sums[0], VEC_BYTES);
            _tile_stored(1, sums[1], VEC_BYTES);
            if (b + 1 < p->x.blocks)
                multiply_wide(p, coding, e, row, b + 1);
            else if (row + AMX_ROWS < last)
                multiply_wide(p, coding, e, row + AMX_ROWS, 0);
            const ptrdiff_t place = int8_rows_place(&p->x, row) + b * X_ROWS;
            const float *x_scales = p->x.scales + place;
            const int32_t *x_sums = p->x.sums + place;
            UNROLL_VECS {
                const ptrdiff_t group = (v * p->w.groups + b / p->blocks_per_group) * LANES;
                const vf scale = load(e->scales + group), offset = coding == OFFSET ? load(e->offsets + group) : splat(0.0f);
                const vi zero = coding == ZERO ? load_int(e->zeros + group) : splat_int(0);
                UNROLL_TILE total[v][r] = add_block(total[v][r], load_int(sums[v][r]), coding, scale, zero, offset, x_scales[r],
                                                    coding == CENTRED ? 0 : x_sums[r]);
            }
        }
        UNROLL_VECS write_column(&p->w, row, last, e->panel, v, total[v]);
    }
}

INLINE void run_panel(const struct product *p, const int coding, const struct expanded *e, ptrdiff_t first, ptrdiff_t last) {
    if (p->x.planes == 2)
        run_narrow(p, coding, 1, e, first, last);
    else if (p->tiles == WIDE)
        run_wide(p, coding, e, first, last);
    else
        run_narrow(p, coding, 0, e, first, last);
}

void int8_tiles_run(const struct product *p, ptrdiff_t panel, ptrdiff_t first, ptrdiff_t last, void *scratch) {
    struct expanded e = expand_panel(p, panel, scratch);
    switch (p->coding) {
        case CENTRED: run_panel(p, CENTRED, &e, first, last); break;
        case ZERO: run_panel(p, ZERO, &e, first, last); break;
        case OFFSET: run_panel(p, OFFSET, &e, first, last); break;
    }
}
#endif

/* Tiles take whole steps of 64 or 32 features. */
void int8_tiles_plan(struct product *p) {
    p->tiles = NONE;
#if HAVE_AMX
    const int one = p->x.blocks == 1;
    ptrdiff_t block = one ? p->x.stride : p->x.block;
    enum tiles tiles = one || block > NARROW_BLOCK ? WIDE : NARROW;
    if (p->w.rows < (tiles == WIDE ? MIN_WIDE_ROWS : MIN_NARROW_ROWS) || block % 32 || !amx_allowed()) return;
    p->tiles = tiles;
    p->tile_words = block % 64 ? 8 : 16;
    p->block_steps = block / (4 * p->tile_words);
    p->steps = (p->w.words * 8 / p->w.bits + p->tile_words - 1) / p->tile_words;
    p->x.tiled = 1;
#endif
}
