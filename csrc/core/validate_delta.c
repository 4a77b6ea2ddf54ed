/* Validates deltas, LoRA without a base product: by routing or by vLLM's lists, shrink, expand or
 * both; and SGLang's MLP. */
#include "core/check.h"

/* ---- one projection ---- */

/* Takes the number of rows from topk_ids; or, for lists, from num_tokens and top_k. */
static moelora_status take_extents(moelora_arguments *all, const moelora_delta_args *args,
                                   moelora_routes *routes) {
  routes->num_experts = args->num_experts;
  if (moelora_is_absent(&args->lists.sorted_token_ids)) {
    MOELORA_TRY(moelora_check_present(all, &args->routing.topk_ids));
    return moelora_take_routing(all, &args->routing, args->mul_routed_weight, routes);
  }
  MOELORA_REQUIRE(args->num_tokens >= 0 && args->top_k >= 1 &&
                      args->num_tokens <= INT32_MAX / args->top_k,
                  "num_tokens is %lld and top_k is %d, expected top_k of at least 1 and at most "
                  "2147483647 rows",
                  (long long)args->num_tokens, args->top_k);
  return moelora_take_rows(all, moelora_words(args->num_tokens, "the number of tokens"),
                           moelora_words(args->top_k, "top_k"), &args->routing,
                           args->mul_routed_weight, routes);
}

static moelora_status check_columns(const moelora_delta_args *args,
                                    moelora_delta_problem *problem) {
  const moelora_arg out = MOELORA_ARG("out", &args->out);
  const bool summed = args->out.ndim == 2;
  problem->columns = problem->lora.column[problem->lora.num_slices];
  const int64_t columns = args->silu_and_mul ? problem->columns / 2 : problem->columns;
  const int64_t width = args->out.size[summed ? 1 : 2];
  MOELORA_REQUIRE(problem->columns == problem->lora.num_slices * problem->lora.slice_n ||
                      problem->columns == width,
                  "slices of lora_b have different numbers of columns, %lld in all, expected the "
                  "%lld of %s",
                  (long long)problem->columns, (long long)width, out.name);
  if (args->silu_and_mul)
    MOELORA_REQUIRE(!args->add_inputs && !args->mul_routed_weight && !summed &&
                        args->out_offset == 0 && width == columns && problem->columns % 2 == 0,
                    "silu_and_mul takes an even number of columns and writes half of them to a "
                    "3-D %s of as many, without add_inputs, mul_routed_weight and out_offset; "
                    "there are %lld columns, %s has %lld",
                    out.name, (long long)problem->columns, out.name, (long long)width);
  MOELORA_REQUIRE(args->out_offset >= 0 && args->out_offset <= width - columns,
                  "offset is %lld, expected 0 or more and at most %lld: %s has %lld columns, the "
                  "slices have %lld",
                  (long long)args->out_offset, (long long)(width - columns), out.name,
                  (long long)width, (long long)columns);
  problem->silu_and_mul = args->silu_and_mul;
  problem->add_inputs = args->add_inputs;
  problem->mul_routed_weight = args->mul_routed_weight;
  problem->sum_top_k = summed;
  if (args->out.data)
    problem->out =
        (char *)args->out.data + (size_t)args->out_offset * moelora_dtype_bytes(problem->dtype);
  moelora_take_view(&args->out, problem->out_stride, summed ? 1 : 2);
  return MOELORA_OK;
}

/* Returns the arguments without those that the mode of the call ignores, which may be invalid. */
static moelora_delta_args without_ignored(const moelora_delta_args *args) {
  moelora_delta_args read = *args;
  if (moelora_is_absent(&args->lists.sorted_token_ids)) {
    read.lists = (moelora_lists){0};
  } else {
    read.routing = (moelora_routing){0};
    read.adapters.token_lora_mapping = (moelora_tensor){0};
    if (args->mul_routed_weight)
      read.routing.topk_weights = args->routing.topk_weights;
  }
  for (int32_t i = 0; i < MOELORA_MAX_SLICES; i++) {
    if (moelora_is_absent(&args->x))
      read.lora.a[i] = (moelora_tensor){0};
    if (moelora_is_absent(&args->out))
      read.lora.b[i] = (moelora_tensor){0};
  }
  return read;
}

moelora_status moelora_check_delta(const moelora_delta_args *given,
                                   moelora_delta_problem *problem) {
  const moelora_delta_args read = without_ignored(given), *args = &read;
  const moelora_arg x = MOELORA_ARG("x", &args->x), h = MOELORA_ARG("h", &args->h);
  const bool has_x = !moelora_is_absent(&args->x), has_h = !moelora_is_absent(&args->h);
  const bool has_out = !moelora_is_absent(&args->out);
  const bool is_listed = !moelora_is_absent(&args->lists.sorted_token_ids);
  const moelora_arg input = has_x ? x : h;
  moelora_routes *routes = &problem->routes;
  *problem = (moelora_delta_problem){0};
  MOELORA_REQUIRE(has_x + has_h + has_out == 2,
                  "%d of x, h and out are given, expected two: x and h, h and out, or x and out",
                  has_x + has_h + has_out);
  moelora_arguments all;
  MOELORA_TRY(moelora_begin_delta(args, &all));
  if (!has_out)
    all.written = h.tensor;
  MOELORA_REQUIRE_DIM(!has_x || args->x.size[1] >= 1, x, size, 1, "expected at least 1");
  problem->dtype = input.tensor->dtype;
  problem->k = has_x ? args->x.size[1] : 0;
  MOELORA_TRY(take_extents(&all, args, routes));

  moelora_factors_arg lora = moelora_factors_alone(input, args->num_experts, MOELORA_MAX_SLICES);
  if (!has_x)
    lora.k.value = 0;
  lora.may_be_wide = lora.widths_differ = has_x && has_out && !is_listed;
  lora.skips_b = !has_out;
  MOELORA_TRY(moelora_check_factors(&all, &args->lora, &lora, &problem->lora));
  moelora_take_adapters(&all, &args->adapters, routes);
  moelora_name_size(&all, "slices",
                    moelora_words(problem->lora.num_slices, "the number of slices"));
  moelora_name_size(&all, "R", moelora_words(problem->lora.max_rank, "the rank of the factors"));
  if (is_listed) {
    MOELORA_TRY(moelora_take_lists(&all, &args->lists, &problem->lists));
  } else {
    moelora_drop_unused_tables(routes);
    MOELORA_TRY(moelora_check_padded_rows(&args->routing, routes, true));
  }
  if (has_out)
    MOELORA_TRY(check_columns(args, problem));
  problem->x = moelora_take_view(&args->x, &problem->x_stride, 1);
  problem->x_per_row = has_x && args->x.size[0] != routes->num_tokens;
  problem->xa = moelora_take_view(&args->h, problem->xa_stride, 3);
  return moelora_check_fit(&all);
}

/* ---- SGLang's adapter MLP ---- */

moelora_status moelora_check_mlp_delta(const moelora_mlp_delta_args *args,
                                       moelora_mlp_delta_problem *problem) {
  const moelora_arg x = MOELORA_ARG("hidden_states", &args->hidden_states);
  const moelora_arg gate_up_b = moelora_entry("gate_up_b", 0, &args->gate_up.b[0]);
  moelora_delta_problem *up = &problem->of[0], *down = &problem->of[1];
  *problem = (moelora_mlp_delta_problem){0};
  moelora_arguments all;
  MOELORA_TRY(moelora_begin_mlp_delta(args, &all));
  MOELORA_REQUIRE_DIM(x.tensor->size[1] >= 1, x, size, 1, "expected at least 1");

  moelora_factors_arg lora = moelora_factors_alone(x, args->num_experts, 2);
  MOELORA_TRY(moelora_check_factors(&all, &args->gate_up, &lora, &up->lora));
  up->columns = up->lora.num_slices * up->lora.slice_n;
  MOELORA_REQUIRE(up->columns % 2 == 0, "%s has %lld columns, expected as many of up as of gate",
                  gate_up_b.name, (long long)up->columns);
  const int64_t intermediate = up->columns / 2;
  lora.most = 1;
  lora.n = moelora_size_of(x, 1);
  lora.k = moelora_words(intermediate, "half of the columns of gate and up");
  MOELORA_TRY(moelora_check_factors(&all, &args->down, &lora, &down->lora));

  MOELORA_TRY(moelora_take_routing(&all, &args->routing, true, &down->routes));
  down->routes.num_experts = args->num_experts;
  moelora_take_adapters(&all, &args->adapters, &down->routes);
  moelora_drop_unused_tables(&down->routes);
  MOELORA_TRY(moelora_check_padded_rows(&args->routing, &down->routes, true));
  up->routes = down->routes;
  up->routes.lora_scalings = NULL; /* applied once, after the activation */
  up->dtype = down->dtype = x.tensor->dtype;
  up->x = moelora_take_view(x.tensor, &up->x_stride, 1);
  up->k = down->columns = x.tensor->size[1];
  up->silu_and_mul = true;
  up->out_stride[0] = up->routes.top_k * intermediate;
  up->out_stride[1] = down->k = down->x_stride = intermediate;
  down->x_per_row = down->mul_routed_weight = down->add_inputs = down->sum_top_k = true;
  down->out = moelora_take_view(&args->out, down->out_stride, 1);
  return moelora_check_fit(&all);
}
