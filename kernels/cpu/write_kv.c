/* New keys and values into the paged cache: float32 as they are, bfloat16 rounded, 8-bit ones divided by a scale per token and head. */
#include <math.h>

#include "codes.h"
#include "kernels.h"
#include "parallel.h"

/* Elements that are worth claiming by themselves, some microseconds. */
#define PIECE_ELEMENTS (1 << 14)
#define CODES_AT_ONCE 64
/* Tokens whose keys are written at once, and features of them. */
#define RUN_TOKENS 16
#define RUN_FEATURES 64
#define SMALLEST_SCALE 0x1p-100f

/* Strides in elements: of the source token and head; of the cache block, slot, head, feature; of the scale block, slot, head. */
struct cache_write {
    const float *source;
    ptrdiff_t source_token, source_head;
    char *cache;
    const ptrdiff_t *strides;
    float *scale;
    const ptrdiff_t *scale_strides;
};

struct write {
    struct cache_write key, value;
    ptrdiff_t tokens, heads, size, block_size;
    enum element kind;
    int fixed; /* the scales are given, not computed */
    const int64_t *slots;
};

static void store_floats(float *target, ptrdiff_t stride, const float *source, ptrdiff_t size) {
    if (stride == 1)
        memcpy(target, source, (size_t)size * sizeof(float));
    else
        for (ptrdiff_t d = 0; d < size; d++) target[d * stride] = source[d];
}

static void store_bfloats(uint16_t *target, ptrdiff_t stride, const float *source, ptrdiff_t size) {
    if (stride == 1)
        for (ptrdiff_t d = 0; d < size; d++) target[d] = bfloat_of(source[d]);
    else
        for (ptrdiff_t d = 0; d < size; d++) target[d * stride] = bfloat_of(source[d]);
}

/* The largest magnitude over the code's limit; NaN where one is. */
static float scale_of(const float *source, ptrdiff_t size, enum element kind) {
    float largest = 0.0f;
    int broken = 0;
    for (ptrdiff_t d = 0; d < size; d++) {
        float magnitude = fabsf(source[d]);
        largest = magnitude > largest ? magnitude : largest;
        broken |= source[d] != source[d];
    }
    if (broken) return NAN;
    float scale = largest / (kind == INT8 ? INT8_LIMIT : E4M3_LIMIT);
    return scale > SMALLEST_SCALE ? scale : SMALLEST_SCALE;
}

static void store_codes(enum element kind, int8_t *target, ptrdiff_t stride, const float *source, ptrdiff_t size, float scale) {
    int8_t codes[CODES_AT_ONCE];
    for (ptrdiff_t done = 0; done < size; done += CODES_AT_ONCE) {
        int count = (int)(size - done < CODES_AT_ONCE ? size - done : CODES_AT_ONCE);
        if (kind == INT8)
            for (int d = 0; d < count; d++) codes[d] = int8_code(source[done + d] / scale);
        else
            for (int d = 0; d < count; d++) codes[d] = e4m3_code(source[done + d] / scale);
        if (stride == 1)
            memcpy(target + done, codes, (size_t)count);
        else
            for (int d = 0; d < count; d++) target[(done + d) * stride] = codes[d];
    }
}

static void write_token(const struct write *p, const struct cache_write *w, ptrdiff_t token) {
    ptrdiff_t block = p->slots[token] / p->block_size, offset = p->slots[token] % p->block_size;
    for (ptrdiff_t h = 0; h < p->heads; h++) {
        const float *source = w->source + token * w->source_token + h * w->source_head;
        ptrdiff_t place = block * w->strides[0] + offset * w->strides[1] + h * w->strides[2];
        if (p->kind == FLOAT32) {
            store_floats((float *)w->cache + place, w->strides[3], source, p->size);
            continue;
        }
        if (p->kind == BFLOAT16) {
            store_bfloats((uint16_t *)w->cache + place, w->strides[3], source, p->size);
            continue;
        }
        float *scale = w->scale + block * w->scale_strides[0] + offset * w->scale_strides[1] + h * w->scale_strides[2];
        if (!p->fixed) *scale = scale_of(source, p->size, p->kind);
        store_codes(p->kind, (int8_t *)w->cache + place, w->strides[3], source, p->size, *scale);
    }
}

/* `count` tokens into consecutive slots of a block that lie side by side for each feature: rounded where they are, then turned. */
static void write_run(const struct write *p, const struct cache_write *w, ptrdiff_t token, ptrdiff_t count) {
    uint16_t rows[RUN_TOKENS][RUN_FEATURES];
    ptrdiff_t block = p->slots[token] / p->block_size, offset = p->slots[token] % p->block_size;
    for (ptrdiff_t h = 0; h < p->heads; h++) {
        uint16_t *cache = (uint16_t *)w->cache + block * w->strides[0] + offset + h * w->strides[2];
        for (ptrdiff_t first = 0; first < p->size; first += RUN_FEATURES) {
            ptrdiff_t features = p->size - first < RUN_FEATURES ? p->size - first : RUN_FEATURES;
            for (ptrdiff_t i = 0; i < count; i++)
                store_bfloats(rows[i], 1, w->source + (token + i) * w->source_token + h * w->source_head + first, features);
            for (ptrdiff_t d = 0; d < features; d++) {
                uint16_t *target = cache + (first + d) * w->strides[3];
                if (count == RUN_TOKENS)
                    _Pragma("GCC unroll 16") for (ptrdiff_t i = 0; i < RUN_TOKENS; i++) target[i] = rows[i][d];
                else
                    for (ptrdiff_t i = 0; i < count; i++) target[i] = rows[i][d];
            }
        }
    }
}

/* How many tokens from this one on, before `last`, go into consecutive slots of one block; RUN_TOKENS at most. */
static ptrdiff_t run_length(const struct write *p, ptrdiff_t token, ptrdiff_t last) {
    ptrdiff_t count = 1, room = p->block_size - p->slots[token] % p->block_size;
    if (room > RUN_TOKENS) room = RUN_TOKENS;
    while (count < room && token + count < last && p->slots[token + count] == p->slots[token] + count) count++;
    return count;
}

static void write_tokens(void *arg, ptrdiff_t token, ptrdiff_t last) {
    const struct write *p = arg;
    int turn = p->kind == BFLOAT16 && p->key.strides[1] == 1;
    for (ptrdiff_t count = 1; token < last; token += count) {
        count = 1;
        if (p->slots[token] < 0) continue;
        if (turn) write_run(p, &p->key, token, count = run_length(p, token, last));
        else write_token(p, &p->key, token);
        for (ptrdiff_t i = 0; i < count; i++) write_token(p, &p->value, token + i);
    }
}

/* Tokens with a negative slot are skipped. shape: tokens, KV heads, head size, block size, key token and head strides, value token and head strides.
   cache: as cache_sizes.py lists it. */
void twofold_write_kv(const float *key, const float *value, void *key_cache, void *value_cache, float *key_scale,
                      float *value_scale, const int64_t *slots, const ptrdiff_t *shape, const ptrdiff_t *cache) {
    struct write p = {
        .key = {key, shape[4], shape[5], key_cache, cache + KEY_STRIDES, key_scale, cache + KEY_SCALE_STRIDES},
        .value = {value, shape[6], shape[7], value_cache, cache + VALUE_STRIDES, value_scale, cache + VALUE_SCALE_STRIDES},
        .tokens = shape[0], .heads = shape[1], .size = shape[2], .block_size = shape[3],
        .kind = (enum element)cache[ELEMENT], .fixed = (int)cache[FIXED_SCALES], .slots = slots,
    };
    team_run(write_tokens, &p, p.tokens, team_grain(PIECE_ELEMENTS, 4 * p.heads * p.size));
}
