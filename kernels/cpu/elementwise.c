/* Small operations between the matrix products, float32: norms, rotary embedding, gated activation. */
#include <math.h>

#include "bf16_rows.h"
#include "kernels.h"
#include "parallel.h"
#include "rotate.h"
#include "simd.h"

/* Elements that are worth claiming by themselves, some microseconds. */
#define PIECE_ELEMENTS (1 << 14)


struct norm {
    const float *x;
    ptrdiff_t rows, inner, outer_stride, inner_stride, size;
    const float *residual, *weight;
    float eps, offset;
    float *out, *sum;
    uint16_t *rounded; /* bfloat16 rows in place of out, or NULL */
    ptrdiff_t rounded_stride;
};

static void norm_row(const struct norm *p, ptrdiff_t row) {
    const float *x = p->x + row / p->inner * p->outer_stride + row % p->inner * p->inner_stride;
    float *out = p->rounded ? thread_scratch(p->size * sizeof *out) : p->out + row * p->size;
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
#if HAVE_AMX_BF16
    if (p->rounded) bf16_round_row(out, p->size, p->rounded + row * p->rounded_stride);
#endif
}

static void norm_rows(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct norm *p = arg;
    for (; first < last; first++) norm_row(p, first);
}

/* Row r of x starts at r / inner * outer_stride + r % inner * inner_stride; residual (or NULL), out and sum are contiguous. */
void twofold_rms_norm(const float *x, ptrdiff_t rows, ptrdiff_t inner, ptrdiff_t outer_stride, ptrdiff_t inner_stride, ptrdiff_t size,
                      const float *residual, const float *weight, float eps, float offset, float *out, float *sum) {
    struct norm p = {x, rows, inner, outer_stride, inner_stride, size, residual, weight, eps, offset, out, sum, NULL, 0};
    team_run(norm_rows, &p, rows, team_grain(PIECE_ELEMENTS, size));
}

/* The same with results rounded to bfloat16, 0 beyond `size` to whole steps of STEP_K; out_stride in elements. For processors where
   twofold_bf16_tiles() says yes. */
void twofold_rms_norm_rounded(const float *x, ptrdiff_t rows, ptrdiff_t inner, ptrdiff_t outer_stride, ptrdiff_t inner_stride,
                              ptrdiff_t size, const float *residual, const float *weight, float eps, float offset, uint16_t *out,
                              ptrdiff_t out_stride, float *sum) {
    struct norm p = {x, rows, inner, outer_stride, inner_stride, size, residual, weight, eps, offset, NULL, sum, out, out_stride};
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
    if (!p->interleaved) {
        rotate_halves(x, cosine, sine, p->half);
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

struct gated {
    const float *x;
    ptrdiff_t rows, stride, size;
    float *out;
};

/* Each gate's activation times its up, by a function of vectors and one for the last few elements. */
INLINE void gated_rows(const struct gated *p, ptrdiff_t row, ptrdiff_t last, vf (*vector)(vf), float (*single)(float)) {
    ptrdiff_t whole = vector ? p->size / LANES * LANES : 0;
    for (; row < last; row++) {
        const float *gate = p->x + row * p->stride, *up = gate + p->size;
        float *out = p->out + row * p->size;
        for (ptrdiff_t i = 0; i < whole; i += LANES) store(out + i, vector(load(gate + i)) * load(up + i));
        for (ptrdiff_t i = whole; i < p->size; i++) out[i] = single(gate[i]) * up[i];
    }
}

INLINE float silu_single(float g) { return g / (1.0f + expf(-g)); }

static void silu_rows(void *arg, ptrdiff_t row, ptrdiff_t last) { gated_rows(arg, row, last, silu, silu_single); }

INLINE float gelu_tanh_single(float g) { return g / (1.0f + expf(-GELU_SLOPE * (g + GELU_CUBE * g * g * g))); }

static void gelu_tanh_rows(void *arg, ptrdiff_t row, ptrdiff_t last) {
    gated_rows(arg, row, last, gelu_tanh, gelu_tanh_single);
}

/* By the error function. */
INLINE float gelu_single(float g) { return 0.5f * g * (1.0f + erff(g * 0.70710678f)); }

static void gelu_rows(void *arg, ptrdiff_t row, ptrdiff_t last) { gated_rows(arg, row, last, NULL, gelu_single); }

void twofold_gelu_and_mul(const float *x, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t size, int approximate, float *out) {
    struct gated p = {x, rows, stride, size, out};
    team_run(approximate ? gelu_tanh_rows : gelu_rows, &p, rows, team_grain(PIECE_ELEMENTS, 4 * size));
}

struct cap {
    float *x;
    float limit;
};

static void cap_elements(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct cap *p = arg;
    ptrdiff_t i = first;
    for (; i + LANES <= last; i += LANES) store(p->x + i, capped(load(p->x + i), p->limit));
    for (; i < last; i++) p->x[i] = p->limit * tanhf(p->x[i] / p->limit);
}

/* limit * tanh(x / limit), in place. Pieces are whole vectors, so that the elements' order of work is always the same. */
void twofold_soft_cap(float *x, ptrdiff_t count, float limit) {
    struct cap p = {x, limit};
    team_run(cap_elements, &p, count, PIECE_ELEMENTS);
}

struct sigmoid_gate {
    float *x;
    const float *gates;
    ptrdiff_t size;
};

static void gate_rows(void *arg, ptrdiff_t row, ptrdiff_t last) {
    const struct sigmoid_gate *p = arg;
    for (; row < last; row++) {
        float *x = p->x + row * p->size, factor = 1.0f / (1.0f + expf(-p->gates[row]));
        for (ptrdiff_t i = 0; i < p->size; i++) x[i] *= factor;
    }
}

/* Each row of x [rows][size] times the logistic function of its gate, in place. */
void twofold_sigmoid_gate(float *x, const float *gates, ptrdiff_t rows, ptrdiff_t size) {
    struct sigmoid_gate p = {x, gates, size};
    team_run(gate_rows, &p, rows, team_grain(PIECE_ELEMENTS, size));
}

void twofold_silu_and_mul(const float *x, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t size, float *out) {
    struct gated p = {x, rows, stride, size, out};
    team_run(silu_rows, &p, rows, team_grain(PIECE_ELEMENTS, 4 * size));
}
