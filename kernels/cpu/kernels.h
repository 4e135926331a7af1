/* Kernels that other kernels call; described where they are defined. */
#ifndef TWOFOLD_KERNELS_H
#define TWOFOLD_KERNELS_H

#include <stddef.h>
#include <stdint.h>

void twofold_rope(float *q, float *k, ptrdiff_t tokens, ptrdiff_t q_token, ptrdiff_t q_head, ptrdiff_t q_heads, ptrdiff_t k_token,
                  ptrdiff_t k_head, ptrdiff_t k_heads, const float *table, ptrdiff_t half, const int64_t *positions,
                  int interleaved);

void twofold_write_kv(const float *key, const float *value, float *key_cache, float *value_cache, const int64_t *slots,
                      const ptrdiff_t *sizes);

void twofold_paged_attention(const float *query, const float *key, const float *value, float *out, const int32_t *query_start,
                             const int32_t *seq_lens, const int32_t *block_table, const ptrdiff_t *sizes, float scale,
                             float soft_cap);
#endif
