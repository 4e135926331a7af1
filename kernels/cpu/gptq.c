/* Loops of GPTQ over the columns of a matrix, and the search for its groups' scales.

   Matrices of weights are [K][N], input features first: the output features of a row are independent of each other and are
   shared out among threads. Every number is what torch's operations give one by one, in the order quant/methods has them: a
   product and a sum are fused exactly where torch fuses them. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif
#include <math.h>

#include "parallel.h"
#include "simd.h"

/* Output features of a piece, and columns of a block at most; gptq.py has the second one too. */
#define PIECE 64
#define COLUMNS 64
/* Groups whose scales one piece searches. */
#define GROUPS 64
/* Vectors of a sum that torch adds side by side. */
#define SIDE_BY_SIDE 4
#define SMALLEST_SCALE 0x1p-24f
#define LARGEST_SCALE 65504.0f

INLINE vf rounded(vf x) {
    for (int i = 0; i < LANES; i++) x[i] = rintf(x[i]);
    return x;
}

/* a * b + c, rounded once where the processor can. */
INLINE vf fused(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE vf clamped(vf x, float top) { return vmin(vmax(x, splat(0.0f)), splat(top)); }

/* The codes of `values` less their zeros. */
INLINE vf levels(vf values, vf scale, vf zero, float top) { return clamped(rounded(values / scale) + zero, top) - zero; }

struct columns {
    float *weights;       /* [K][N]: what is rounded, or in a second pass the values that codes stand for */
    float *gradient;      /* [K][N], of a second pass */
    const float *factors; /* [last - first][last - first]: how a column's error, or its change, reaches the others */
    const float *steps;   /* [K], of a second pass: minus one over the diagonal of the second moments */
    const float *scales, *zeros; /* [G][N] */
    const int64_t *groups;       /* [K]: the group of each column */
    ptrdiff_t rows, first, last;
    float top;
    float *codes;   /* [K][N] */
    float *changed; /* [last - first][N]: errors, or changes */
};

/* Output features of a piece, column by column: rows of a matrix that lie a power of two apart share few lines of a cache. */
struct tile {
    float moving[COLUMNS][PIECE], changed[COLUMNS][PIECE];
};

static void copy_some(float *to, const float *from, ptrdiff_t count) { memcpy(to, from, (size_t)count * sizeof *to); }

/* Columns of the block for output features row..row+count-1; `moves`: a second pass. */
INLINE void columns_of(const struct columns *c, ptrdiff_t row, ptrdiff_t count, int moves) {
    struct tile t;
    float given[4][PIECE] = {{0}}, codes[PIECE];
    float *target = moves ? c->gradient : c->weights;
    const ptrdiff_t columns = c->last - c->first;
    if (count % LANES) memset(&t, 0, sizeof t);
    for (ptrdiff_t k = 0; k < columns; k++) copy_some(t.moving[k], target + (c->first + k) * c->rows + row, count);
    for (ptrdiff_t k = 0; k < columns; k++) {
        const ptrdiff_t column = c->first + k, at = column * c->rows + row, group = c->groups[column] * c->rows + row;
        const float *factors = c->factors + k * columns;
        const vf factor = splat(moves ? c->steps[column] : factors[k]);
        copy_some(given[0], c->scales + group, count);
        copy_some(given[1], c->zeros + group, count);
        if (moves) copy_some(given[2], c->weights + at, count);
        for (ptrdiff_t n = 0; n < count; n += LANES) {
            const vf scale = load(given[0] + n), zero = load(given[1] + n), moving = load(t.moving[k] + n);
            const vf values = moves ? load(given[2] + n) : moving;
            const vf wanted = moves ? fused(moving, factor, values) : values;
            const vf code = clamped(rounded(wanted / scale) + zero, c->top);
            const vf stands_for = (code - zero) * scale;
            store(codes + n, code);
            store(t.changed[k] + n, moves ? stands_for - values : (values - stands_for) / factor);
        }
        copy_some(c->codes + at, codes, count);
        copy_some(c->changed + k * c->rows + row, t.changed[k], count);
        for (ptrdiff_t later = k + 1; later < columns; later++) {
            const vf spread = splat(moves ? factors[later] : -factors[later]);
            for (ptrdiff_t n = 0; n < count; n += LANES)
                store(t.moving[later] + n, fused(spread, load(t.changed[k] + n), load(t.moving[later] + n)));
        }
    }
}

static void round_piece(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct columns *c = arg;
    for (ptrdiff_t row = first * PIECE; row < last * PIECE && row < c->rows; row += PIECE)
        columns_of(c, row, c->rows - row < PIECE ? c->rows - row : PIECE, 0);
}

static void move_piece(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct columns *c = arg;
    for (ptrdiff_t row = first * PIECE; row < last * PIECE && row < c->rows; row += PIECE)
        columns_of(c, row, c->rows - row < PIECE ? c->rows - row : PIECE, 1);
}

/* Columns first..last-1 of `weights` to `codes`; `errors` [last - first][N] in units of their factors. */
void twofold_gptq_round(float *weights, ptrdiff_t rows, const float *factors, ptrdiff_t first, ptrdiff_t last,
                        const float *scales, const float *zeros, const int64_t *groups, float top, float *codes, float *errors) {
    struct columns c = {.weights = weights, .factors = factors, .scales = scales, .zeros = zeros, .groups = groups, .rows = rows,
                        .first = first, .last = last, .top = top, .codes = codes, .changed = errors};
    team_run(round_piece, &c, (rows + PIECE - 1) / PIECE, 1);
}

/* Codes first..last-1 to their best places; `changes` [last - first][N] of the values. */
void twofold_gptq_move(float *values, float *gradient, ptrdiff_t rows, const float *moments, const float *steps,
                       ptrdiff_t first, ptrdiff_t last, const float *scales, const float *zeros, const int64_t *groups, float top,
                       float *codes, float *changes) {
    struct columns c = {.weights = values, .gradient = gradient, .factors = moments, .steps = steps, .scales = scales,
                        .zeros = zeros, .groups = groups, .rows = rows, .first = first, .last = last, .top = top,
                        .codes = codes, .changed = changes};
    team_run(move_piece, &c, (rows + PIECE - 1) / PIECE, 1);
}

struct grids {
    const float *groups; /* [count][size] */
    ptrdiff_t count, size;
    const float *fractions; /* of the range, to be tried in this order; over `top` and as they are, [2][num_fractions] */
    ptrdiff_t num_fractions;
    float top;
    ptrdiff_t fits;
    int positive; /* no negative scales */
    float *scales, *zeros; /* [count] */
};

/* What float16 holds of a scale: not 0, not infinite. */
INLINE float storable(float scale) {
    float x = fabsf(scale);
    x = x > SMALLEST_SCALE ? x : SMALLEST_SCALE;
    x = x < LARGEST_SCALE ? x : LARGEST_SCALE;
    if (x < 0x1p-14f) {
        x = (x + 0.75f) - 0.75f; /* subnormal: multiples of 2^-24, which is one ulp there */
    } else {
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        bits = (bits + 0xfff + (bits >> 13 & 1)) & ~(uint32_t)0x1fff;
        memcpy(&x, &bits, sizeof x);
    }
    return scale < 0.0f ? -x : x;
}

/* The sum of what `each` makes of a group's vectors, added in torch's order. */
#define SUM(expression)                                                                                                        \
    ({                                                                                                                         \
        vf sums[SIDE_BY_SIDE] = {{0}};                                                                                         \
        const ptrdiff_t vectors = size / LANES, whole = vectors / SIDE_BY_SIDE * SIDE_BY_SIDE;                                 \
        for (ptrdiff_t v = 0; v < vectors; v++) {                                                                              \
            const vf x = load(group + v * LANES);                                                                              \
            sums[v < whole ? v % SIDE_BY_SIDE : 0] += (expression);                                                            \
        }                                                                                                                      \
        sums[0] = sums[0] + sums[1] + sums[2] + sums[3];                                                                       \
        float total = 0.0f;                                                                                                    \
        for (int i = 0; i < LANES; i++) total += sums[0][i];                                                                   \
        total;                                                                                                                 \
    })

INLINE float squared_error(const float *group, ptrdiff_t size, float scale, float zero, float top) {
    const vf s = splat(scale), z = splat(zero);
    return SUM(({
        const vf missed = levels(x, s, z, top) * s - x;
        missed * missed;
    }));
}

static void search_piece(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct grids *g = arg;
    const ptrdiff_t size = g->size;
    for (ptrdiff_t i = first; i < last; i++) {
        const float *group = g->groups + i * size;
        float low = 0.0f, high = 0.0f, best = 0.0f, scale = 0.0f, zero = 0.0f;
        for (ptrdiff_t k = 0; k < size; k++) {
            low = group[k] < low ? group[k] : low;
            high = group[k] > high ? group[k] : high;
        }
        for (ptrdiff_t f = 0; f < g->num_fractions; f++) {
            const float tried = storable((high - low) * g->fractions[f]);
            float place = rintf(-low * g->fractions[g->num_fractions + f] / tried);
            place = place > 0.0f ? place : 0.0f;
            place = place < g->top ? place : g->top;
            const float error = squared_error(group, size, tried, place, g->top);
            if (f == 0 || error < best) best = error, scale = tried, zero = place;
        }
        for (ptrdiff_t fit = 0; fit < g->fits; fit++) {
            const vf s = splat(scale), z = splat(zero);
            const float power = SUM(({ const vf l = levels(x, s, z, g->top); l * l; }));
            const float cross = SUM(levels(x, s, z, g->top) * x);
            float fitted = power > 0.0f ? storable(cross / (power > 0x1p-126f ? power : 0x1p-126f)) : scale;
            if (g->positive && !(fitted > 0.0f)) fitted = scale;
            const float error = squared_error(group, size, fitted, zero, g->top);
            if (error < best) best = error, scale = fitted;
        }
        g->scales[i] = scale, g->zeros[i] = zero;
    }
}

/* The asymmetric grid of least squared error for each of `count` groups of `size` weights, a multiple of LANES. */
void twofold_search_grids(const float *groups, ptrdiff_t count, ptrdiff_t size, const float *fractions, ptrdiff_t num_fractions,
                          float top, ptrdiff_t fits, int positive, float *scales, float *zeros) {
    struct grids g = {groups, count, size, fractions, num_fractions, top, fits, positive, scales, zeros};
    team_run(search_piece, &g, count, GROUPS);
}
