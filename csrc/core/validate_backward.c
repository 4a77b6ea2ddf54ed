/* Validates backwards: their gradients, and the arguments of their forwards. */
#include "core/check.h"

/* ---- gradients ---- */

/* State of the checks of factor and bias gradients. */
typedef struct gradients {
  moelora_arguments rows;
  moelora_dtype dtype;
  moelora_arg pairs;  /* tensor NULL: no gradient is sparse */
  int64_t num_sparse; /* -1: not known yet */
} gradients;

/* Checks the gradient of `like`, which has the same shape unless it is sparse. */
static moelora_status check_gradient(gradients *all, moelora_arg arg, moelora_arg like,
                                     const char *layout, moelora_gradient *gradient) {
  const moelora_tensor *t = arg.tensor;
  const moelora_dtype dtype = all->dtype;
  *gradient = (moelora_gradient){0};
  if (moelora_is_absent(t))
    return MOELORA_OK;
  MOELORA_REQUIRE(!moelora_is_absent(like.tensor), "%s is given, but %s is absent",
                  moelora_label_of(arg).text, moelora_label_of(like).text);
  MOELORA_TRY(moelora_check_view(arg, layout));
  MOELORA_REQUIRE(t->dtype == dtype || t->dtype == MOELORA_F32,
                  "%s has dtype %s, expected float32%s%s", moelora_label_of(arg).text,
                  moelora_dtype_name(t->dtype), dtype == MOELORA_F32 ? "" : " or ",
                  dtype == MOELORA_F32 ? "" : moelora_dtype_name(dtype));
  const bool factor = t->ndim == 4;
  const bool sparse =
      factor && all->pairs.tensor && like.tensor->size[1] == all->pairs.tensor->size[1];
  for (int32_t i = sparse ? 2 : 0; i < t->ndim; i++)
    MOELORA_TRY(moelora_check_size(arg, i, moelora_size_of(like, i)));
  if (sparse) {
    if (all->num_sparse < 0)
      all->num_sparse = t->size[1];
    MOELORA_TRY(moelora_check_size(all->pairs, 0, moelora_size_of(like, 0)));
    MOELORA_TRY(moelora_check_size(arg, 0, moelora_words(1, "the first size of sparse gradients")));
    MOELORA_TRY(moelora_check_size(
        arg, 1, moelora_words(all->num_sparse, "the number of sparse gradients of others")));
  }
  MOELORA_TRY(moelora_check_rows(arg));
  *gradient = (moelora_gradient){
      .data = t->data,
      .dtype = t->dtype,
      .loras = factor ? (int32_t)t->size[0] : 1,
      .experts = (int32_t)t->size[factor ? 1 : 0],
      .rows = factor ? t->size[2] : 1,
      .columns = t->size[t->ndim - 1],
      .stride_l = factor ? moelora_stride(t, 0) : 0,
      .stride_e = moelora_stride(t, factor ? 1 : 0),
      .stride_i = factor ? moelora_stride(t, 2) : 0,
      .sparse = sparse,
  };
  return MOELORA_OK;
}

/* Prepares to check the gradients of a call with activations `x`. */
static void begin_gradients(const moelora_tensor *x, const moelora_tensor *pairs, gradients *all) {
  all->dtype = x->dtype;
  all->num_sparse = -1;
  all->pairs = moelora_is_absent(pairs) ? (moelora_arg){0} : MOELORA_ARG("grads.pairs", pairs);
}

/* Checks the sizes and the memory of all arguments, and fills the table of sparse gradients, if
 * any. */
static moelora_status finish_gradients(gradients *all, moelora_gradient_pairs *table) {
  const moelora_tensor *pairs = all->pairs.tensor;
  if (all->num_sparse >= 0)
    *table = (moelora_gradient_pairs){pairs->data, pairs->size[0] * pairs->size[1],
                                      (int32_t)all->num_sparse};
  MOELORA_TRY(moelora_check_fit(&all->rows));
  return pairs ? moelora_check_contiguous(all->pairs) : MOELORA_OK;
}

static moelora_status check_factor_gradients(gradients *all, const moelora_lora *grads,
                                             const moelora_lora *factors, moelora_gradient *a,
                                             moelora_gradient *b) {
  const moelora_row *row = moelora_row_of(&all->rows, grads);
  const moelora_row *like = moelora_row_of(&all->rows, factors);
  MOELORA_REQUIRE(grads->num_slices == 0 || grads->num_slices == factors->num_slices,
                  "%s has %d slices, %s has %d", moelora_entry(row->name, 0, &grads->a[0]).name,
                  grads->num_slices, moelora_entry(like->name, 0, &factors->a[0]).name,
                  factors->num_slices);
  for (int32_t i = 0; i < grads->num_slices; i++) {
    MOELORA_TRY(check_gradient(all, moelora_entry(row->name, i, &grads->a[i]),
                               moelora_entry(like->name, i, &factors->a[i]),
                               "[max_loras, E or 1, R, K]", &a[i]));
    MOELORA_TRY(check_gradient(all, moelora_entry(row->name_b, i, &grads->b[i]),
                               moelora_entry(like->name_b, i, &factors->b[i]),
                               "[max_loras, E or 1, N, R]", &b[i]));
  }
  return MOELORA_OK;
}

static moelora_status check_bias_gradient(gradients *all, const moelora_tensor *grad,
                                          const moelora_tensor *bias, moelora_gradient *gradient) {
  const moelora_row *row = moelora_row_of(&all->rows, grad);
  return check_gradient(all, MOELORA_ARG(row->name, grad),
                        MOELORA_ARG(moelora_row_of(&all->rows, bias)->name, bias), row->shape,
                        gradient);
}

moelora_status moelora_check_experts_backward(const moelora_experts_backward_args *args,
                                              moelora_experts_backward_problem *problem) {
  const moelora_experts_args *forward = &args->forward;
  const moelora_experts_grads *grads = &args->grads;
  *problem = (moelora_experts_backward_problem){.accumulate = args->accumulate,
                                                .overwrites_gate_up = args->overwrites_gate_up};
  gradients all;
  MOELORA_TRY(moelora_begin_experts_backward(args, &all.rows));
  if (args->overwrites_gate_up)
    all.rows.written = &forward->saved.gate_up;
  MOELORA_TRY(moelora_check_layer(&all.rows, forward, &problem->forward));
  MOELORA_TRY(moelora_check_saved(&all.rows, forward, &problem->forward));
  problem->dout = moelora_take_view(&args->dout, &problem->dout_stride, 1);
  problem->dx = moelora_take_view(&grads->hidden_states, &problem->dx_stride, 1);
  problem->dtopk_weights =
      moelora_take_view(&grads->topk_weights, problem->dtopk_weights_stride, 2);
  begin_gradients(&forward->hidden_states, &grads->pairs, &all);
  MOELORA_TRY(check_factor_gradients(&all, &grads->w13_lora, &forward->w13_lora, problem->a13,
                                     problem->b13));
  MOELORA_TRY(
      check_factor_gradients(&all, &grads->w2_lora, &forward->w2_lora, &problem->a2, &problem->b2));
  MOELORA_TRY(check_bias_gradient(&all, &grads->w13_bias, &forward->w13_bias, &problem->bias13));
  MOELORA_TRY(check_bias_gradient(&all, &grads->w2_bias, &forward->w2_bias, &problem->bias2));
  return finish_gradients(&all, &problem->pairs);
}

/* ---- a projection ---- */

moelora_status moelora_check_gemm_backward(const moelora_gemm_backward_args *args,
                                           moelora_gemm_backward_problem *problem) {
  const moelora_gemm_args *forward = &args->forward;
  const moelora_gemm_grads *grads = &args->grads;
  *problem = (moelora_gemm_backward_problem){.accumulate = args->accumulate};
  gradients all;
  MOELORA_TRY(moelora_begin_gemm_backward(args, &all.rows));
  all.rows.written = &args->dout; /* rows of dout must not overlap, like those of `out` */
  MOELORA_TRY(moelora_check_projection(&all.rows, forward, &args->num_experts, &problem->forward));
  problem->dout = moelora_take_view(&args->dout, problem->dout_stride, 2);
  problem->dx = moelora_take_view(&grads->x, &problem->dx_stride, 1);
  problem->dtopk_weights =
      moelora_take_view(&grads->topk_weights, problem->dtopk_weights_stride, 2);
  moelora_name_size(&all.rows, "rows of x", moelora_size_of(MOELORA_ARG("x", &forward->x), 0));
  begin_gradients(&forward->x, &grads->pairs, &all);
  MOELORA_TRY(check_factor_gradients(&all, &grads->lora, &forward->lora, problem->a, problem->b));
  MOELORA_TRY(check_bias_gradient(&all, &grads->bias, &forward->bias, &problem->bias));
  return finish_gradients(&all, &problem->pairs);
}
