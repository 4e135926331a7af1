/* 16-bit floats to float32. */
#ifndef TWOFOLD_HALF_H
#define TWOFOLD_HALF_H

#include <stdint.h>
#include <string.h>

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
#endif
