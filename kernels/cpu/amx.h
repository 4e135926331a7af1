/* Intel's tile registers, where the target has them for bytes. */
#ifndef TWOFOLD_AMX_H
#define TWOFOLD_AMX_H

#include "simd.h"

#if defined(__AMX_INT8__) && defined(__linux__) && defined(__x86_64__) && VEC_BYTES == 64
#define HAVE_AMX 1
#define AMX_ROWS 16

#include <sys/syscall.h>
#include <unistd.h>

struct amx_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* Whether the system lets this process use the tiles. */
static inline int amx_allowed(void) {
    static _Atomic int state; /* 0 unknown, 1 yes, 2 no */
    if (!state) state = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0 ? 1 : 2;
    return state == 1;
}

/* gcc does not know that the instructions read more than eight bytes: what was written before is written. */
INLINE void amx_settle(const void *data) { __asm__ volatile("" : : "r"(data) : "memory"); }

/* Eight tiles of AMX_ROWS whole rows. */
static inline struct amx_config amx_whole_tiles(void) {
    struct amx_config config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = VEC_BYTES, config.rows[tile] = AMX_ROWS;
    return config;
}

INLINE void amx_load(const struct amx_config *config) {
    amx_settle(config);
    _tile_loadconfig(config);
}

/* Tiles 0 and 1 are sums [AMX_ROWS][LANES], 2 rows of x [AMX_ROWS][4 words], 3 weights' bytes [words][LANES][4]. */
INLINE void amx_configure(int words) {
    struct amx_config config = amx_whole_tiles();
    config.row_bytes[2] = (uint16_t)(4 * words);
    config.rows[3] = (uint8_t)words;
    amx_load(&config);
}

/* A sum += x times weights, whose bytes may be signed. */
#define AMX_DOT(sum, x, weights, signed_codes) \
    do { \
        if (signed_codes) \
            _tile_dpbssd(sum, x, weights); \
        else \
            _tile_dpbsud(sum, x, weights); \
    } while (0)
#else
#define HAVE_AMX 0
#define AMX_ROWS 1
#endif
#if HAVE_AMX && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__BMI2__)
#define HAVE_AMX_BF16 1
#else
#define HAVE_AMX_BF16 0
#endif
#endif
