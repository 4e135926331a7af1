/* Rows of a packed embedding, decoded as they are looked up. */
#include "half.h"
#include "parallel.h"

/* Elements that are worth claiming by themselves, some microseconds. */
#define PIECE_ELEMENTS (1 << 12)

/* The sizes, in the order of embedding.py; what stands beside a scale: nothing, a zero, an offset. */
enum { COLUMNS, WORDS, BITS, GROUPS, GROUP_SIZE, SCALE_TYPE, CODING };
enum { CENTRED, ZEROS, OFFSETS };

struct embed {
    const int64_t *ids;
    const ptrdiff_t *sizes;
    const uint32_t *words;
    const void *scales, *zeros;
    float *out;
};

/* Codes are a stream of bits along a row, so one may lie in two words. */
static uint32_t code_at(const uint32_t *words, ptrdiff_t bits, ptrdiff_t k) {
    ptrdiff_t bit = k * bits, shift = bit % 32;
    uint64_t word = words[bit / 32];
    if (shift + bits > 32) word |= (uint64_t)words[bit / 32 + 1] << 32;
    return (uint32_t)(word >> shift) & ((1u << bits) - 1);
}

static void embed_rows(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct embed *p = arg;
    const ptrdiff_t *s = p->sizes;
    const enum float_type type = (enum float_type)s[SCALE_TYPE];
    for (ptrdiff_t r = first; r < last; r++) {
        const uint32_t *words = p->words + p->ids[r] * s[WORDS];
        float *out = p->out + r * s[COLUMNS];
        for (ptrdiff_t k = 0; k < s[COLUMNS];) {
            ptrdiff_t group = k / s[GROUP_SIZE], place = p->ids[r] * s[GROUPS] + group, end = (group + 1) * s[GROUP_SIZE];
            float scale = float_at(p->scales, type, place), zero = (float)(1 << (s[BITS] - 1));
            if (s[CODING] == ZEROS) zero = ((const uint8_t *)p->zeros)[place];
            if (s[CODING] == OFFSETS) zero = float_at(p->zeros, type, place);
            for (end = end < s[COLUMNS] ? end : s[COLUMNS]; k < end; k++) {
                float code = (float)code_at(words, s[BITS], k);
                out[k] = s[CODING] == OFFSETS ? code * scale + zero : (code - zero) * scale;
            }
        }
    }
}

/* out [rows][COLUMNS]: rows `ids` of a matrix of `words` [..][WORDS], `scales` and `zeros` [..][GROUPS]; zeros are uint8, offsets of
   the scales' type, or NULL. */
void twofold_embed(const int64_t *ids, ptrdiff_t rows, const ptrdiff_t *sizes, const uint32_t *words, const void *scales,
                   const void *zeros, float *out) {
    struct embed p = {ids, sizes, words, scales, zeros, out};
    team_run(embed_rows, &p, rows, team_grain(PIECE_ELEMENTS, sizes[COLUMNS]));
}
