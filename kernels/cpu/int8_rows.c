/* Activations to int8 as kernels/reference/activation_quantization.py defines it: scale = amax / 127.5, codes
   round(x / scale) within -128..127, ties to even. A row's codes depend on nothing but the row. */
#include "int8_rows.h"

#include <math.h>

#include "parallel.h"
#include "simd.h"

#define HALF_SPAN 127.5f
#define SMALLEST_AMAX 0x1p-100f
#define PIECE_WORK (1 << 14)
#define MARGIN 64
/* Squares of scales that are so many times the mean get a second plane. */
#define FAR_ABOVE 2.0f
/* The usual number of features that share a scale. */
#define GROUP 32

typedef int8_t bytes16 __attribute__((vector_size(16)));
typedef int8_t bytes __attribute__((vector_size(LANES)));

#if defined(__clang__)
#define SHUFFLE(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define SHUFFLE(v, ...) __builtin_shuffle(v, (bytes16){__VA_ARGS__})
#endif

#if defined(__FMA__) || defined(__ARM_NEON)
#define FUSED_PRODUCTS 1
#else
#define FUSED_PRODUCTS 0
#endif

struct job {
    const struct int8_input *input;
    const struct int8_rows *out;
    ptrdiff_t padded; /* columns of a row's floats, a multiple of LANES */
};

/* The row in the order of the weight's columns, zeros behind it; `buffer` is for a row that does not lie so already. */
static const float *gather(const struct job *job, ptrdiff_t row, float *buffer) {
    const struct int8_input *in = job->input;
    const float *x = in->x + row * in->x_stride;
    if (!in->perm && job->padded == in->columns) return x;
    if (in->perm)
        for (ptrdiff_t k = 0; k < in->columns; k++) buffer[k] = x[in->perm[k]];
    else
        memcpy(buffer, x, in->columns * sizeof *buffer);
    memset(buffer + in->columns, 0, (job->padded - in->columns) * sizeof *buffer);
    return buffer;
}

INLINE float scale_of(const float *x, ptrdiff_t count) {
    vf largest = splat(0.0f);
    for (ptrdiff_t k = 0; k < count; k += LANES) {
        vf value = load(x + k);
        largest = vmax(largest, vmax(value, -value));
    }
    float amax = max_lanes(largest);
    return (amax > SMALLEST_AMAX ? amax : SMALLEST_AMAX) / HALF_SPAN;
}

/* Whether some lane is NaN; all are NaN or 0. */
INLINE int spoiled(vf poison) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)poison, (__m512)poison, _CMP_UNORD_Q) != 0;
#else
    float sum = sum_lanes(poison);
    return sum != sum;
#endif
}

/* Returns the scale, or NaN where a quotient is none: such values have no codes. */
INLINE float round_group(const float *x, ptrdiff_t count, float scale, const int exact, int8_t *codes) {
    const vf divisor = splat(scale), inverse = splat(1.0f / scale);
    vf poison = splat(0.0f);
#pragma GCC unroll 2
    for (ptrdiff_t k = 0; k < count; k += LANES) {
        vf value = load(x + k), quotient = exact ? value / divisor : value * inverse;
        if (!exact) quotient += (value - quotient * divisor) * inverse;
        quotient = vmin(splat(127.0f), vmax(splat(-128.0f), quotient));
        poison += quotient * splat(0.0f);
        const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, in the low bits */
        vi rounded = (vi)(quotient + splat(shift)) - (vi)splat(shift);
        bytes narrow = __builtin_convertvector(rounded, bytes);
        memcpy(codes + k, &narrow, sizeof narrow);
    }
    return spoiled(poison) ? NAN : scale;
}

/* Scales that come from the values leave no quotient above 127.5: there a product with the inverse, corrected by what it left of
   the value in one fused step, is the quotient to its last bit but for one in many millions, which is no tie. */
static float quantize(const struct int8_input *in, const float *x, ptrdiff_t count, int8_t *codes) {
    if (in->scale > 0.0f || !FUSED_PRODUCTS) return round_group(x, count, in->scale > 0.0f ? in->scale : scale_of(x, count), 1, codes);
    if (count == GROUP) return round_group(x, GROUP, scale_of(x, GROUP), 0, codes);
    return round_group(x, count, scale_of(x, count), 0, codes);
}

/* Codes of each word: the first of every byte, then the second... `per_byte` is 8 / bits. */
static void reorder(int8_t *codes, ptrdiff_t count, int per_byte) {
    for (ptrdiff_t k = 0; k < count && per_byte > 1; k += 16) {
        bytes16 v;
        memcpy(&v, codes + k, sizeof v);
        v = per_byte == 2 ? SHUFFLE(v, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)
                          : SHUFFLE(v, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        memcpy(codes + k, &v, sizeof v);
    }
}

static int32_t sum_codes(const int8_t *codes, ptrdiff_t count) {
    int32_t sum = 0;
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    __m256i sums = _mm256_setzero_si256();
    for (; count >= 32; codes += 32, count -= 32)
        sums = _mm256_dpbusd_epi32(sums, _mm256_set1_epi8(1), _mm256_loadu_si256((const __m256i *)codes));
    sum = _mm512_reduce_add_epi32(_mm512_zextsi256_si512(sums));
#endif
    for (ptrdiff_t k = 0; k < count; k++) sum += codes[k];
    return sum;
}

/* A row's codes to their places in the tiles. */
static void place(const struct int8_rows *out, ptrdiff_t row, const int8_t *codes) {
    const ptrdiff_t stride = out->planes * out->stride;
    int8_t *tile = out->codes + row / X_ROWS * X_ROWS * stride + row % X_ROWS * X_TILE;
    for (ptrdiff_t k = 0; k < stride; k += X_TILE, tile += X_ROWS * X_TILE) memcpy(tile, codes + k, X_TILE);
}

/* The second plane of a row, of which the first is made: codes and scales. `rest` may be x. */
static void make_rest(const struct job *job, const float *x, float *rest, int8_t *codes, float *scales) {
    const struct int8_rows *out = job->out;
    const ptrdiff_t set = int8_rows_set(out), group = job->input->group ? job->input->group : job->padded;
    int8_t *more = codes + out->stride;
    float *more_scales = scales + out->blocks * set, mean = 0.0f;
    for (ptrdiff_t b = 0; b < out->blocks; b++) mean += scales[b * set] * scales[b * set] / (float)out->blocks;
    memset(more, 0, out->stride);
    for (ptrdiff_t b = 0; b < out->blocks; b++) more_scales[b * set] = 0.0f;
    for (ptrdiff_t k = 0; k < job->padded; k += group) {
        const ptrdiff_t count = job->padded - k < group ? job->padded - k : group;
        const float scale = scales[k / out->block * set];
        if (!(scale * scale > FAR_ABOVE * mean)) continue;
        for (ptrdiff_t j = k; j < k + count; j++) rest[j] = x[j] - scale * (float)codes[j];
        const float next = quantize(job->input, rest + k, count, more + k);
        for (ptrdiff_t b = k / out->block; b < out->blocks && b * out->block < k + count; b++) more_scales[b * set] = next;
    }
}

static void make_row(const struct job *job, ptrdiff_t row, float *buffer, int8_t *codes) {
    const struct int8_input *in = job->input;
    const struct int8_rows *out = job->out;
    const float *x = gather(job, row, buffer);
    const ptrdiff_t set = int8_rows_set(out);
    float *scales = out->scales + int8_rows_place(out, row);
    int32_t *sums = out->sums + int8_rows_place(out, row);
    ptrdiff_t group = in->group ? in->group : job->padded;
    int8_t *first = codes;
    memset(codes + job->padded, 0, out->stride - job->padded);
    for (ptrdiff_t k = 0; k < job->padded; k += group) {
        ptrdiff_t count = job->padded - k < group ? job->padded - k : group;
        float scale = quantize(in, x + k, count, codes + k);
        for (ptrdiff_t b = k / out->block; b < out->blocks && b * out->block < k + count; b++) scales[b * set] = scale;
    }
    if (out->planes == 2) make_rest(job, x, buffer, codes, scales);
    for (int plane = 0; plane < out->planes && in->factor; plane++, codes += out->stride, sums += out->blocks * set)
        for (ptrdiff_t b = 0; b < out->blocks; b++) {
            ptrdiff_t k = b * out->block, end = b + 1 < out->blocks ? k + out->block : out->stride;
            sums[b * set] = in->factor * sum_codes(codes + k, end - k);
        }
    reorder(first, out->planes * out->stride, 8 / in->bits);
}

static void make_rows(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct job *job = arg;
    const struct int8_rows *out = job->out;
    float *buffer = thread_scratch((job->padded + MARGIN) * sizeof(float) + out->planes * out->stride);
    int8_t *tiled = (int8_t *)(buffer + job->padded + MARGIN);
    for (ptrdiff_t row = first; row < last; row++) {
        int8_t *codes = out->tiled ? tiled : out->codes + row * out->planes * out->stride;
        make_row(job, row, buffer, codes);
        if (out->tiled) place(out, row, codes);
    }
}

void int8_rows_make(const struct int8_input *input, void *buffer, struct int8_rows *out) {
    struct job job = {input, out, (input->columns + LANES - 1) / LANES * LANES};
    out->codes = buffer;
    out->scales = (float *)(out->codes + out->capacity * out->planes * out->stride);
    out->sums = (int32_t *)(out->scales + out->capacity * out->planes * out->blocks);
    /* Tiles compute rows that are not given, too: with numbers that happen to be tiny that would take them very long. */
    for (ptrdiff_t row = input->rows; row < out->capacity; row++)
        for (ptrdiff_t b = 0, at = int8_rows_place(out, row); b < out->planes * out->blocks; b++, at += int8_rows_set(out))
            out->scales[at] = 0.0f, out->sums[at] = 0;
    team_run(make_rows, &job, input->rows, team_grain(PIECE_WORK, input->columns));
}
