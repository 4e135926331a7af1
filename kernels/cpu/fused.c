/* Neighbouring operations of a layer in one call: what a caller saves is its own time between them. */
#include "kernels.h"

enum { HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, WINDOW, ROTARY_HALF, CACHE };

/* qkv [tokens][heads + 2 kv_heads][head_size], contiguous: rotate keys in place, write keys and values into the caches, attend
   with rotated queries. sizes: in the order of the names above, from CACHE on as cache_sizes.py lists it. */
void twofold_rope_write_attend(float *qkv, ptrdiff_t tokens, const float *cos_sin, const int64_t *positions, void *key_cache,
                               void *value_cache, float *key_scale, float *value_scale, const int64_t *slots, float *out,
                               const int32_t *query_start, const int32_t *seq_lens, const int32_t *block_table,
                               ptrdiff_t num_requests, ptrdiff_t table_stride, const ptrdiff_t *sizes, float scale,
                               float soft_cap) {
    ptrdiff_t heads = sizes[HEADS], kv_heads = sizes[KV_HEADS], size = sizes[HEAD_SIZE], token = (heads + 2 * kv_heads) * size;
    float *key = qkv + heads * size, *value = key + kv_heads * size;
    const ptrdiff_t *cache = sizes + CACHE;
    const ptrdiff_t write[] = {tokens, kv_heads, size, sizes[BLOCK_SIZE], token, size, token, size};
    const ptrdiff_t attend[] = {heads, kv_heads, size, sizes[BLOCK_SIZE], num_requests, table_stride, sizes[WINDOW], token, size};
    const struct rotary rotary = {cos_sin, positions, sizes[ROTARY_HALF]};
    twofold_rope(NULL, key, tokens, 0, 0, 0, token, size, kv_heads, cos_sin, sizes[ROTARY_HALF], positions, 0);
    twofold_write_kv(key, value, key_cache, value_cache, key_scale, value_scale, slots, write, cache);
    attend_rotated(qkv, rotary, key_cache, value_cache, key_scale, value_scale, out, query_start, seq_lens, block_table, attend,
                   cache, scale, soft_cap);
}
