/* Small operations between the matrix products, float32: norms, rotary embedding, gated activation, cache writes. */
#include <math.h>

#include "kernels.h"
#include "parallel.h"
#include "simd.h"

/* Elements that are worth claiming by themselves, some microseconds. */
#define PIECE_ELEMENTS (1 << 14)

struct norm {
    const float *x;
    ptrdiff_t rows, inner, outer_stride, inner_stride, size;
    const float *residual, *weight;
    float eps, offset;
    float *out, *sum;
};

static void norm_row(const struct norm *p, ptrdiff_t row) {
    const float *x = p->x + row / p->inner * p->outer_stride + row % p->inner * p->inner_stride;
    float *out = p->out + row * p->size;
    if (p->residual) {
        const float *residual = p->residual + row * p->size;
        float *sum = p->sum + row * p->size;
        for (ptrdiff_t i = 0; i < p->size; i++) sum[i] = x[i] + residual[i];
        x = sum;
    }
    ptrdiff_t whole = p->size / LANES * LANES;
    vf squares = splat(0.0f);
    for (ptrdiff_t i = 0; i < whole; i += LANES) squares += load(x + i) * load(x + i);
    float total = sum_lanes(squares);
    for (ptrdiff_t i = whole; i < p->size; i++) total += x[i] * x[i];
    float factor = 1.0f / sqrtf(total / (float)p->size + p->eps);
    for (ptrdiff_t i = 0; i < p->size; i++) out[i] = x[i] * factor * (p->weight[i] + p->offset);
}

static void norm_rows(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct norm *p = arg;
    for (; first < last; first++) norm_row(p, first);
}

/* Row r of x starts at r / inner * outer_stride + r % inner * inner_stride; residual (or NULL), out and sum are contiguous. */
void twofold_rms_norm(const float *x, ptrdiff_t rows, ptrdiff_t inner, ptrdiff_t outer_stride, ptrdiff_t inner_stride, ptrdiff_t size,
                      const float *residual, const float *weight, float eps, float offset, float *out, float *sum) {
    struct norm p = {x, rows, inner, outer_stride, inner_stride, size, residual, weight, eps, offset, out, sum};
    team_run(norm_rows, &p, rows, team_grain(PIECE_ELEMENTS, size));
}

struct rope {
    float *q, *k;
    ptrdiff_t tokens, q_token, q_head, q_heads, k_token, k_head, k_heads;
    const float *table;
    ptrdiff_t half;
    const int64_t *positions;
    int interleaved;
};

static void rotate(const struct rope *p, float *x, const float *cosine, const float *sine) {
    ptrdiff_t near = p->interleaved ? 2 : 1, far = p->interleaved ? 1 : p->half;
    if (near == 1) {
        for (ptrdiff_t i = 0; i < p->half; i++) {
            float a = x[i], b = x[i + far];
            x[i] = a * cosine[i] - b * sine[i];
            x[i + far] = b * cosine[i] + a * sine[i];
        }
        return;
    }
    for (ptrdiff_t i = 0; i < p->half; i++) {
        float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cosine[i] - b * sine[i];
        x[2 * i + 1] = b * cosine[i] + a * sine[i];
    }
}

static void rope_tokens(void *arg, ptrdiff_t token, ptrdiff_t last) {
    const struct rope *p = arg;
    for (; token < last; token++) {
        const float *cosine = p->table + p->positions[token] * 2 * p->half, *sine = cosine + p->half;
        for (ptrdiff_t h = 0; h < p->q_heads; h++) rotate(p, p->q + token * p->q_token + h * p->q_head, cosine, sine);
        for (ptrdiff_t h = 0; h < p->k_heads; h++) rotate(p, p->k + token * p->k_token + h * p->k_head, cosine, sine);
    }
}

/* In place. */
void twofold_rope(float *q, float *k, ptrdiff_t tokens, ptrdiff_t q_token, ptrdiff_t q_head, ptrdiff_t q_heads, ptrdiff_t k_token,
                  ptrdiff_t k_head, ptrdiff_t k_heads, const float *table, ptrdiff_t half, const int64_t *positions,
                  int interleaved) {
    struct rope p = {q, k, tokens, q_token, q_head, q_heads, k_token, k_head, k_heads, table, half, positions, interleaved};
    team_run(rope_tokens, &p, tokens, team_grain(PIECE_ELEMENTS, 2 * half * (q_heads + k_heads)));
}

struct gate {
    const float *x;
    ptrdiff_t rows, stride, size;
    float *out;
};

static void silu_rows(void *arg, ptrdiff_t row, ptrdiff_t last) {
    const struct gate *p = arg;
    ptrdiff_t whole = p->size / LANES * LANES;
    for (; row < last; row++) {
        const float *gate = p->x + row * p->stride, *up = gate + p->size;
        float *out = p->out + row * p->size;
        for (ptrdiff_t i = 0; i < whole; i += LANES) {
            vf g = load(gate + i), fade = vexp(choose(g > splat(0.0f), -g, g)), one = splat(1.0f);
            store(out + i, g * (choose(g > splat(0.0f), one, fade) / (one + fade)) * load(up + i));
        }
        for (ptrdiff_t i = whole; i < p->size; i++) out[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
    }
}

void twofold_silu_and_mul(const float *x, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t size, float *out) {
    struct gate p = {x, rows, stride, size, out};
    team_run(silu_rows, &p, rows, team_grain(PIECE_ELEMENTS, 4 * size));
}

struct cache_write {
    const float *source;
    ptrdiff_t source_token, source_head;
    float *cache;
    const ptrdiff_t *strides;
};

struct write {
    struct cache_write key, value;
    ptrdiff_t tokens, heads, size, block_size;
    const int64_t *slots;
};

static void write_token(const struct write *p, const struct cache_write *w, ptrdiff_t token) {
    ptrdiff_t block = p->slots[token] / p->block_size, offset = p->slots[token] % p->block_size;
    for (ptrdiff_t h = 0; h < p->heads; h++) {
        const float *source = w->source + token * w->source_token + h * w->source_head;
        float *target = w->cache + block * w->strides[0] + offset * w->strides[1] + h * w->strides[2];
        if (w->strides[3] == 1)
            memcpy(target, source, (size_t)p->size * sizeof(float));
        else
            for (ptrdiff_t d = 0; d < p->size; d++) target[d * w->strides[3]] = source[d];
    }
}

static void write_tokens(void *arg, ptrdiff_t token, ptrdiff_t last) {
    const struct write *p = arg;
    for (; token < last; token++) {
        write_token(p, &p->key, token);
        write_token(p, &p->value, token);
    }
}

/* sizes: tokens, KV heads, head size, block size, key token and head strides, value token and head strides, then block, slot,
   head and feature strides of the key cache and of the value cache. */
void twofold_write_kv(const float *key, const float *value, float *key_cache, float *value_cache, const int64_t *slots,
                      const ptrdiff_t *sizes) {
    struct write p = {{key, sizes[4], sizes[5], key_cache, sizes + 8}, {value, sizes[6], sizes[7], value_cache, sizes + 12},
                      sizes[0], sizes[1], sizes[2], sizes[3], slots};
    team_run(write_tokens, &p, p.tokens, team_grain(PIECE_ELEMENTS, 4 * p.heads * p.size));
}
