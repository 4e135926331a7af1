/* Elements of a KV cache: float32, bfloat16, or 8-bit codes that a scale turns into numbers. */
#ifndef TWOFOLD_CODES_H
#define TWOFOLD_CODES_H

#include "groups.h"
#include "simd.h"

/* As in kernels/cpu/cache_sizes.py. */
enum element { FLOAT32, INT8, E4M3, BFLOAT16 };

/* e4m3 codes decode to their number over 2^8, which half floats hold; whoever multiplies by the scale makes up for it. */
#define E4M3_UNIT 256.0f
#define INT8_LIMIT 127.0f
#define E4M3_LIMIT 448.0f

typedef int8_t vb __attribute__((vector_size(LANES)));

INLINE size_t element_size(enum element kind) {
    return kind == FLOAT32 ? sizeof(float) : kind == BFLOAT16 ? sizeof(uint16_t) : 1;
}

INLINE float code_unit(enum element kind) { return kind == E4M3 ? E4M3_UNIT : 1.0f; }

/* LANES bytes, each as a signed number in a lane. */
INLINE vi load_bytes(const int8_t *p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    vb bytes;
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, vi);
#endif
}

/* The code's bits land in the fields of a half float of the same sign, whose exponent counts from 15 where e4m3's counts from 7:
   subnormal codes become subnormal halves, and the processor knows those. */
INLINE vf load_e4m3(const int8_t *p) {
#if defined(__AVX512F__) && defined(__AVX2__)
    __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    return (vf)_mm512_cvtph_ps(_mm256_and_si256(half, _mm256_set1_epi16((short)0xBFFF)));
#elif defined(__AVX__) && defined(__F16C__)
    __m128i half = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p)), 7);
    return (vf)_mm256_cvtph_ps(_mm_and_si128(half, _mm_set1_epi16((short)0xBFFF)));
#else
    vi code = load_bytes(p), size = code & splat_int(0x7F);
    vf normal = (vf)((size << 20) + splat_int((127 - 7 - 8) << 23)), small = to_float(size) * splat(0x1p-17f);
    return (vf)((vi)choose(size < splat_int(8), small, normal) | (code & splat_int(INT32_MIN)));
#endif
}

/* Elements index.. of an array, LANES of them, without their scale. */
INLINE vf load_elements(const enum element kind, const char *data, ptrdiff_t index) {
    if (kind == INT8) return to_float(load_bytes((const int8_t *)data + index));
    if (kind == E4M3) return load_e4m3((const int8_t *)data + index);
    if (kind == BFLOAT16) return load_bfloats((const uint16_t *)data + index);
    return load((const float *)data + index);
}

INLINE float load_element(const enum element kind, const char *data, ptrdiff_t index) {
    if (kind == FLOAT32) return ((const float *)data)[index];
    if (kind == BFLOAT16) return float_at(data, BFLOATS16, index);
    int code = ((const int8_t *)data)[index];
    if (kind == INT8) return (float)code;
    int size = code & 0x7F;
    float magnitude = (float)size * 0x1p-17f;
    if (size >= 8) {
        int32_t bits = (size << 20) + ((127 - 7 - 8) << 23);
        memcpy(&magnitude, &bits, sizeof bits);
    }
    return code < 0 ? -magnitude : magnitude;
}

/* The whole number nearest to x, ties to even; |x| below 2^22. */
INLINE int32_t nearest(float x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23 */
    return (int32_t)((x + shift) - shift);
}

/* The code nearest to x, ties to even; what lies beyond the largest gets the largest, NaN any. */
INLINE int8_t int8_code(float x) {
    x = x > INT8_LIMIT ? INT8_LIMIT : x;
    return (int8_t)nearest(x >= -INT8_LIMIT ? x : -INT8_LIMIT);
}

INLINE int8_t e4m3_code(float x) {
    uint32_t bits, sign;
    x = x > E4M3_LIMIT ? E4M3_LIMIT : x;
    x = x >= -E4M3_LIMIT ? x : -E4M3_LIMIT;
    memcpy(&bits, &x, sizeof bits);
    sign = bits >> 24 & 0x80, bits &= 0x7FFFFFFF;
    uint32_t normal = (bits + 0x7FFFF + (bits >> 20 & 1)) >> 20;
    uint32_t small = (uint32_t)nearest((x < 0.0f ? -x : x) * 512.0f);
    return (int8_t)(sign | (bits < 121u << 23 ? small : normal - (120u << 3)));
}

/* The bfloat16 nearest to x, ties to even; NaN stays NaN. */
INLINE uint16_t bfloat_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? bits >> 16 | 0x40 : rounded);
}
#endif
