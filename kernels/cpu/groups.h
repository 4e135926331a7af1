/* Scales and zeros of a panel's groups, LANES at a time, from how they are stored. */
#ifndef TWOFOLD_GROUPS_H
#define TWOFOLD_GROUPS_H

#include "half.h"
#include "simd.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint8_t small_codes __attribute__((vector_size(LANES)));

INLINE vf load_bfloats(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vf)((vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)) << 16);
#elif defined(__AVX2__)
    return (vf)((vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)) << 16);
#else
    halves bits;
    memcpy(&bits, p, sizeof bits);
    return (vf)(__builtin_convertvector(bits, vi) << 16);
#endif
}

INLINE vf load_halves(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX__) && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    uint32_t bits[LANES];
    for (int lane = 0; lane < LANES; lane++) bits[lane] = half_to_float(p[lane]);
    return load((const float *)(const void *)bits);
#endif
}

/* The branch goes the same way for a whole product. */
INLINE vf load_floats(const void *values, enum float_type type, ptrdiff_t place) {
    if (type == FLOATS32) return load((const float *)values + place);
    const uint16_t *p = (const uint16_t *)values + place;
    return type == HALVES16 ? load_halves(p) : load_bfloats(p);
}

INLINE vi load_zeros(const uint8_t *p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    small_codes bytes;
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, vi);
#endif
}
#endif
