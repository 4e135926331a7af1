/* y = x W^T + bias with x and W in bfloat16 and sums in float32, in tile registers.

   Over all of K each sum is one sum, 32 features after the other, whatever the number of rows. So a row's result depends neither on
   its batch nor on the way a weight was expanded: step by step as it is used, for few rows (linear_bf16_few.c), or a group of
   panels at once for many (linear_bf16_many.c). */
#include "bf16_rows.h"
#include "bf16_tiles.h"

#if HAVE_AMX_BF16
/* Floats of x that are worth rounding by themselves: some microseconds. */
#define PIECE_FLOATS (1 << 14)

/* x for a product of many rows. */
static void round_rows(void *arg, ptrdiff_t row, ptrdiff_t last) {
    const struct bf16_product *p = arg;
    for (; row < last; row++) {
        uint8_t *out = p->tiles + row * bf16_row_bytes(p->w.steps);
        for (ptrdiff_t s = 0; s < p->w.steps; s++)
            _mm512_storeu_ps(out + s * STEP_BYTES, round_step(p, p->x + row * p->x_stride, s * STEP_K));
    }
}
#endif

/* Whether this processor has the tiles, the compiler used them, and the system allows it: 1 or 0. */
int twofold_bf16_tiles(void) {
#if HAVE_AMX_BF16
    return amx_allowed();
#else
    return 0;
#endif
}

/* In the order of linear_bf16.py. */
enum { IN_FEATURES, OUT_FEATURES, STEPS, STEP_SIZE, GROUPS, GROUP_SIZE, KIND, CODING, CENTRE, SCALE_TYPE };
enum { CODES, SCALES, ZEROS, OFFSETS, PERM };

#if HAVE_AMX_BF16
static struct bf16_product product_of(ptrdiff_t rows, const void *const *tensors, const ptrdiff_t *sizes, const float *bias, float *y) {
    return (struct bf16_product){
        .w = {.codes = tensors[CODES], .scales = tensors[SCALES], .zeros = tensors[ZEROS], .offsets = tensors[OFFSETS],
              .scale_type = (enum float_type)sizes[SCALE_TYPE], .kind = (enum step_kind)sizes[KIND],
              .coding = (enum bf16_coding)sizes[CODING], .centre = (float)sizes[CENTRE], .steps = sizes[STEPS],
              .step_bytes = sizes[STEP_SIZE], .groups = sizes[GROUPS], .group_size = sizes[GROUP_SIZE]},
        .rows = rows, .in_features = sizes[IN_FEATURES], .out_features = sizes[OUT_FEATURES], .perm = tensors[PERM], .bias = bias, .y = y};
}
#endif

/* y [rows][OUT_FEATURES], contiguous. tensors: steps as of twofold_pack_bf16_steps, and the rest as in linear_int8.c. workspace:
   bf16_row_bytes for each row, of few rows in multiples of AMX_ROWS. For processors where twofold_bf16_tiles() says yes. */
void twofold_linear_bf16(const float *x, ptrdiff_t x_stride, ptrdiff_t rows, const void *const *tensors, const ptrdiff_t *sizes,
                         void *workspace, const float *bias, float *y) {
#if HAVE_AMX_BF16
    if (rows == 0 || !amx_allowed()) return;
    struct bf16_product p = product_of(rows, tensors, sizes, bias, y);
    p.x = x;
    p.x_stride = x_stride;
    p.tiles = workspace;
    if (rows <= FEW_ROWS) {
        linear_bf16_few(&p);
        return;
    }
    team_run(round_rows, &p, rows, team_grain(PIECE_FLOATS, p.in_features));
    linear_bf16_many(&p, (struct bf16_rows){p.tiles, bf16_row_bytes(p.w.steps)}, NULL);
#else
    (void)x, (void)x_stride, (void)rows, (void)tensors, (void)sizes, (void)workspace, (void)bias, (void)y;
#endif
}

/* The same for x in bfloat16, 0 beyond K to whole steps of STEP_K; x_stride in elements. Without PERM. */
void twofold_linear_bf16_rounded(const uint16_t *x, ptrdiff_t x_stride, ptrdiff_t rows, const void *const *tensors,
                                 const ptrdiff_t *sizes, const float *bias, float *y) {
#if HAVE_AMX_BF16
    if (rows == 0 || !amx_allowed()) return;
    struct bf16_product p = product_of(rows, tensors, sizes, bias, y);
    linear_bf16_many(&p, (struct bf16_rows){x, x_stride * (ptrdiff_t)sizeof *x}, NULL);
#else
    (void)x, (void)x_stride, (void)rows, (void)tensors, (void)sizes, (void)bias, (void)y;
#endif
}

/* The same with silu of y's first half times the second, rounded to bfloat16: out [rows][OUT_FEATURES / 2], a multiple of PANEL;
   out_stride in elements. */
void twofold_gated_bf16(const uint16_t *x, ptrdiff_t x_stride, ptrdiff_t rows, const void *const *tensors, const ptrdiff_t *sizes,
                        const float *bias, uint16_t *out, ptrdiff_t out_stride) {
#if HAVE_AMX_BF16
    if (rows == 0 || !amx_allowed()) return;
    struct bf16_product p = product_of(rows, tensors, sizes, bias, NULL);
    linear_bf16_many(&p, (struct bf16_rows){x, x_stride * (ptrdiff_t)sizeof *x}, &(struct bf16_gate){out, out_stride});
#else
    (void)x, (void)x_stride, (void)rows, (void)tensors, (void)sizes, (void)bias, (void)out, (void)out_stride;
#endif
}
