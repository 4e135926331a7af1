/* Rows of a matrix that lies in panels, for an embedding that is its model's head. A row's words are PANEL words apart, so each
   comes with a cache line of its own: some microseconds a row. */
#include "linear_bf16.h"
#include "parallel.h"
#include "simd.h"

/* Elements that are worth claiming by themselves, some microseconds. */
#define PIECE_ELEMENTS (1 << 11)

/* The sizes, the layouts and what stands beside a scale, in the order of embedding.py. */
enum { COLUMNS, WORDS, BITS, GROUPS, GROUP_SIZE, SCALE_TYPE, CODING, LAYOUT };
enum { CENTRED, ZEROS, OFFSETS };
/* WORDS32 float32; PAIRS two floats of SCALE_TYPE in a word; CODES integers of BITS in a word; IN_..: linear_bf16.h's steps, of
   which WORDS counts the bytes of all of a panel. */
enum { WORDS32, PAIRS, CODES, IN_NIBBLES, IN_BYTES, IN_RAISED_BYTES, IN_STEPS };
/* Output features of a step of nibbles whose codes lie in the low halves of bytes. */
#define STEP_LANES 16

struct embed_panels {
    const int64_t *ids;
    const ptrdiff_t *sizes;
    const void *codes, *scales, *zeros;
    float *out;
};

/* Where the step of column k begins in a panel whose codes take `bits` each. */
INLINE ptrdiff_t step_start(ptrdiff_t k, int bits) { return k / STEP_K * (PANEL * STEP_K * bits / 8); }

INLINE uint32_t code_at(const int layout, const void *panel, ptrdiff_t lane, ptrdiff_t k, ptrdiff_t bits) {
    const uint8_t *bytes = panel;
    ptrdiff_t column = k % STEP_K;
    if (layout == CODES) {
        ptrdiff_t per_word = 32 / bits;
        return ((const uint32_t *)panel)[k / per_word * PANEL + lane] >> k % per_word * bits & ((1u << bits) - 1);
    }
    if (layout == IN_NIBBLES) {
        uint8_t pair = bytes[step_start(k, 4) + lane % STEP_LANES * STEP_K + column];
        return lane < STEP_LANES ? pair & 15 : pair >> 4;
    }
    uint8_t byte = bytes[step_start(k, 8) + lane * STEP_K + column];
    return layout == IN_RAISED_BYTES ? byte ^ 0x80 : byte;
}

INLINE void decode_row(const struct embed_panels *p, const int layout, ptrdiff_t panel, ptrdiff_t lane, float *out) {
    const ptrdiff_t *s = p->sizes;
    const enum float_type type = (enum float_type)s[SCALE_TYPE];
    const ptrdiff_t bytes = layout == CODES ? s[WORDS] * PANEL * 4 : s[WORDS];
    const void *codes = (const char *)p->codes + panel * bytes;
    for (ptrdiff_t k = 0; k < s[COLUMNS];) {
        ptrdiff_t group = k / s[GROUP_SIZE], place = (panel * s[GROUPS] + group) * PANEL + lane, end = (group + 1) * s[GROUP_SIZE];
        float scale = float_at(p->scales, type, place), zero = (float)(1 << (s[BITS] - 1));
        if (s[CODING] == ZEROS) zero = ((const uint8_t *)p->zeros)[place];
        if (s[CODING] == OFFSETS) zero = float_at(p->zeros, type, place);
        for (end = end < s[COLUMNS] ? end : s[COLUMNS]; k < end; k++) {
            float code = (float)code_at(layout, codes, lane, k, s[BITS]);
            out[k] = s[CODING] == OFFSETS ? code * scale + zero : (code - zero) * scale;
        }
    }
}

static void decode_floats(const struct embed_panels *p, ptrdiff_t panel, ptrdiff_t lane, float *out) {
    const ptrdiff_t *s = p->sizes;
    const enum float_type type = (enum float_type)s[SCALE_TYPE];
    if (s[LAYOUT] == WORDS32) {
        const float *words = (const float *)p->codes + panel * s[WORDS] * PANEL + lane;
        for (ptrdiff_t k = 0; k < s[COLUMNS]; k++) out[k] = words[k * PANEL];
    } else if (s[LAYOUT] == PAIRS) {
        const uint16_t *pairs = (const uint16_t *)p->codes + (panel * s[WORDS] * PANEL + lane) * 2;
        for (ptrdiff_t k = 0; k < s[COLUMNS]; k++) out[k] = float_at(pairs, type, k / 2 * PANEL * 2 + k % 2);
    } else {
        const char *steps = (const char *)p->codes + panel * s[WORDS];
        for (ptrdiff_t k = 0; k < s[COLUMNS]; k++)
            out[k] = float_at(steps + step_start(k, 16), type, lane * STEP_K + k % STEP_K);
    }
}

static void embed_rows(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct embed_panels *p = arg;
    for (ptrdiff_t r = first; r < last; r++) {
        ptrdiff_t panel = p->ids[r] / PANEL, lane = p->ids[r] % PANEL;
        float *out = p->out + r * p->sizes[COLUMNS];
        switch (p->sizes[LAYOUT]) {
        case CODES: decode_row(p, CODES, panel, lane, out); break;
        case IN_NIBBLES: decode_row(p, IN_NIBBLES, panel, lane, out); break;
        case IN_BYTES: decode_row(p, IN_BYTES, panel, lane, out); break;
        case IN_RAISED_BYTES: decode_row(p, IN_RAISED_BYTES, panel, lane, out); break;
        default: decode_floats(p, panel, lane, out);
        }
    }
}

/* out [rows][COLUMNS]: rows `ids` of a matrix in panels; scales and zeros [panels][GROUPS][PANEL], zeros as in twofold_embed. */
void twofold_embed_panels(const int64_t *ids, ptrdiff_t rows, const ptrdiff_t *sizes, const void *codes, const void *scales,
                          const void *zeros, float *out) {
    struct embed_panels p = {ids, sizes, codes, scales, zeros, out};
    team_run(embed_rows, &p, rows, team_grain(PIECE_ELEMENTS, sizes[COLUMNS]));
}
