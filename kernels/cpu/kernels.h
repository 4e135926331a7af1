/* Kernels that other kernels call; described where they are defined. */
#ifndef TWOFOLD_KERNELS_H
#define TWOFOLD_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* What the numbers that describe a layer's cache mean, in the order of cache_sizes.py. */
enum {
    ELEMENT,
    FIXED_SCALES,
    KEY_STRIDES, /* block, slot, head, feature */
    VALUE_STRIDES = KEY_STRIDES + 4,
    KEY_SCALE_STRIDES = VALUE_STRIDES + 4, /* block, slot, head */
    VALUE_SCALE_STRIDES = KEY_SCALE_STRIDES + 3,
};

/* What queries still need before they attend: table [positions][2][half], cosines and sines, and a position per token. */
struct rotary {
    const float *table;
    const int64_t *positions;
    ptrdiff_t half;
};

void twofold_rope(float *q, float *k, ptrdiff_t tokens, ptrdiff_t q_token, ptrdiff_t q_head, ptrdiff_t q_heads, ptrdiff_t k_token,
                  ptrdiff_t k_head, ptrdiff_t k_heads, const float *table, ptrdiff_t half, const int64_t *positions,
                  int interleaved);

void twofold_write_kv(const float *key, const float *value, void *key_cache, void *value_cache, float *key_scale,
                      float *value_scale, const int64_t *slots, const ptrdiff_t *shape, const ptrdiff_t *cache);

void twofold_paged_attention(const float *query, const void *key, const void *value, const float *key_scale,
                             const float *value_scale, float *out, const int32_t *query_start, const int32_t *seq_lens,
                             const int32_t *block_table, const ptrdiff_t *sizes, const ptrdiff_t *cache, float scale,
                             float soft_cap);

/* The same of queries that are not rotated yet. */
void attend_rotated(const float *query, struct rotary rotary, const void *key, const void *value, const float *key_scale,
                    const float *value_scale, float *out, const int32_t *query_start, const int32_t *seq_lens,
                    const int32_t *block_table, const ptrdiff_t *sizes, const ptrdiff_t *cache, float scale, float soft_cap);
#endif
