/* Words of checkpoints into the canonical stream of codes along K, transposed: int32 [K * bits / 32, N]. */
#include "parallel.h"
#include "simd.h"

#define PIECE_WORK (1 << 16)

struct interleaved {
    const uint32_t *words;
    ptrdiff_t columns;
    uint32_t *out;
};

/* Exchange the high runs of `width` bits of a lane with the low ones of the lane width / 4 further on. */
INLINE void swap_halves(vi *lanes, int width, uint32_t low) {
    vi mask = splat_int((int32_t)low), high = splat_int((int32_t)(low << width));
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        if (i & (width / 4)) continue;
        vi a = lanes[i], b = lanes[i + width / 4];
        lanes[i] = (a & mask) | ((b & mask) << width);
        lanes[i + width / 4] = ((a >> width) & mask) | (b & high);
    }
}

/* Items are runs of eight rows: with the eight codes of their words, squares that are transposed. */
static void interleaved_rows(void *arg, ptrdiff_t first, ptrdiff_t last) {
    static const int column_of[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    const struct interleaved *p = arg;
    for (ptrdiff_t run = first; run < last; run++) {
        const uint32_t *from = p->words + run * 8 * p->columns;
        for (ptrdiff_t c = 0; c < p->columns; c += LANES) {
            ptrdiff_t count = p->columns - c < LANES ? p->columns - c : LANES;
            vi lanes[8] = {{0}};
            for (int row = 0; row < 8; row++) memcpy(&lanes[row], from + row * p->columns + c, 4 * (size_t)count);
            swap_halves(lanes, 16, 0x0000FFFF);
            swap_halves(lanes, 8, 0x00FF00FF);
            swap_halves(lanes, 4, 0x0F0F0F0F);
            uint32_t *out = p->out + (run * p->columns + c) * 8;
            for (int place = 0; place < 8; place++) {
                int32_t values[LANES];
                memcpy(values, &lanes[place], sizeof values);
                for (ptrdiff_t j = 0; j < count; j++) out[j * 8 + column_of[place]] = (uint32_t)values[j];
            }
        }
    }
}

/* AWQ's words [rows][columns], rows a multiple of 8, to [rows / 8][8 * columns]. */
void twofold_interleaved_stream(const uint32_t *words, ptrdiff_t rows, ptrdiff_t columns, uint32_t *out) {
    struct interleaved p = {words, columns, out};
    team_run(interleaved_rows, &p, rows / 8, team_grain(PIECE_WORK, 8 * columns));
}

struct gather {
    const uint32_t *words;
    ptrdiff_t columns, count;
    const int32_t *order;
    int bits;
    uint32_t *out;
};

/* Items are rows of words of the result; order[k] is where its code k lies in the source. */
static void gather_rows(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct gather *p = arg;
    const int per_word = 32 / p->bits;
    const uint32_t mask = (1u << p->bits) - 1;
    for (ptrdiff_t row = first; row < last; row++) {
        uint32_t *out = p->out + row * p->columns;
        memset(out, 0, sizeof *out * (size_t)p->columns);
        for (int place = 0; place < per_word && row * per_word + place < p->count; place++) {
            int32_t code = p->order[row * per_word + place];
            const uint32_t *from = p->words + code / per_word * p->columns;
            const int right = code % per_word * p->bits, left = place * p->bits;
            for (ptrdiff_t n = 0; n < p->columns; n++) out[n] |= (from[n] >> right & mask) << left;
        }
    }
}

/* The codes of a stream [..][columns] in another order, `bits` being 2, 4 or 8: [ceil(count * bits / 32)][columns]. */
void twofold_gather_codes(const uint32_t *words, ptrdiff_t columns, const int32_t *order, ptrdiff_t count, int bits, uint32_t *out) {
    struct gather p = {words, columns, count, order, bits, out};
    ptrdiff_t rows = (count * bits + 31) / 32;
    team_run(gather_rows, &p, rows, team_grain(PIECE_WORK, columns * (32 / bits)));
}
