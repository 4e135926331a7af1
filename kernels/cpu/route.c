/* Which experts a token goes to: the softmax of its logits and the best of them. */
#include <math.h>
#include <stdint.h>

#include "parallel.h"

/* Comparisons that are worth claiming by themselves, some microseconds. */
#define PIECE_WORK (1 << 13)

struct route {
    const float *logits;
    ptrdiff_t stride, experts, top_k;
    int renormalize;
    float *weights;
    int32_t *ids;
};

static void softmax(const float *logits, ptrdiff_t experts, float *scores) {
    float top = logits[0], total = 0.0f;
    for (ptrdiff_t e = 1; e < experts; e++) top = logits[e] > top ? logits[e] : top;
    for (ptrdiff_t e = 0; e < experts; e++) total += scores[e] = expf(logits[e] - top);
    for (ptrdiff_t e = 0; e < experts; e++) scores[e] /= total;
}

static void route_tokens(void *arg, ptrdiff_t token, ptrdiff_t last) {
    const struct route *p = arg;
    float *scores = thread_scratch((size_t)p->experts * sizeof(float));
    for (; token < last; token++) {
        float *weights = p->weights + token * p->top_k, total = 0.0f;
        int32_t *ids = p->ids + token * p->top_k;
        softmax(p->logits + token * p->stride, p->experts, scores);
        for (ptrdiff_t k = 0; k < p->top_k; k++) {
            /* A chosen one has a negative score; one that is no number is never better than another. */
            ptrdiff_t best = 0;
            for (ptrdiff_t e = 1; e < p->experts; e++)
                if (scores[e] > scores[best] || (scores[best] < 0.0f && !(scores[e] < 0.0f))) best = e;
            ids[k] = (int32_t)best;
            total += weights[k] = scores[best];
            scores[best] = -1.0f;
        }
        for (ptrdiff_t k = 0; p->renormalize && k < p->top_k; k++) weights[k] /= total + 1e-20f;
    }
}

/* logits [tokens][stride] -> weights and ids [tokens][top_k], best first; of equal ones the lower id. */
void twofold_moe_route(const float *logits, ptrdiff_t tokens, ptrdiff_t stride, ptrdiff_t experts, ptrdiff_t top_k, int renormalize,
                       float *weights, int32_t *ids) {
    struct route p = {logits, stride, experts, top_k, renormalize, weights, ids};
    team_run(route_tokens, &p, tokens, team_grain(PIECE_WORK, experts * top_k));
}
