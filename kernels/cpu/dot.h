/* Products of four bytes at a time, summed in 32 bits, in the instructions that the target has for them. */
#ifndef TWOFOLD_DOT_H
#define TWOFOLD_DOT_H

#include "simd.h"

#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

/* Rows of a tile of int8 products: two accumulators per vector, one of integers and one of floats. With eight rows of two vectors
   the floats, which a block needs once, wait in memory. */
#if defined(__AVX512F__)
#define DOT_ROWS 8
#elif defined(__AVX__)
#define DOT_ROWS 2
#else
#define DOT_ROWS 3
#endif

/* Lane by lane sum + w0 x0 + w1 x1 + w2 x2 + w3 x3, w unsigned bytes and x signed ones, modulo 2^32. w's bytes are at most 15
   unless `wide`. */
INLINE vi dot4(vi sum, vi w, vi x, const int wide) {
#if defined(__AVX512VNNI__)
    (void)wide;
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVX512BW__)
    __m512i a = (__m512i)w, b = (__m512i)x;
    if (!wide) return sum + (vi)_mm512_madd_epi16(_mm512_maddubs_epi16(a, b), _mm512_set1_epi16(1));
    /* Pairs of 255 * 128 would saturate 16 bits: the even bytes and the odd ones, each in 16 bits. */
    __m512i even = _mm512_madd_epi16(_mm512_and_si512(a, _mm512_set1_epi16(255)), _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8));
    __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(a, 8), _mm512_srai_epi16(b, 8));
    return sum + (vi)even + (vi)odd;
#elif defined(__AVXVNNI__) && VEC_BYTES == 32
    (void)wide;
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#elif defined(__AVX2__) && VEC_BYTES == 32
    __m256i a = (__m256i)w, b = (__m256i)x;
    if (!wide) return sum + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1));
    __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return sum + (vi)even + (vi)odd;
#elif defined(__ARM_FEATURE_DOTPROD)
    int8x16_t a = vreinterpretq_s8_s32((int32x4_t)w), b = vreinterpretq_s8_s32((int32x4_t)x);
    if (!wide) return (vi)vdotq_s32((int32x4_t)sum, a, b);
    /* 255 is 127 and 128, and as a signed byte 128 is -128. */
    int8x16_t low = vandq_s8(a, vdupq_n_s8(127)), high = vandq_s8(a, vdupq_n_s8(-128));
    return (vi)vdotq_s32((int32x4_t)sum, low, b) - (vi)vdotq_s32(vdupq_n_s32(0), high, b);
#else
    (void)wide;
    for (int i = 0; i < 4; i++) sum += ((w >> (8 * i)) & splat_int(255)) * ((x << (24 - 8 * i)) >> 24);
    return sum;
#endif
}

INLINE vi splat_bytes(const int8_t *p) {
    int32_t word;
    memcpy(&word, p, sizeof word);
    return splat_int(word);
}
#endif
