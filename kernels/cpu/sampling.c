/* Argmax, draws and edits over rows of logits [rows][stride], float32, without sorting the vocabulary.

   reference/sampling.py defines the draw. Weights are integers, floor(2^40 exp(..)), so sums are exact and their order is free.
   A row is read once for the maxima of its sections of 256 columns and, where the whole vocabulary takes part in the sum (no
   top_k, and top_p or nothing), once for their masses. Filters then look at candidates: the columns from a lower bound up, which
   is found in the sections' figures and of which only few are left. */
#include <math.h>

#include "parallel.h"
#include "simd.h"

#define SECTION 256
#define HALF_BITS 20 /* a weight is two numbers of 20 bits: int32 lanes hold the sum of a section of either */
#define ONE 1099511627776.0f
#define RADIX_BITS 11
#define SLACK 0.01f /* of a bound on the exponent, against rounding */

struct draw {
    const float *logits;
    ptrdiff_t rows, stride, columns;
    const float *temperature;
    const int64_t *top_k;
    const float *top_p, *min_p;
    const double *uniform;
    int64_t *tokens;
};

/* One row in work; the arrays lie in the thread's scratch memory. */
struct row {
    const float *x;
    ptrdiff_t columns, sections;
    float maximum, inverse;
    float *maxima;
    int64_t *masses;
    /* Candidates in the order of their columns. */
    ptrdiff_t count;
    float *logit, *share;
    int32_t *column;
    int64_t *weight;
    uint32_t *key;
};

static ptrdiff_t num_sections(ptrdiff_t columns) { return (columns + SECTION - 1) / SECTION; }

/* A section's columns, the last section filled up with minus infinity in `buffer`. */
static const float *section(const struct row *r, ptrdiff_t s, float *buffer) {
    const float *x = r->x + s * SECTION;
    ptrdiff_t size = r->columns - s * SECTION;
    if (size >= SECTION) return x;
    for (ptrdiff_t i = 0; i < SECTION; i++) buffer[i] = i < size ? x[i] : -INFINITY;
    return buffer;
}

/* Fills r->maxima and returns their maximum, NaN where the row holds one. */
static float scan(const struct row *r) {
    float buffer[SECTION];
    vi bad = {0};
    vf best = splat(-INFINITY);
    for (ptrdiff_t s = 0; s < r->sections; s++) {
        const float *x = section(r, s, buffer);
        vf top = splat(-INFINITY), other = top;
        for (ptrdiff_t i = 0; i < SECTION; i += 2 * LANES) {
            vf a = load(x + i), b = load(x + i + LANES);
            bad |= (a != a) | (b != b);
            top = vmax(a, top);
            other = vmax(b, other);
        }
        top = vmax(top, other);
        best = vmax(top, best);
        r->maxima[s] = max_lanes(top);
    }
    for (int i = 0; i < LANES; i++)
        if (bad[i]) return NAN;
    return max_lanes(best);
}

static int64_t first_maximum(const struct row *r) {
    ptrdiff_t s = 0;
    while (r->maxima[s] != r->maximum) s++;
    ptrdiff_t i = s * SECTION;
    while (r->x[i] != r->maximum) i++;
    return i;
}

static vf shares(const struct row *r, const float *x) { return vexp((load(x) - splat(r->maximum)) * splat(r->inverse)); }

/* The two halves of a weight. */
INLINE void halves(vf share, vi *high, vi *low) {
    vf scaled = share * splat(1 << HALF_BITS);
    *high = __builtin_convertvector(scaled, vi);
    *low = __builtin_convertvector((scaled - to_float(*high)) * splat(1 << HALF_BITS), vi);
}

/* Fills r->masses and returns their sum. */
static int64_t weigh_sections(const struct row *r) {
    float buffer[SECTION];
    int64_t total = 0;
    for (ptrdiff_t s = 0; s < r->sections; s++) {
        const float *x = section(r, s, buffer);
        vi highs = {0}, lows = {0};
        for (ptrdiff_t i = 0; i < SECTION; i += LANES) {
            vi high, low;
            halves(shares(r, x + i), &high, &low);
            highs += high;
            lows += low;
        }
        int64_t mass = 0;
        for (int i = 0; i < LANES; i++) mass += ((int64_t)highs[i] << HALF_BITS) + lows[i];
        r->masses[s] = mass;
        total += mass;
    }
    return total;
}

static int64_t target_of(double uniform, int64_t total) {
    int64_t target = (int64_t)(uniform * (double)total);
    return target < total ? target : total - 1;
}

/* Draw from all columns. */
static int64_t draw_unfiltered(const struct row *r, double uniform) {
    float buffer[SECTION];
    int64_t target = target_of(uniform, weigh_sections(r));
    ptrdiff_t s = 0;
    while (target >= r->masses[s]) target -= r->masses[s++];
    const float *x = section(r, s, buffer);
    int64_t last = 0;
    for (ptrdiff_t i = 0; i < SECTION; i += LANES) {
        float lanes[LANES];
        store(lanes, shares(r, x + i));
        for (int j = 0; j < LANES; j++) {
            int64_t weight = (int64_t)(lanes[j] * ONE);
            if (!weight) continue;
            last = s * SECTION + i + j;
            if (target < weight) return last;
            target -= weight;
        }
    }
    return last; /* only where the compiler rounded this exponential unlike the section's */
}

/* Unsigned numbers in the order of the floats; zeros are equal. */
static uint32_t key_of(float x) {
    uint32_t bits;
    x += 0.0f;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The largest key from which up the weights (NULL: one each) sum up to `needed` at least; 0 where all together do not. */
static uint32_t select_key(const uint32_t *keys, const int64_t *weights, ptrdiff_t count, int64_t needed) {
    uint32_t prefix = 0;
    int shift = 32;
    while (shift > 0) {
        int bits = shift < RADIX_BITS ? shift : RADIX_BITS;
        int64_t bins[1 << RADIX_BITS] = {0};
        uint32_t mask = (1u << bits) - 1;
        int above = shift;
        shift -= bits;
        for (ptrdiff_t i = 0; i < count; i++)
            if (above == 32 || keys[i] >> above == prefix) bins[keys[i] >> shift & mask] += weights ? weights[i] : 1;
        uint32_t bin = mask;
        while (bin > 0 && bins[bin] < needed) needed -= bins[bin--];
        prefix = prefix << bits | bin;
    }
    return prefix;
}

/* The columns whose logit is at least `logit` and whose exponent at least `exponent`. */
static void collect(struct row *r, float logit, float exponent) {
    r->count = 0;
    for (ptrdiff_t s = 0; s < r->sections; s++) {
        if (r->maxima[s] < logit || (r->maxima[s] - r->maximum) * r->inverse < exponent) continue;
        ptrdiff_t end = s * SECTION + SECTION < r->columns ? s * SECTION + SECTION : r->columns, count = r->count;
        for (ptrdiff_t i = s * SECTION; i < end; i++) {
            float x = r->x[i];
            r->logit[count] = x;
            r->column[count] = (int32_t)i;
            count += (x >= logit) & ((x - r->maximum) * r->inverse >= exponent);
        }
        r->count = count;
    }
    for (ptrdiff_t i = r->count; i % LANES; i++) r->logit[i] = -INFINITY;
    for (ptrdiff_t i = 0; i < r->count; i += LANES) store(r->share + i, shares(r, r->logit + i));
    for (ptrdiff_t i = 0; i < r->count; i++) {
        r->weight[i] = (int64_t)(r->share[i] * ONE);
        r->key[i] = key_of(r->logit[i]);
    }
}

/* What the sections say about the k-th largest logit: with k sections' maxima from a logit up it is no smaller than that. */
static float bound_of_top_k(struct row *r, int64_t top_k) {
    if (top_k > r->sections) return -INFINITY;
    for (ptrdiff_t s = 0; s < r->sections; s++) r->key[s] = key_of(r->maxima[s]);
    uint32_t key = select_key(r->key, NULL, r->sections, top_k);
    for (ptrdiff_t s = 0; s < r->sections; s++)
        if (r->key[s] == key) return r->maxima[s];
    return -INFINITY;
}

static int64_t needed_of(float top_p, int64_t total) {
    int64_t needed = (int64_t)ceil((double)top_p * (double)total);
    needed = needed < 1 ? 1 : needed;
    return needed < total ? needed : total;
}

/* A lower bound on the exponents of the nucleus: columns lighter than (total - needed) / columns do not outweigh what it leaves. */
static float bound_of_nucleus(const struct row *r, int64_t total, int64_t needed) {
    int64_t lightest = (total - needed) / r->columns;
    return lightest > 0 ? logf((float)lightest / ONE) - SLACK : -INFINITY;
}

static int64_t draw_candidate(const struct row *r, uint32_t cut, float min_p, double uniform) {
    int64_t total = 0;
    for (ptrdiff_t i = 0; i < r->count; i++)
        if (r->key[i] >= cut && r->share[i] >= min_p) total += r->weight[i];
    int64_t target = target_of(uniform, total);
    for (ptrdiff_t i = 0; i < r->count; i++) {
        if (r->key[i] < cut || r->share[i] < min_p) continue;
        if (target < r->weight[i]) return r->column[i];
        target -= r->weight[i];
    }
    return -1;
}

static int64_t draw_filtered(struct row *r, int64_t top_k, float top_p, float min_p, double uniform) {
    int64_t needed = 0;
    float logit = -INFINITY, exponent = -INFINITY;
    uint32_t cut = 0;
    if (top_k) logit = bound_of_top_k(r, top_k);
    if (top_p >= 1.0f) {
        if (min_p > 0.0f) exponent = logf(min_p) - SLACK;
    } else if (!top_k) {
        int64_t total = weigh_sections(r);
        needed = needed_of(top_p, total);
        exponent = bound_of_nucleus(r, total, needed);
    }
    collect(r, logit, exponent);
    if (top_k && r->count > top_k) cut = select_key(r->key, NULL, r->count, top_k);
    if (top_p < 1.0f) {
        if (top_k) {
            int64_t total = 0;
            for (ptrdiff_t i = 0; i < r->count; i++)
                if (r->key[i] >= cut) total += r->weight[i];
            needed = needed_of(top_p, total);
        }
        uint32_t nucleus = select_key(r->key, r->weight, r->count, needed);
        if (nucleus > cut) cut = nucleus;
    }
    return draw_candidate(r, cut, min_p, uniform);
}

static void *take(char **place, size_t bytes) {
    void *start = *place;
    *place += (bytes + 63) & ~(size_t)63;
    return start;
}

/* Arrays for rows of `columns`; `filtered` ones need room for candidates. */
static void make_row(struct row *r, ptrdiff_t columns, int filtered) {
    size_t sections = (size_t)num_sections(columns), most = sections * SECTION;
    size_t bytes = sections * 12 + 128 + (filtered ? most * 24 + 5 * 64 : 0);
    char *place = thread_scratch(bytes);
    r->columns = columns;
    r->sections = (ptrdiff_t)sections;
    r->maxima = take(&place, sections * sizeof(float));
    r->masses = take(&place, sections * sizeof(int64_t));
    if (!filtered) return;
    r->logit = take(&place, most * sizeof(float));
    r->share = take(&place, most * sizeof(float));
    r->column = take(&place, most * sizeof(int32_t));
    r->weight = take(&place, most * sizeof(int64_t));
    r->key = take(&place, most * sizeof(uint32_t));
}

static void draw_rows(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct draw *p = arg;
    struct row r;
    make_row(&r, p->columns, p->temperature != NULL);
    for (; first < last; first++) {
        r.x = p->logits + first * p->stride;
        r.maximum = scan(&r);
        int64_t token = -1;
        if (isfinite(r.maximum)) {
            if (!p->temperature || p->temperature[first] == 0.0f) {
                token = first_maximum(&r);
            } else {
                int64_t top_k = p->top_k[first] < p->columns ? p->top_k[first] : 0;
                float top_p = p->top_p[first], min_p = p->min_p[first];
                r.inverse = 1.0f / p->temperature[first];
                token = top_k || top_p < 1.0f || min_p > 0.0f ? draw_filtered(&r, top_k, top_p, min_p, p->uniform[first])
                                                              : draw_unfiltered(&r, p->uniform[first]);
            }
        }
        p->tokens[first] = token;
    }
}

/* One token per row; -1 where the maximum is not finite. A row of temperature 0, and all rows without temperatures (NULL), take
   the first column of the maximum. */
void twofold_draw_tokens(const float *logits, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t columns, const float *temperature,
                         const int64_t *top_k, const float *top_p, const float *min_p, const double *uniform, int64_t *tokens) {
    struct draw p = {logits, rows, stride, columns, temperature, top_k, top_p, min_p, uniform, tokens};
    team_run(draw_rows, &p, rows, 1);
}

/* logits[row, token] + bias, then the penalties of a token with a count: see reference/sampling.py. */
void twofold_edit_logits(float *logits, ptrdiff_t stride, ptrdiff_t edits, const int64_t *rows, const int64_t *tokens,
                         const int32_t *counts, const float *bias, const float *repetition, const float *presence,
                         const float *frequency) {
    for (ptrdiff_t i = 0; i < edits; i++) {
        ptrdiff_t row = rows[i];
        float *logit = logits + row * stride + tokens[i], value = *logit + bias[i];
        if (counts[i] >= 0) value = value > 0.0f ? value / repetition[row] : value * repetition[row];
        if (counts[i] > 0) value = value - presence[row] - frequency[row] * (float)counts[i];
        *logit = value;
    }
}
