/* What torch does between the kernels of a step, for recorded ones: copies, gathers, sums; all float32. */
#include <stdint.h>
#include <string.h>

#include "parallel.h"

/* Elements that are worth claiming by themselves, some microseconds. */
#define PIECE_ELEMENTS (1 << 14)

struct rows {
    const float *x, *y;
    const int64_t *places;
    ptrdiff_t inner, size, x_outer, x_inner, out_outer, out_inner;
    float factor;
    float *out;
};

static void copy_rows(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct rows *p = arg;
    for (ptrdiff_t r = first; r < last; r++)
        memcpy(p->out + r / p->inner * p->out_outer + r % p->inner * p->out_inner,
               p->x + r / p->inner * p->x_outer + r % p->inner * p->x_inner, (size_t)p->size * sizeof(float));
}

/* Row (i, j) of x, `size` contiguous elements from i * x_outer + j * x_inner on, to that of out. */
void twofold_copy(const float *x, ptrdiff_t outer, ptrdiff_t inner, ptrdiff_t size, ptrdiff_t x_outer, ptrdiff_t x_inner, float *out,
                  ptrdiff_t out_outer, ptrdiff_t out_inner) {
    struct rows p = {.x = x, .inner = inner, .size = size, .x_outer = x_outer, .x_inner = x_inner, .out = out,
                     .out_outer = out_outer, .out_inner = out_inner};
    team_run(copy_rows, &p, outer * inner, team_grain(PIECE_ELEMENTS, size));
}

static void gather_rows(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct rows *p = arg;
    for (ptrdiff_t r = first; r < last; r++)
        memcpy(p->out + r * p->size, p->x + p->places[r] * p->x_outer, (size_t)p->size * sizeof(float));
}

/* out [rows][size]: rows `places` of x. */
void twofold_gather_rows(const float *x, ptrdiff_t stride, const int64_t *places, ptrdiff_t rows, ptrdiff_t size, float *out) {
    struct rows p = {.x = x, .places = places, .size = size, .x_outer = stride, .out = out};
    team_run(gather_rows, &p, rows, team_grain(PIECE_ELEMENTS, size));
}

static void gather_columns(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct rows *p = arg;
    for (ptrdiff_t r = first; r < last; r++)
        for (ptrdiff_t i = 0; i < p->size; i++) p->out[r * p->size + i] = p->x[r * p->x_outer + p->places[i]];
}

/* out [rows][size]: columns `places` [size] of x. */
void twofold_gather_columns(const float *x, ptrdiff_t stride, const int64_t *places, ptrdiff_t rows, ptrdiff_t size, float *out) {
    struct rows p = {.x = x, .places = places, .size = size, .x_outer = stride, .out = out};
    team_run(gather_columns, &p, rows, team_grain(PIECE_ELEMENTS, size));
}

static void scale(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct rows *p = arg;
    for (ptrdiff_t i = first; i < last; i++) p->out[i] = p->x[i] * p->factor;
}

/* out may be x; both contiguous. */
void twofold_scale(const float *x, ptrdiff_t count, float factor, float *out) {
    struct rows p = {.x = x, .factor = factor, .out = out};
    team_run(scale, &p, count, PIECE_ELEMENTS);
}

static void add(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct rows *p = arg;
    for (ptrdiff_t i = first; i < last; i++) p->out[i] = p->x[i] + p->y[i];
}

/* out may be x or y; all contiguous. */
void twofold_add(const float *x, const float *y, ptrdiff_t count, float *out) {
    struct rows p = {.x = x, .y = y, .out = out};
    team_run(add, &p, count, PIECE_ELEMENTS);
}
