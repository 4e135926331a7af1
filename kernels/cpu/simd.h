/* Vectors of the widest kind the target has, in GCC/Clang vector extensions: the same source for AVX-512, AVX2, SSE, NEON. */
#ifndef TWOFOLD_SIMD_H
#define TWOFOLD_SIMD_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VEC_BYTES 64
#define PANEL_VECS 2
#define TILE_ROWS 12
#elif defined(__AVX__)
#define VEC_BYTES 32
#define PANEL_VECS 2
#define TILE_ROWS 6
#else
#define VEC_BYTES 16
#define PANEL_VECS 4
#define TILE_ROWS 5
#endif

/* Lanes per vector, output features per weight panel. A tile is TILE_ROWS x PANEL_VECS accumulators: with its operands it
   just fits the register file (32, 16 and 32 or 16 registers). */
#define LANES (VEC_BYTES / 4)
#define PANEL (LANES * PANEL_VECS)

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(VEC_BYTES)));
typedef int32_t vi __attribute__((vector_size(VEC_BYTES)));

INLINE vf load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE vi load_int(const int32_t *p) {
    vi v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }

INLINE vf splat(float x) { return x - (vf){0}; }

INLINE vi splat_int(int32_t x) { return x - (vi){0}; }

INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }

/* Lane by lane; where a lane holds NaN the result is b's. */
INLINE vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    vi larger = a > b;
    return (vf)((larger & (vi)a) | (~larger & (vi)b));
#endif
}

INLINE vf vmin(vf a, vf b) { return -vmax(-a, -b); }

/* mask's lanes are all ones or all zeros */
INLINE vf choose(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

/* Halves are added until one lane is left. */
INLINE float sum_lanes(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float lanes[LANES];
    store(lanes, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
#endif
}

INLINE float max_lanes(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float lanes[LANES];
    store(lanes, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
#endif
}

/* e^x to about 1 ulp; 0 below -87.3 (minus infinity included), about 2e38 above 88.3. Cephes' expf polynomial. */
INLINE vf vexp(vf x) {
    vf bounded = vmin(splat(88.3f), vmax(splat(-87.3f), x)); /* in this order NaN stays NaN */
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding and subtracting it rounds to an integer */
    vf n = (bounded * splat(1.44269504f) + splat(shift)) - splat(shift);
    vf r = bounded - n * splat(0.693359375f);
    r = r + n * splat(2.12194440e-4f);
    vf p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    vi power = (__builtin_convertvector(n, vi) + splat_int(127)) << 23;
    return choose(x < splat(-87.3f), splat(0.0f), p * (vf)power);
}

/* 2^x for x that are not large, to about 2 ulp; exactly 0 below -126, NaN stays NaN. 1 + x q(x) of least relative error. */
INLINE vf vexp2(vf x) {
#if defined(__AVX512F__)
    vf n = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding and subtracting it rounds to an integer */
    vf n = (vmax(x, splat(-126.0f)) + splat(shift)) - splat(shift);
#endif
    vf r = x - n;
    vf p = splat(0x1.5bba14p-10f);
    p = p * r + splat(0x1.3cea88p-7f);
    p = p * r + splat(0x1.c6b752p-5f);
    p = p * r + splat(0x1.ebf9bcp-3f);
    p = p * r + splat(0x1.62e42ap-1f);
    p = p * r + splat(1.0f);
#if defined(__AVX512F__)
    __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (vf)_mm512_maskz_scalef_ps(counts, (__m512)p, (__m512)n);
#else
    vi power = (__builtin_convertvector(n, vi) + splat_int(127)) << 23;
    return choose(x < splat(-126.0f), splat(0.0f), p * (vf)power);
#endif
}

/* The logistic function 1 / (1 + e^-u) to about 2 ulp; 0 below -87. */
INLINE vf logistic(vf u) {
#if defined(__AVX512F__)
    /* e^-u as 2^(n + r), and a reciprocal of 14 bits with one step of Newton's: a third of the time of a quotient of vexp(). */
    const __m512 x = (__m512)vmin(splat(88.0f), u), slope = _mm512_set1_ps(-0x1.715476p+0f), rest = _mm512_set1_ps(-0x1.4ae0cp-26f);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, slope), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_fmadd_ps(x, rest, _mm512_fmsub_ps(x, slope, n));
    __m512 p = _mm512_set1_ps(0x1.5bba14p-10f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.3cea88p-7f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.c6b752p-5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.ebf9bcp-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.62e42ap-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    const __m512 one = _mm512_set1_ps(1.0f), sum = _mm512_add_ps(_mm512_scalef_ps(p, n), one), about = _mm512_rcp14_ps(sum);
    const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ); /* NaN stays NaN */
    return (vf)_mm512_maskz_fmadd_ps(counts, about, _mm512_fnmadd_ps(sum, about, one), about);
#else
    /* The exponent is never above 0. */
    vf fade = vexp(choose(u > splat(0.0f), -u, u)), one = splat(1.0f);
    return choose(u > splat(0.0f), one, fade) / (one + fade);
#endif
}

INLINE vf silu(vf g) { return g * logistic(g); }

/* gelu by its approximation, g times the logistic function of 2 sqrt(2/pi) (g + 0.044715 g^3). */
#define GELU_SLOPE 1.5957691216057308f
#define GELU_CUBE 0.044715f
INLINE vf gelu_tanh(vf g) { return g * logistic(splat(GELU_SLOPE) * (g + splat(GELU_CUBE) * g * g * g)); }

/* limit * tanh(x / limit). */
INLINE vf capped(vf x, float limit) {
    vf e = vexp(vmin(x * splat(2.0f / limit), splat(80.0f)));
    return splat(limit) - splat(2.0f * limit) / (e + splat(1.0f));
}
#endif
