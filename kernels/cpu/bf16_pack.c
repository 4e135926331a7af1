/* linear.c's panels become steps of tiles, panel by panel, in place where both take as many bytes. */
#include <string.h>

#include "linear_bf16.h"
#include "parallel.h"

#define PIECE_BYTES (1 << 16)

#if HAVE_AMX_BF16
struct packing {
    const int32_t *panels; /* [panels][words][PANEL] */
    uint8_t *out;          /* [panels][steps][step_bytes] */
    ptrdiff_t words, steps, step_bytes;
    int bits;
    uint32_t flip;
};

/* A feature's word of a panel; codes beyond K are 0. */
static uint32_t word_at(const struct packing *p, const int32_t *panel, ptrdiff_t word, int feature) {
    return word < p->words ? (uint32_t)panel[word * PANEL + feature] : 0;
}

/* Eight codes from number 8 * `eighth` on, each in a byte. */
static uint64_t spread(const struct packing *p, const int32_t *panel, ptrdiff_t eighth, int feature) {
    if (p->bits == 4 || p->bits == E2M1_BITS) return _pdep_u64(word_at(p, panel, eighth, feature), 0x0F0F0F0F0F0F0F0F);
    uint32_t half = word_at(p, panel, eighth / 2, feature) >> 16 * (eighth & 1);
    return _pdep_u64(half & 0xFFFF, 0x0303030303030303);
}

static void pack_nibbles(const struct packing *p, const int32_t *panel, uint8_t *out) {
    for (ptrdiff_t s = 0; s < p->steps; s++)
        for (int i = 0; i < LANES; i++)
            for (int j = 0; j < STEP_K / 8; j++, out += 8) {
                uint64_t pair = spread(p, panel, s * (STEP_K / 8) + j, i) | spread(p, panel, s * (STEP_K / 8) + j, i + LANES) << 4;
                memcpy(out, &pair, sizeof pair);
            }
}

/* Words of codes or of two floats. */
static void pack_words(const struct packing *p, const int32_t *panel, uint8_t *out) {
    const ptrdiff_t words = p->step_bytes / PANEL / 4;
    for (ptrdiff_t s = 0; s < p->steps; s++)
        for (int i = 0; i < PANEL; i++)
            for (ptrdiff_t j = 0; j < words; j++, out += 4) {
                uint32_t word = word_at(p, panel, s * words + j, i) ^ p->flip;
                memcpy(out, &word, sizeof word);
            }
}

/* e4m3, a line of bytes for each input feature. */
static void pack_lines(const struct packing *p, const int32_t *panel, uint8_t *out) {
    const uint8_t *lines = (const uint8_t *)panel;
    for (ptrdiff_t s = 0; s < p->steps; s++)
        for (int i = 0; i < PANEL; i++)
            for (ptrdiff_t k = s * STEP_K; k < (s + 1) * STEP_K; k++) *out++ = k < 4 * p->words ? lines[k * PANEL + i] : 0;
}

static void pack_panels(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct packing *p = arg;
    const size_t bytes = (size_t)p->words * PANEL * sizeof(int32_t);
    int32_t *copy = thread_scratch(bytes + 1);
    for (ptrdiff_t panel = first; panel < last; panel++) {
        memcpy(copy, p->panels + panel * p->words * PANEL, bytes);
        uint8_t *out = p->out + panel * p->steps * p->step_bytes;
        if (p->bits == E4M3_BITS)
            pack_lines(p, copy, out);
        else if (p->bits == 8 || p->bits == BFLOAT16_BITS)
            pack_words(p, copy, out);
        else
            pack_nibbles(p, copy, out);
    }
}
#endif

/* panels [count][words][PANEL] of `bits` as in linear.h, bfloat16 for floats of 16 bits, to out [count][steps] of a kind of
   linear_bf16.h; codes of 8 bits are xored with `flip`. For processors where twofold_bf16_tiles() says yes. */
void twofold_pack_bf16_steps(const int32_t *panels, ptrdiff_t count, ptrdiff_t words, int bits, uint32_t flip, ptrdiff_t steps,
                             ptrdiff_t step_bytes, uint8_t *out) {
#if HAVE_AMX_BF16
    struct packing job = {panels, out, words, steps, step_bytes, bits, flip};
    team_run(pack_panels, &job, count, team_grain(PIECE_BYTES, steps * step_bytes));
#else
    (void)panels, (void)count, (void)words, (void)bits, (void)flip, (void)steps, (void)step_bytes, (void)out;
#endif
}
