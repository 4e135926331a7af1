/* Activations to int8 as kernels/reference/activation_quantization.py defines it: scale = amax / 127.5, codes
   round(x / scale) within -128..127, ties to even. A row's codes depend on nothing but the row. */
#include "int8_rows.h"

#include "parallel.h"
#include "simd.h"

#define HALF_SPAN 127.5f
#define SMALLEST_AMAX 0x1p-100f
#define PIECE_WORK (1 << 14)
#define MARGIN 64

typedef int8_t bytes16 __attribute__((vector_size(16)));
typedef int8_t bytes __attribute__((vector_size(LANES)));

#if defined(__clang__)
#define SHUFFLE(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define SHUFFLE(v, ...) __builtin_shuffle(v, (bytes16){__VA_ARGS__})
#endif

struct job {
    const struct int8_input *input;
    const struct int8_rows *out;
    ptrdiff_t padded; /* columns of a row's floats, a multiple of LANES */
};

/* The row in the order of the weight's columns, zeros behind it. */
static void gather(const struct job *job, ptrdiff_t row, float *out) {
    const struct int8_input *in = job->input;
    const float *x = in->x + row * in->x_stride;
    if (in->perm)
        for (ptrdiff_t k = 0; k < in->columns; k++) out[k] = x[in->perm[k]];
    else
        memcpy(out, x, in->columns * sizeof *out);
    memset(out + in->columns, 0, (job->padded - in->columns) * sizeof *out);
}

static float scale_of(const float *x, ptrdiff_t count) {
    vf largest = splat(0.0f);
    for (ptrdiff_t k = 0; k < count; k += LANES) {
        vf value = load(x + k);
        largest = vmax(largest, vmax(value, -value));
    }
    float amax = max_lanes(largest);
    return (amax > SMALLEST_AMAX ? amax : SMALLEST_AMAX) / HALF_SPAN;
}

/* Returns the scale, or NaN where a quotient is none: such values have no codes. */
static float quantize(const float *x, ptrdiff_t count, float scale, int8_t *codes) {
    const vf divisor = splat(scale);
    vf poison = splat(0.0f);
    for (ptrdiff_t k = 0; k < count; k += LANES) {
        vf quotient = load(x + k) / divisor, value = vmin(splat(127.0f), vmax(splat(-128.0f), quotient));
        poison += value * splat(0.0f);
        const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, in the low bits */
        vi rounded = (vi)(value + splat(shift)) - (vi)splat(shift);
        bytes narrow = __builtin_convertvector(rounded, bytes);
        memcpy(codes + k, &narrow, sizeof narrow);
    }
    return scale + sum_lanes(poison);
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
    for (ptrdiff_t k = 0; k < count; k++) sum += codes[k];
    return sum;
}

static void make_rows(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct job *job = arg;
    const struct int8_input *in = job->input;
    const struct int8_rows *out = job->out;
    ptrdiff_t group = in->group ? in->group : job->padded;
    float *x = thread_scratch((job->padded + MARGIN) * sizeof(float));
    for (ptrdiff_t row = first; row < last; row++) {
        int8_t *codes = out->codes + row * out->stride;
        float *scales = out->scales + row;
        int32_t *sums = out->sums + row;
        gather(job, row, x);
        memset(codes + job->padded, 0, out->stride - job->padded);
        for (ptrdiff_t k = 0; k < job->padded; k += group) {
            ptrdiff_t count = job->padded - k < group ? job->padded - k : group;
            float scale = in->scale > 0.0f ? in->scale : scale_of(x + k, count);
            scale = quantize(x + k, count, scale, codes + k);
            for (ptrdiff_t b = k / out->block; b < out->blocks && b * out->block < k + count; b++) scales[b * out->capacity] = scale;
        }
        for (ptrdiff_t b = 0; b < out->blocks; b++) {
            ptrdiff_t k = b * out->block, end = b + 1 < out->blocks ? k + out->block : out->stride;
            sums[b * out->capacity] = in->factor * sum_codes(codes + k, end - k);
        }
        reorder(codes, out->stride, 8 / in->bits);
    }
}

void int8_rows_make(const struct int8_input *input, void *buffer, struct int8_rows *out) {
    struct job job = {input, out, (input->columns + LANES - 1) / LANES * LANES};
    out->codes = buffer;
    out->scales = (float *)(out->codes + out->capacity * out->stride);
    out->sums = (int32_t *)(out->scales + out->capacity * out->blocks);
    /* Tiles compute rows that are not given, too: with numbers that happen to be tiny that would take them very long. */
    ptrdiff_t idle = out->capacity - input->rows;
    for (ptrdiff_t b = 0; b < out->blocks && idle > 0; b++) {
        memset(out->scales + b * out->capacity + input->rows, 0, idle * sizeof *out->scales);
        memset(out->sums + b * out->capacity + input->rows, 0, idle * sizeof *out->sums);
    }
    team_run(make_rows, &job, input->rows, team_grain(PIECE_WORK, input->columns));
}
