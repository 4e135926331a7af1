/* The product of linear_bf16.c for few rows, which is bound by reading and expanding the weights: each step of a panel is
   expanded just before the tiles that multiply it, or loaded as it lies. */
#include "bf16_tiles.h"

#if HAVE_AMX_BF16
/* Steps that are expanded ahead of the tiles (stored just before, they would be waited for), and how far ahead codes are asked for. */
#define LEAD 2
#define RING 4
#define AHEAD_BYTES 4096
/* Multiplications that are worth claiming by themselves, and floats of x: some microseconds. */
#define PIECE_WORK (1 << 21)
#define PIECE_FLOATS (1 << 14)
#define EXPANSION_ROWS 16

/* The same while the panel is expanded, a step ahead of the tiles. */
INLINE void run_fused(const struct bf16_product *p, const int kind, const int coding, const int blocks, ptrdiff_t panel) {
    _Alignas(64) uint8_t ring[RING][2 * A_BYTES];
    struct bf16_groups groups;
    const uint8_t *x = x_block(p, 0), *codes = p->w.codes + panel * p->w.steps * p->w.step_bytes + AHEAD_BYTES;
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
    write_sums(p, blocks, panel, 0, p->rows);
}

/* The same of weights that are loaded as they lie. */
INLINE void run_plain(const struct bf16_product *p, const int blocks, ptrdiff_t panel) {
    const uint8_t *x = x_block(p, 0), *a = p->w.codes + panel * p->w.steps * p->w.step_bytes;
    const ptrdiff_t x_step = p->width * STEP_BYTES, apart = p->w.steps * x_step;
    clear_sums();
    for (ptrdiff_t s = 0; s < p->w.steps; s++) multiply_step(p, blocks, a + s * 2 * A_BYTES, x + s * x_step, apart);
    write_sums(p, blocks, panel, 0, p->rows);
}

INLINE void run_panel(const struct bf16_product *p, const int kind, const int coding, const int blocks, ptrdiff_t panel) {
    if (kind == FLOATS16)
        run_plain(p, blocks, panel);
    else
        run_fused(p, kind, coding, blocks, panel);
}

#define VARIANT(kind, coding) (4 * (kind) + (coding))
#define CASE(kind, coding) \
    case VARIANT(kind, coding): \
        if (p->rows <= AMX_ROWS) \
            run_panel(p, kind, coding, 1, panel); \
        else \
            run_panel(p, kind, coding, 2, panel); \
        break;

static void run_any(const struct bf16_product *p, ptrdiff_t panel) {
    switch (VARIANT(p->w.kind, p->w.coding)) {
        CASE(NIBBLES, BF16_CENTRED) CASE(NIBBLES, BF16_ZERO) CASE(NIBBLES, BF16_OFFSET) CASE(NIBBLES, BF16_E2M1)
        CASE(BYTES, BF16_CENTRED) CASE(BYTES, BF16_ZERO) CASE(BYTES, BF16_OFFSET)
        CASE(FLOATS8, BF16_CENTRED) CASE(FLOATS16, BF16_CENTRED)
    }
}
#undef CASE

/* Items: pieces of panels. */
static void run_items(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct bf16_product *p = arg;
    configure(p->width);
    for (ptrdiff_t panel = first * p->piece_panels; panel < last * p->piece_panels && panel < p->panels; panel++) run_any(p, panel);
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
