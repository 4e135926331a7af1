/* Activations rounded as kernels/reference/activation_quantization.py (fake_quantize) says, bit for bit: the product in float32
   behind it then is what the scheme asks for. A row's values depend on nothing but the row. */
#include "round_rows.h"

#include "parallel.h"
#include "simd.h"

#define PIECE_WORK (1 << 14)
#define SMALLEST_AMAX 0x1p-100f
#define SMALLEST_SCALE 0x1p-126f
#define HALF_SPAN 127.5f
#define FP8_LIMIT 448.0f
#define FP4_LIMIT 6.0f
/* NVFP4's scale of a group of zeros. */
#define EMPTY_SCALE 0.125f

enum { INT8, FP8, FP4 };

INLINE vf absolute(vf x) { return (vf)((vi)x & splat_int(INT32_MAX)); }

/* The nearest integer, ties to even; |x| below 2^22. */
INLINE vf nearest(vf x) {
    const vf shift = splat(12582912.0f); /* 1.5 * 2^23 */
    return (x + shift) - shift;
}

/* x within -limit..limit, NaN as it is, to the nearest of the floats that have `dropped` bits less in the mantissa, and from
   `smallest` down steps of `step`. */
INLINE vf round_float(vf x, const float limit, const int dropped, const float smallest, const float step) {
    vf value = vmin(splat(limit), vmax(splat(-limit), x)), size = absolute(value);
    vi bits = (vi)size;
    vi normal = (bits + splat_int((1 << (dropped - 1)) - 1) + (bits >> dropped & splat_int(1))) & splat_int(-(1 << dropped));
    vf small = nearest(size * splat(1.0f / step)) * splat(step);
    vi rounded = (vi)choose(size < splat(smallest), small, (vf)normal) | ((vi)value & splat_int(INT32_MIN));
    return choose(value == value, (vf)rounded, value);
}

INLINE vf round_fp8(vf x) { return round_float(x, FP8_LIMIT, 20, 0x1p-6f, 0x1p-9f); }

INLINE vf round_fp4(vf x) { return round_float(x, FP4_LIMIT, 22, 1.0f, 0.5f); }

INLINE vf round_number(const int element, vf x, vf scale, vf zero) {
    vf quotient = x / scale;
    if (element == FP8) return round_fp8(quotient) * scale;
    if (element == FP4) return round_fp4(quotient) * scale;
    vf bounded = vmin(splat(127.0f), vmax(splat(-128.0f), quotient + zero));
    return (nearest(bounded) - zero) * scale;
}

/* Of a group of x: its largest and smallest value and magnitude, and NaN where a value is infinite or NaN, else 0. */
struct range {
    float low, high, amax, poison;
};

static struct range range_of(const float *x, ptrdiff_t count) {
    vf low = splat(0.0f), high = low, poison = low;
    for (ptrdiff_t k = 0; k < count; k += LANES) {
        vf value = load(x + k);
        high = vmax(high, value);
        low = vmax(low, -value);
        poison += value * splat(0.0f);
    }
    struct range range = {-max_lanes(low), max_lanes(high), 0.0f, sum_lanes(poison)};
    range.amax = range.high > -range.low ? range.high : -range.low;
    return range;
}

static float power_of_two(float amax, int emax) {
    int32_t bits;
    memcpy(&bits, &amax, sizeof bits);
    int exponent = (bits >> 23) - 127 + ((bits & 0x7fffff) >= 0x600000) - emax;
    exponent = exponent < -126 ? -126 : exponent > 127 ? 127 : exponent;
    bits = (exponent + 127) << 23;
    memcpy(&amax, &bits, sizeof amax);
    return amax;
}

static float nvfp4_scale(float amax, float scale) {
    float lanes[LANES];
    store(lanes, round_fp8(splat(scale * amax / FP4_LIMIT)));
    return (lanes[0] == 0.0f ? EMPTY_SCALE : lanes[0]) / scale;
}

/* Scale and zero of a group from its values; NVFP4's from the stored scale as well. */
static void dynamic_scale(const ptrdiff_t *how, const float *x, ptrdiff_t count, float *scale, float *zero) {
    struct range range = range_of(x, count);
    float amax = range.amax > SMALLEST_AMAX ? range.amax : SMALLEST_AMAX;
    if (how[ROUND_POWERS]) {
        *scale = power_of_two(amax, how[ROUND_ELEMENT] == FP8 ? 8 : 2);
    } else if (how[ROUND_ELEMENT] == FP4) {
        *scale = nvfp4_scale(range.amax, *scale);
    } else if (how[ROUND_ELEMENT] == FP8) {
        *scale = amax / FP8_LIMIT;
    } else if (how[ROUND_ZEROS]) {
        *scale = (range.high - range.low) / 255.0f;
        if (*scale < SMALLEST_SCALE) *scale = SMALLEST_SCALE;
        float lanes[LANES];
        store(lanes, nearest(vmax(splat(-128.0f), vmin(splat(127.0f), splat(-128.0f) - splat(range.low) / splat(*scale)))));
        *zero = lanes[0];
    } else {
        *scale = amax / HALF_SPAN;
    }
    *scale += range.poison;
}

INLINE void round_group(const int element, float *x, ptrdiff_t count, float scale, float zero) {
    for (ptrdiff_t k = 0; k < count; k += LANES) store(x + k, round_number(element, load(x + k), splat(scale), splat(zero)));
}

void round_row(const ptrdiff_t *how, const float *x, ptrdiff_t columns, float scale, float zero, float *out) {
    ptrdiff_t padded = (columns + LANES - 1) / LANES * LANES, group = how[ROUND_GROUP] ? how[ROUND_GROUP] : padded;
    float *row = thread_scratch((padded + 1) * sizeof *row);
    memcpy(row, x, columns * sizeof *row);
    memset(row + columns, 0, (padded - columns) * sizeof *row);
    for (ptrdiff_t k = 0; k < padded; k += group) {
        ptrdiff_t count = padded - k < group ? padded - k : group;
        float own_scale = scale, own_zero = zero;
        if (how[ROUND_DYNAMIC]) dynamic_scale(how, row + k, count, &own_scale, &own_zero);
        switch (how[ROUND_ELEMENT]) {
            case INT8: round_group(INT8, row + k, count, own_scale, own_zero); break;
            case FP8: round_group(FP8, row + k, count, own_scale, own_zero); break;
            case FP4: round_group(FP4, row + k, count, own_scale, own_zero); break;
        }
    }
    memcpy(out, row, columns * sizeof *out);
}

struct job {
    const ptrdiff_t *how;
    const float *x;
    ptrdiff_t x_stride, columns;
    float scale, zero;
    float *out;
};

static void round_rows(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct job *job = arg;
    for (ptrdiff_t row = first; row < last; row++)
        round_row(job->how, job->x + row * job->x_stride, job->columns, job->scale, job->zero, job->out + row * job->columns);
}

/* out [rows][columns], contiguous. */
void twofold_round_rows(const float *x, ptrdiff_t x_stride, ptrdiff_t rows, ptrdiff_t columns, const ptrdiff_t *how, float scale,
                        float zero, float *out) {
    struct job job = {how, x, x_stride, columns, scale, zero, out};
    team_run(round_rows, &job, rows, team_grain(PIECE_WORK, columns));
}
