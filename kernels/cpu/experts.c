/* Products with experts: the rows that go to an expert are brought together, all experts' products are one region of the team,
   and the results go back to their places or into the sum over a token's experts. Every row is computed as linear.c computes it
   alone. */
#include <stdlib.h>
#include <string.h>

#include "linear.h"
#include "parallel.h"
#include "round_rows.h"

/* Floats that are worth copying by themselves. */
#define PIECE_FLOATS (1 << 14)

/* In the order of experts.py. */
enum { TOKENS, TOP_K, EXPERTS, IN, OUT, X_STRIDE, CHOICES_PER_ROW, WORDS, GROUPS, GROUP_SIZE, BITS, SCALE_TYPE };
/* An expert's tensors: floats or codes, scales, zeros or NULL, offsets or NULL, and the input feature (int64) of each column or
   NULL. */
enum { WEIGHT, SCALES, ZEROS, OFFSETS, PERM, NUM_TENSORS };

struct experts {
    const ptrdiff_t *sizes;
    const void *const *tensors; /* [EXPERTS][NUM_TENSORS] */
    const float *x;
    const int32_t *ids;
    const ptrdiff_t *rounding; /* of the inputs, or NULL; with each expert's stored scale and zero */
    const float *input_scales, *input_zeros;
    const ptrdiff_t *int8_sizes; /* of products with inputs in 8 bits, or NULL; and what these write to */
    const ptrdiff_t *bf16_sizes; /* of products in bfloat16, or NULL */
    void *workspace;
    ptrdiff_t *place; /* of a choice among the rows sorted by expert, -1: no expert */
    float *inputs, *rows;
    const float *routing;
    float *out;
    struct linear *linears;
    ptrdiff_t *first_item; /* of each linear, and the end */
    ptrdiff_t num_linears;
};

static ptrdiff_t num_choices(const struct experts *e) { return e->sizes[TOKENS] * e->sizes[TOP_K]; }

static const float *input_of(const struct experts *e, ptrdiff_t choice) {
    return e->x + choice / e->sizes[CHOICES_PER_ROW] * e->sizes[X_STRIDE];
}

static int is_expert(const struct experts *e, int32_t id) { return id >= 0 && id < e->sizes[EXPERTS]; }

/* Where each choice lies when they are sorted by expert, and where each expert's begin: starts [EXPERTS + 1]. */
static void sort_choices(const struct experts *e, ptrdiff_t *starts) {
    ptrdiff_t experts = e->sizes[EXPERTS], choices = num_choices(e);
    memset(starts, 0, (experts + 1) * sizeof *starts);
    for (ptrdiff_t c = 0; c < choices; c++)
        if (is_expert(e, e->ids[c])) starts[e->ids[c] + 1]++;
    for (ptrdiff_t i = 0; i < experts; i++) starts[i + 1] += starts[i];
    for (ptrdiff_t c = 0; c < choices; c++) e->place[c] = is_expert(e, e->ids[c]) ? starts[e->ids[c]]++ : -1;
    for (ptrdiff_t i = experts; i > 0; i--) starts[i] = starts[i - 1];
    starts[0] = 0;
}

static void gather(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct experts *e = arg;
    ptrdiff_t columns = e->sizes[IN];
    for (ptrdiff_t c = first; c < last; c++) {
        if (e->place[c] < 0) continue;
        const float *x = input_of(e, c);
        const int64_t *perm = e->int8_sizes || e->bf16_sizes ? NULL : e->tensors[e->ids[c] * NUM_TENSORS + PERM];
        float *row = e->inputs + e->place[c] * columns;
        if (perm)
            for (ptrdiff_t k = 0; k < columns; k++) row[k] = x[perm[k]];
        else
            memcpy(row, x, columns * sizeof *row);
        if (e->rounding) round_row(e->rounding, row, columns, e->input_scales[e->ids[c]], e->input_zeros[e->ids[c]], row);
    }
}

static struct linear linear_of(const struct experts *e, ptrdiff_t expert, ptrdiff_t first, ptrdiff_t rows) {
    const ptrdiff_t *s = e->sizes;
    const void *const *tensors = e->tensors + expert * NUM_TENSORS;
    struct linear p = {.x = e->inputs + first * s[IN], .x_stride = s[IN], .rows = rows, .in_features = s[IN], .out_features = s[OUT],
                       .y = e->rows + first * s[OUT], .y_stride = s[OUT]};
    if (s[BITS] == 0) {
        p.weight = tensors[WEIGHT];
        return p;
    }
    p.codes = tensors[WEIGHT];
    p.scales = tensors[SCALES];
    p.zeros = tensors[ZEROS];
    p.offsets = tensors[OFFSETS];
    p.words = s[WORDS];
    p.groups = s[GROUPS];
    p.group_size = s[GROUP_SIZE];
    p.bits = (int)s[BITS];
    p.scale_type = (enum float_type)s[SCALE_TYPE];
    return p;
}

/* One linear for each expert with rows. Returns how many items make a piece. */
static ptrdiff_t list_linears(struct experts *e, const ptrdiff_t *starts) {
    ptrdiff_t panels = 0, items = 0, grain = 0;
    for (ptrdiff_t i = 0; i < e->sizes[EXPERTS]; i++)
        if (starts[i + 1] > starts[i]) {
            struct linear *p = &e->linears[e->num_linears++];
            *p = linear_of(e, i, starts[i], starts[i + 1] - starts[i]);
            panels += linear_grid(p);
        }
    for (ptrdiff_t i = 0; i < e->num_linears; i++) {
        struct linear *p = &e->linears[i];
        p->piece_panels = linear_piece(panels);
        e->first_item[i] = items;
        items += linear_num_items(p);
        ptrdiff_t own = linear_item_grain(p);
        grain = grain && grain < own ? grain : own;
    }
    e->first_item[e->num_linears] = items;
    return grain;
}

static void multiply(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct experts *e = arg;
    ptrdiff_t i = 0;
    while (first < last) {
        while (e->first_item[i + 1] <= first) i++;
        ptrdiff_t end = last < e->first_item[i + 1] ? last : e->first_item[i + 1];
        linear_run_items(&e->linears[i], first - e->first_item[i], end - e->first_item[i]);
        first = end;
    }
}

static void multiply_floats(struct experts *e, const ptrdiff_t *starts) {
    ptrdiff_t grain = list_linears(e, starts);
    team_run(multiply, e, e->first_item[e->num_linears], grain);
}

/* Expert after expert, each with the whole team. */
static void multiply_one_by_one(struct experts *e, const ptrdiff_t *starts) {
    for (ptrdiff_t i = 0; i < e->sizes[EXPERTS]; i++) {
        const float *x = e->inputs + starts[i] * e->sizes[IN];
        float *y = e->rows + starts[i] * e->sizes[OUT];
        const void *const *tensors = e->tensors + i * NUM_TENSORS;
        const ptrdiff_t rows = starts[i + 1] - starts[i];
        if (rows == 0) continue;
        if (e->int8_sizes)
            twofold_linear_int8(x, e->sizes[IN], rows, tensors, e->int8_sizes, e->input_scales[i], e->workspace, NULL, y, NO_GATE);
        else
            twofold_linear_bf16(x, e->sizes[IN], rows, tensors, e->bf16_sizes, e->workspace, NULL, y);
    }
}

static void scatter(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct experts *e = arg;
    ptrdiff_t width = e->sizes[OUT];
    for (ptrdiff_t c = first; c < last; c++)
        if (e->place[c] < 0)
            memset(e->out + c * width, 0, width * sizeof *e->out);
        else
            memcpy(e->out + c * width, e->rows + e->place[c] * width, width * sizeof *e->out);
}

static void add_up(void *arg, ptrdiff_t first, ptrdiff_t last) {
    const struct experts *e = arg;
    ptrdiff_t width = e->sizes[OUT], top_k = e->sizes[TOP_K];
    for (ptrdiff_t t = first; t < last; t++) {
        float *restrict sum = e->out + t * width;
        memset(sum, 0, width * sizeof *sum);
        for (ptrdiff_t c = t * top_k; c < (t + 1) * top_k; c++) {
            if (e->place[c] < 0) continue;
            const float *restrict row = e->rows + e->place[c] * width;
            float weight = e->routing[c];
            for (ptrdiff_t n = 0; n < width; n++) sum[n] += weight * row[n];
        }
    }
}

/* `rounding` as in round_rows.h, with a scale and a zero for each expert; NULL: inputs stay as they are. `int8_sizes` and
   `workspace` as in linear_int8.c, with a scale for each expert, or `bf16_sizes` as in linear_bf16.c; both NULL: sums of floats.
   out [TOKENS][TOP_K][OUT], or with `routing` [TOKENS][TOP_K] the weighted sums [TOKENS][OUT]. `inputs` [TOKENS * TOP_K][IN] and
   `rows` [TOKENS * TOP_K][OUT] are for this call alone. Returns 0, or -1 without memory. */
int twofold_expert_linear(const ptrdiff_t *sizes, const void *const *tensors, const ptrdiff_t *rounding, const float *input_scales,
                          const float *input_zeros, const ptrdiff_t *int8_sizes, const ptrdiff_t *bf16_sizes,
                          void *workspace, const float *x, const int32_t *ids, float *inputs, float *rows, const float *routing,
                          float *out) {
    struct experts e = {.sizes = sizes, .tensors = tensors, .rounding = rounding, .input_scales = input_scales,
                        .input_zeros = input_zeros, .int8_sizes = int8_sizes, .bf16_sizes = bf16_sizes,
                        .workspace = workspace, .x = x, .ids = ids, .inputs = inputs, .rows = rows, .routing = routing, .out = out};
    ptrdiff_t choices = num_choices(&e), experts = sizes[EXPERTS];
    ptrdiff_t *numbers = malloc((choices + 2 * (experts + 1)) * sizeof *numbers);
    e.linears = malloc((experts + 1) * sizeof *e.linears);
    if (!numbers || !e.linears) {
        free(numbers);
        free(e.linears);
        return -1;
    }
    ptrdiff_t *starts = numbers + choices;
    e.place = numbers;
    e.first_item = starts + experts + 1;
    sort_choices(&e, starts);
    team_run(gather, &e, choices, team_grain(PIECE_FLOATS, sizes[IN]));
    if (int8_sizes || bf16_sizes)
        multiply_one_by_one(&e, starts);
    else
        multiply_floats(&e, starts);
    if (routing)
        team_run(add_up, &e, sizes[TOKENS], team_grain(PIECE_FLOATS, sizes[OUT] * sizes[TOP_K]));
    else
        team_run(scatter, &e, choices, team_grain(PIECE_FLOATS, sizes[OUT]));
    free(numbers);
    free(e.linears);
    return 0;
}
