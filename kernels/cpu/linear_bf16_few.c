/* The product of linear_bf16.c for few rows, which is bound by reading and expanding the weights: each step of a panel is expanded
   just before the tiles that multiply it, or loaded as it lies. */
#include "bf16_tiles.h"

#if HAVE_AMX_BF16
/* Steps that are expanded ahead of the tiles (stored just before, they would be waited for), and how far ahead weights are asked
   for, beyond a panel's end as well: the processor alone asks for too few of them. */
#define LEAD 2
#define RING 4
#define AHEAD_BYTES 8192
/* Steps of dense weights whose x stays in the L1 cache for both halves of a panel. */
#define PART_STEPS 6
/* Multiplications that are worth claiming by themselves, and floats of x: some microseconds. */
#define PIECE_WORK (1 << 21)
#define PIECE_FLOATS (1 << 14)
#define EXPANSION_ROWS 16

/* Weights of a group are few numbers times its scale, and of those 1, 3, 5 and 7 alone are multiplied and rounded: the rest differ
   from them by a power of two and a sign, which are added to the bits of a bfloat16. */
#define NUM_ODD 4
/* Twice the bits of 2^-100, and how far above it 2^100 is: from there no power leads to infinity or to a denormal number. */
#define LOWEST_SCALE (2 * (127 - 100) << 7)
#define SCALE_RANGE (2 * 200 << 7)

struct code_words {
    __m512i place[NUM_ODD]; /* of a pair of features in odd_multiples: for each code the word that has its odd factor */
    __m512i more;           /* for each code what is added to that word */
    __mmask32 counts;       /* codes that are not 0 */
};

/* A panel's steps one after the other; a group is brought as its first step comes. */
struct expansion {
    const struct bf16_weights *w;
    struct code_words words;
    __m512i odd[NUM_ODD];  /* the group's multiples, 8 features each */
    __m512i table[LANES];  /* sixteen weights of feature 16 + i, then of i; kept if groups are longer than a step */
    _Alignas(64) float scale[PANEL];
    struct bf16_groups groups; /* of steps that are expanded as bf16_expand does it */
    const uint8_t *codes;      /* of the next step; */
    ptrdiff_t panel, step;
    ptrdiff_t group_steps, left, group, place; /* steps of a group, those left of this one, and where its scales lie */
    int usable;
};

/* Doubled values of the codes, in which every number is whole. */
static void find_words(const struct bf16_weights *w, struct code_words *m) {
    static const int8_t e2m1[] = {0, 1, 2, 3, 4, 6, 8, 12};
    uint16_t place[2 * LANES], more[2 * LANES];
    m->counts = 0;
    for (int code = 0; code < LANES; code++) {
        const int twice = w->coding == BF16_E2M1 ? (code & 8 ? -e2m1[code & 7] : e2m1[code]) : 2 * (code - (int)w->centre);
        int odd = twice < 0 ? -twice : twice, power = -1;
        for (; odd && odd % 2 == 0; odd /= 2) power++;
        place[code] = (uint16_t)(LANES + odd / 2), place[LANES + code] = (uint16_t)(odd / 2);
        more[code] = more[LANES + code] = (uint16_t)(odd ? (twice < 0 ? 0x8000 : 0) + power * 0x80 : 0);
        if (odd) m->counts |= 0x10001u << code;
    }
    for (int i = 0; i < NUM_ODD; i++)
        m->place[i] = _mm512_add_epi16(_mm512_loadu_si512(place), _mm512_set1_epi16((short)(4 * i)));
    m->more = _mm512_loadu_si512(more);
}

/* Whether the next step is the first of its group. */
INLINE int enter_group(struct expansion *e) {
    if (e->left-- > 0) return 0;
    e->left = e->group_steps - 1;
    if (e->group + 1 < e->w->groups) e->group++, e->place += PANEL;
    return 1;
}

INLINE const uint8_t *next_codes(struct expansion *e) {
    const uint8_t *codes = e->codes;
    e->codes += e->w->step_bytes;
    e->step++;
    return codes;
}

/* Word 8 l + 4 h + j of odd[r]: number j of feature 8 l + 2 r + h. */
INLINE void load_multiples(struct expansion *e) {
    const struct bf16_weights *w = e->w;
    const vf low = load_floats(w->scales, w->scale_type, e->place), high = load_floats(w->scales, w->scale_type, e->place + LANES);
    __m512i by[NUM_ODD];
#pragma GCC unroll 4
    for (int j = 0; j < NUM_ODD; j++)
        by[j] = (__m512i)_mm512_cvtne2ps_pbh((__m512)(high * splat((float)(2 * j + 1))), (__m512)(low * splat((float)(2 * j + 1))));
    const __m512i size = _mm512_sub_epi16(_mm512_add_epi16(by[0], by[0]), _mm512_set1_epi16((short)LOWEST_SCALE));
    e->usable = !_mm512_cmpgt_epu16_mask(size, _mm512_set1_epi16((short)SCALE_RANGE));
    const __m512i a = _mm512_unpacklo_epi16(by[0], by[1]), b = _mm512_unpackhi_epi16(by[0], by[1]);
    const __m512i c = _mm512_unpacklo_epi16(by[2], by[3]), d = _mm512_unpackhi_epi16(by[2], by[3]);
    e->odd[0] = _mm512_unpacklo_epi32(a, c);
    e->odd[1] = _mm512_unpackhi_epi32(a, c);
    e->odd[2] = _mm512_unpacklo_epi32(b, d);
    e->odd[3] = _mm512_unpackhi_epi32(b, d);
}

/* A step of NIBBLES as bf16_expand does it; `make` tables or use those of the step before, `keep` them for the next. */
INLINE void look_up(struct expansion *e, const int make, const int keep, const uint8_t *codes, uint8_t *out) {
    const __m512i low_bits = _mm512_set1_epi16(15), upper = _mm512_set1_epi16(16);
    const struct code_words words = e->words;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        __m512i table;
        if (make) {
            const __m512i odd = _mm512_maskz_permutexvar_epi16(words.counts, words.place[i / 8 * 2 + i % 2], e->odd[i % 8 / 2]);
            table = _mm512_add_epi16(odd, words.more);
            if (keep) e->table[i] = table;
        } else {
            table = e->table[i];
        }
        const __m512i pair = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(codes + i * STEP_K)));
        const __m512i low = _mm512_ternarylogic_epi64(pair, low_bits, upper, 0xEA); /* pair & low_bits | upper */
        _mm512_store_si512(out + i * STEP_BYTES, _mm512_permutexvar_epi16(low, table));
        _mm512_store_si512(out + (LANES + i) * STEP_BYTES, _mm512_permutexvar_epi16(_mm512_srli_epi16(pair, 4), table));
    }
}

static void expand_any(struct expansion *e, uint8_t *out) { bf16_expand(e->w, e->panel, e->step++, &e->groups, out); }

static void expand_nibbles(struct expansion *e, uint8_t *out) {
    const int make = enter_group(e);
    if (make) load_multiples(e);
    const uint8_t *codes = next_codes(e);
    if (!e->usable)
        bf16_expand(e->w, e->panel, e->step - 1, &e->groups, out);
    else if (e->group_steps == 1)
        look_up(e, 1, 0, codes, out);
    else if (make)
        look_up(e, 1, 1, codes, out);
    else
        look_up(e, 0, 0, codes, out);
}

/* Codes around 0. */
static void expand_bytes(struct expansion *e, uint8_t *out) {
    if (enter_group(e)) {
        const struct bf16_weights *w = e->w;
        store(e->scale, load_floats(w->scales, w->scale_type, e->place));
        store(e->scale + LANES, load_floats(w->scales, w->scale_type, e->place + LANES));
    }
    const int8_t *codes = (const int8_t *)next_codes(e);
#pragma GCC unroll 32
    for (int i = 0; i < PANEL; i++, codes += STEP_K, out += STEP_BYTES) {
        const vf scale = splat(e->scale[i]);
        const vf first = to_float(load_bytes(codes)) * scale, second = to_float(load_bytes(codes + GROUP_K)) * scale;
        _mm512_store_si512(out, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
    }
}

typedef void expand_step(struct expansion *e, uint8_t *out);

/* The shortest way that gives what bf16_expand does. */
static expand_step *way_of(const struct bf16_weights *w) {
    if (w->group_size % STEP_K) return expand_any;
    if (w->kind == NIBBLES && (w->coding == BF16_CENTRED || w->coding == BF16_E2M1)) return expand_nibbles;
    return w->kind == BYTES && w->coding == BF16_CENTRED ? expand_bytes : expand_any;
}

static void begin_panel(struct expansion *e, ptrdiff_t panel) {
    e->codes = e->w->codes + panel * e->w->steps * e->w->step_bytes;
    e->panel = panel;
    e->step = e->left = 0;
    e->group = -1;
    e->place = (panel * e->w->groups - 1) * PANEL;
    bf16_forget(&e->groups);
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

/* Tiles 0 to 3 are sums [16 features][width], 4 weights, 5 x. */
static void configure(ptrdiff_t width) {
    struct amx_config config = amx_whole_tiles();
    for (int tile = 0; tile < 8; tile++)
        if (tile != 4) config.row_bytes[tile] = (uint16_t)(4 * width);
    amx_load(&config);
}

/* y's part of a block of rows and 16 features: sums [16 features][AMX_ROWS], or [16] of one row. */
INLINE void write_block(const struct bf16_product *p, const float *sums, ptrdiff_t row, ptrdiff_t feature) {
    const ptrdiff_t features = p->out_features - feature, rows = smaller(p->rows - row, AMX_ROWS);
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

INLINE void write_blocks(const struct bf16_product *p, const int blocks, float (*sums)[SUM_FLOATS], ptrdiff_t panel, ptrdiff_t row) {
    for (int i = 0; i < 2 * blocks; i++) write_block(p, sums[i], row + i / 2 * AMX_ROWS, panel * PANEL + i % 2 * LANES);
}

INLINE void write_sums(const struct bf16_product *p, const int blocks, ptrdiff_t panel, ptrdiff_t row) {
    _Alignas(64) float sums[4][SUM_FLOATS];
    const ptrdiff_t stride = p->width == 1 ? 4 : VEC_BYTES;
    _tile_stored(0, sums[0], stride);
    _tile_stored(1, sums[1], stride);
    if (blocks == 2) {
        _tile_stored(2, sums[2], stride);
        _tile_stored(3, sums[3], stride);
    }
    amx_settle(sums);
    write_blocks(p, blocks, sums, panel, row);
}

/* Sums of a panel's step, at `a`, and one or two blocks of rows. Few tiles at a time, as in linear_bf16_many.c: one more load, of x
   from the L1 cache, costs less than two more tiles. */
INLINE void multiply_step(const struct bf16_product *p, const int blocks, const uint8_t *a, const uint8_t *x, ptrdiff_t apart) {
    const ptrdiff_t stride = 4 * p->width;
    if (blocks == 1) {
        _tile_loadd(5, x, stride);
        _tile_loadd(4, a, STEP_BYTES);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(4, a + A_BYTES, STEP_BYTES);
        _tile_dpbf16ps(1, 4, 5);
        return;
    }
    _tile_loadd(4, a, STEP_BYTES);
    _tile_loadd(5, x, stride);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(5, x + apart, stride);
    _tile_dpbf16ps(2, 4, 5);
    _tile_loadd(4, a + A_BYTES, STEP_BYTES);
    _tile_dpbf16ps(3, 4, 5);
    _tile_loadd(5, x, stride);
    _tile_dpbf16ps(1, 4, 5);
}

static const uint8_t *x_block(const struct bf16_product *p, ptrdiff_t row) {
    return p->tiles + row / p->width * p->w.steps * p->width * STEP_BYTES;
}

static void ask_ahead(const uint8_t *codes, ptrdiff_t bytes) {
    for (ptrdiff_t line = 0; line < bytes; line += 64) __builtin_prefetch(codes + AHEAD_BYTES + line, 0, 2);
}

/* The sums of a panel and rows from `row` on while it is expanded, some steps ahead of the tiles. */
INLINE void run_fused(const struct bf16_product *p, const int blocks, struct expansion *e, expand_step *expand, ptrdiff_t row) {
    _Alignas(64) uint8_t ring[RING][2 * A_BYTES];
    const uint8_t *x = x_block(p, row);
    const ptrdiff_t x_step = p->width * STEP_BYTES, apart = p->w.steps * x_step, steps = p->w.steps, bytes = p->w.step_bytes;
    clear_sums();
    for (ptrdiff_t s = 0; s < LEAD && s < steps; s++) expand(e, ring[s]);
    for (ptrdiff_t s = 0; s < steps; s++) {
        ask_ahead(e->codes, bytes);
        if (s + LEAD < steps) expand(e, ring[(s + LEAD) % RING]);
        amx_settle(ring);
        multiply_step(p, blocks, ring[s % RING], x + s * x_step, apart);
    }
    write_sums(p, blocks, e->panel, row);
}

/* The same of weights that are loaded as they lie. */
INLINE void run_plain(const struct bf16_product *p, ptrdiff_t panel, ptrdiff_t row) {
    const uint8_t *x = x_block(p, row), *a = p->w.codes + panel * p->w.steps * p->w.step_bytes;
    clear_sums();
    for (ptrdiff_t s = 0; s < p->w.steps; s++, a += 2 * A_BYTES, x += p->width * STEP_BYTES) {
        ask_ahead(a, 2 * A_BYTES);
        multiply_step(p, 1, a, x, 0);
    }
    write_sums(p, 1, panel, row);
}

/* Steps first..last-1 of half a panel, at `a`, and two blocks of rows, the first at `x`. */
INLINE void multiply_half(const struct bf16_product *p, const uint8_t *a, const uint8_t *x, ptrdiff_t first, ptrdiff_t last,
                          float (*sums)[SUM_FLOATS]) {
    const uint8_t *below = x + p->w.steps * A_BYTES;
    _tile_zero(0);
    _tile_zero(1);
    if (first) {
        _tile_loadd(0, sums[0], VEC_BYTES);
        _tile_loadd(1, sums[2], VEC_BYTES);
    }
    for (ptrdiff_t s = first; s < last; s++) {
        ask_ahead(a + s * 2 * A_BYTES, A_BYTES);
        _tile_loadd(4, a + s * 2 * A_BYTES, STEP_BYTES);
        _tile_loadd(5, x + s * A_BYTES, STEP_BYTES);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(5, below + s * A_BYTES, STEP_BYTES);
        _tile_dpbf16ps(1, 4, 5);
    }
    _tile_stored(0, sums[0], VEC_BYTES);
    _tile_stored(1, sums[2], VEC_BYTES);
    amx_settle(sums);
}

/* The same of two blocks: half a panel at a time, in parts whose x is still in the L1 cache for the other half. */
static void run_halves(const struct bf16_product *p, ptrdiff_t panel, ptrdiff_t row) {
    _Alignas(64) float sums[4][SUM_FLOATS];
    const uint8_t *x = x_block(p, row), *a = p->w.codes + panel * p->w.steps * p->w.step_bytes;
    for (ptrdiff_t first = 0; first < p->w.steps; first += PART_STEPS) {
        const ptrdiff_t last = smaller(first + PART_STEPS, p->w.steps);
        multiply_half(p, a, x, first, last, sums);
        multiply_half(p, a + A_BYTES, x, first, last, sums + 1);
    }
    write_blocks(p, 2, sums, panel, row);
}

/* A panel and up to two blocks of rows. */
static void run_rows(const struct bf16_product *p, struct expansion *e, expand_step *expand, ptrdiff_t panel, ptrdiff_t row) {
    const int one = p->rows - row <= AMX_ROWS, plain = p->w.kind == FLOATS16;
    if (!plain) begin_panel(e, panel);
    if (plain && one)
        run_plain(p, panel, row);
    else if (plain)
        run_halves(p, panel, row);
    else if (one)
        run_fused(p, 1, e, expand, row);
    else
        run_fused(p, 2, e, expand, row);
}

/* Items: pieces of panels. */
static void run_items(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct bf16_product *p = arg;
    struct expansion e = {.w = &p->w};
    expand_step *const expand = way_of(e.w);
    if (expand == expand_nibbles) find_words(e.w, &e.words);
    e.group_steps = e.w->group_size / STEP_K;
    configure(p->width);
    for (ptrdiff_t panel = first * p->piece_panels; panel < last * p->piece_panels && panel < p->panels; panel++)
        for (ptrdiff_t row = 0; row < p->rows; row += 2 * AMX_ROWS) run_rows(p, &e, expand, panel, row);
    _tile_release();
}

void linear_bf16_few(struct bf16_product *p) {
    p->width = smaller(p->rows, AMX_ROWS);
    p->panels = (p->out_features + PANEL - 1) / PANEL;
    p->piece_panels = linear_piece(p->panels);
    p->pieces = (p->panels + p->piece_panels - 1) / p->piece_panels;
    const ptrdiff_t blocks = (p->rows + p->width - 1) / p->width;
    team_run(round_x, p, blocks * p->w.steps, team_grain(PIECE_FLOATS, p->width * STEP_K));
    const ptrdiff_t grain = team_grain(PIECE_WORK, (p->rows + EXPANSION_ROWS) * p->in_features * p->piece_panels * PANEL);
    team_run(run_items, p, p->pieces, team_even_grain(p->pieces, grain));
}
#endif
