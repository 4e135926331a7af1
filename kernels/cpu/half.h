/* 16-bit floats to float32. */
#ifndef TWOFOLD_HALF_H
#define TWOFOLD_HALF_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* How a tensor's floats are stored; panels.py has the same numbers. */
enum float_type { FLOATS32, BFLOATS16, HALVES16 };

/* The bits of the float that a float16's bits stand for. */
static inline uint32_t half_to_float(uint16_t half) {
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float value;
    memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f;
    memcpy(&bits, &value, sizeof bits);
    if ((half & 0x7c00) == 0x7c00) bits = 0x7f800000 | (uint32_t)(half & 0x03ff) << 13;
    return bits | (uint32_t)(half & 0x8000) << 16;
}

static inline float float_at(const void *values, enum float_type type, ptrdiff_t place) {
    float value;
    if (type == FLOATS32) return ((const float *)values)[place];
    uint32_t bits = ((const uint16_t *)values)[place];
    bits = type == BFLOATS16 ? bits << 16 : half_to_float((uint16_t)bits);
    memcpy(&value, &bits, sizeof value);
    return value;
}
#endif
