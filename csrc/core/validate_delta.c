/* Validates deltas, LoRA without a base product: vLLM's lists, one or both halves of an adapter,
 * SGLang's MLP. */
#include "core/check.h"

#include <string.h>

/* Maximum rows per block. Each (expert, adapter) pair is padded to whole blocks, and padded row
 * numbers must fit int32. */
enum { MAX_BLOCK_ROWS = 256 };

/* ---- lists ---- */

static moelora_status check_lists(const moelora_lists *lists, int64_t max_loras,
                                  moelora_source source, moelora_list_blocks *blocks) {
  const moelora_arg rows = MOELORA_ARG("sorted_token_ids", &lists->sorted_token_ids);
  const moelora_arg experts = MOELORA_ARG("expert_ids", &lists->expert_ids);
  const moelora_arg counts = MOELORA_ARG("num_tokens_post_padded", &lists->num_tokens_post_padded);
  const moelora_arg loras = MOELORA_ARG("lora_ids", &lists->lora_ids);
  const moelora_arg matrices[] = {rows, experts};
  for (size_t i = 0; i < sizeof matrices / sizeof *matrices; i++) {
    MOELORA_TRY(
        moelora_check_view(matrices[i], 2, i ? "[max_loras, blocks]" : "[max_loras, rows]"));
    MOELORA_TRY(moelora_check_dtype(matrices[i], MOELORA_I32, NULL));
    MOELORA_TRY(moelora_check_size(matrices[i], 0, max_loras, source));
    MOELORA_TRY(moelora_check_rows(matrices[i]));
  }
  MOELORA_TRY(moelora_check_vector(counts, MOELORA_I32, "[max_loras]"));
  MOELORA_TRY(moelora_check_size(counts, 0, max_loras, source));
  MOELORA_TRY(moelora_check_vector(loras, MOELORA_I32, "[num_lora_ids]"));
  MOELORA_REQUIRE(lists->num_active >= 0 && lists->num_active <= lists->lora_ids.size[0],
                  "num_active_loras is %d, expected 0 to %s.size(0), which is %lld",
                  lists->num_active, loras.name, (long long)lists->lora_ids.size[0]);
  MOELORA_REQUIRE(lists->block_size >= 1, "block_size is %d, expected at least 1",
                  lists->block_size);
  MOELORA_REQUIRE((int64_t)lists->expert_ids.size[1] * lists->block_size >=
                      lists->sorted_token_ids.size[1],
                  "%s.size(1) is %lld, expected at least a block of %d for each of the %lld rows "
                  "of %s",
                  experts.name, (long long)lists->expert_ids.size[1], lists->block_size,
                  (long long)lists->sorted_token_ids.size[1], rows.name);
  *blocks = (moelora_list_blocks){
      .sorted_token_ids = lists->sorted_token_ids.data,
      .rows = lists->sorted_token_ids.size[1],
      .sorted_stride = moelora_stride(&lists->sorted_token_ids, 0),
      .expert_ids = lists->expert_ids.data,
      .blocks = lists->expert_ids.size[1],
      .expert_stride = moelora_stride(&lists->expert_ids, 0),
      .num_tokens_post_padded = lists->num_tokens_post_padded.data,
      .lora_ids = lists->lora_ids.data,
      .num_active = lists->num_active,
      .block_size = lists->block_size,
  };
  return MOELORA_OK;
}

moelora_status moelora_check_align_lists(const moelora_align_lists_args *args,
                                         moelora_align_lists_problem *problem) {
  *problem = (moelora_align_lists_problem){0};
  moelora_routes *routes = &problem->routes;
  const moelora_lists *lists = &args->lists;
  MOELORA_REQUIRE(args->num_experts >= 1, "num_experts is %d, expected at least 1",
                  args->num_experts);
  MOELORA_REQUIRE(args->max_loras >= 1 && args->max_loras < INT32_MAX,
                  "max_loras is %d, expected at least 1", args->max_loras);
  MOELORA_TRY(moelora_check_routing(&args->routing, false, routes));
  if (routes->expert_map)
    MOELORA_TRY(moelora_check_size(MOELORA_ARG("expert_map", &args->routing.expert_map), 0,
                                   args->num_experts, moelora_words("num_experts")));
  routes->num_experts = args->num_experts;
  const moelora_source max_loras = moelora_words("max_loras");
  MOELORA_TRY(moelora_check_adapters(&args->adapters, &args->routing.topk_ids, args->max_loras,
                                     max_loras, routes));
  MOELORA_TRY(check_lists(lists, args->max_loras, max_loras, &problem->lists));

  const moelora_arg outputs[] = {
      MOELORA_ARG("sorted_token_ids", &lists->sorted_token_ids),
      MOELORA_ARG("expert_ids", &lists->expert_ids),
      MOELORA_ARG("num_tokens_post_padded", &lists->num_tokens_post_padded),
  };
  const int64_t blocks = moelora_align_max_blocks(MOELORA_ALIGN_BASE, routes->num_rows,
                                                  args->num_experts, 0, lists->block_size);
  MOELORA_REQUIRE(problem->lists.blocks >= blocks,
                  "%s.size(1) is %lld, expected at least %lld blocks", outputs[1].name,
                  (long long)problem->lists.blocks, (long long)blocks);
  MOELORA_REQUIRE(problem->lists.rows >= blocks * lists->block_size,
                  "%s.size(1) is %lld, expected at least %lld rows", outputs[0].name,
                  (long long)problem->lists.rows, (long long)(blocks * lists->block_size));
  for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++) {
    MOELORA_TRY(moelora_check_distinct(outputs[i]));
    MOELORA_TRY(moelora_check_disjoint(outputs[i], MOELORA_ARG("lora_ids", &lists->lora_ids)));
    MOELORA_TRY(moelora_check_disjoint_routes(outputs[i], &args->routing, &args->adapters));
    for (size_t j = 0; j < i; j++)
      MOELORA_TRY(moelora_check_disjoint(outputs[i], outputs[j]));
  }
  return MOELORA_OK;
}

/* ---- factors ---- */

/* Checks the slices of an adapter: a[] if `k` > 0, with origin `k_source`, and b[] if `expand`.
 * The first factor defines the number of slots and ranks. Their dtype is that of `x`, or float32
 * if they `may_be_wide`. */
static moelora_status check_slices(const moelora_lora *lora, const char *name_a, const char *name_b,
                                   moelora_arg x, int32_t num_experts, int64_t k,
                                   moelora_source k_source, bool expand, bool may_be_wide,
                                   int64_t *max_loras, moelora_factors *factors) {
  const moelora_arg first = k ? MOELORA_ARG(name_a, &lora->a[0]) : MOELORA_ARG(name_b, &lora->b[0]);
  const moelora_source slots = moelora_words("the number of slots of the first factor");
  const moelora_source rank = moelora_words("the rank of the first factor");
  const moelora_source columns = moelora_words("the columns of the first slice");
  const moelora_source experts = moelora_words("num_experts");
  const int32_t slices = lora->num_slices;
  MOELORA_REQUIRE(slices >= 1 && slices <= MOELORA_MAX_SLICES, "%s has %d slices, expected 1 to %d",
                  first.name, slices, MOELORA_MAX_SLICES);
  factors->num_slices = slices;
  factors->wide = may_be_wide && moelora_are_wide(lora, x.tensor->dtype);
  const moelora_arg like = factors->wide ? first : x;
  const moelora_dtype dtype = like.tensor->dtype;
  for (int32_t i = 0; i < slices; i++) {
    const moelora_arg a = moelora_entry(name_a, i, &lora->a[i]);
    const moelora_arg b = moelora_entry(name_b, i, &lora->b[i]);
    if (k)
      MOELORA_TRY(moelora_check_factor(a, dtype, like.name, num_experts, experts,
                                       "[max_loras, E or 1, R, K]", &factors->a[i]));
    if (expand)
      MOELORA_TRY(moelora_check_factor(b, dtype, like.name, num_experts, experts,
                                       "[max_loras, E or 1, N, R]", &factors->b[i]));
    factors->max_rank = (int32_t)first.tensor->size[k ? 2 : 3];
    if (*max_loras < 0)
      *max_loras = first.tensor->size[0];
    MOELORA_REQUIRE(*max_loras < INT32_MAX, "%s has %lld slots, expected fewer", first.name,
                    (long long)*max_loras);
    if (k) {
      MOELORA_TRY(moelora_check_size(a, 0, *max_loras, slots));
      MOELORA_TRY(moelora_check_size(a, 2, factors->max_rank, rank));
      MOELORA_TRY(moelora_check_size(a, 3, k, k_source));
    }
    if (expand) {
      factors->slice_n = lora->b[0].size[2];
      MOELORA_TRY(moelora_check_size(b, 0, *max_loras, slots));
      MOELORA_TRY(moelora_check_size(b, 2, factors->slice_n, columns));
      MOELORA_TRY(moelora_check_size(b, 3, factors->max_rank, rank));
    }
  }
  return MOELORA_OK;
}

/* If no row has an adapter, adapter tables are not read. */
static void drop_unused_tables(moelora_routes *routes) {
  if (routes->token_lora_mapping.data)
    return;
  routes->lora_ranks = NULL;
  routes->lora_scalings = NULL;
  routes->adapter_enabled = NULL;
}

static moelora_status check_padded_pairs(const moelora_tensor *topk_ids,
                                         const moelora_routes *routes) {
  const int64_t rows = routes->num_rows, pairs = (int64_t)routes->num_experts * routes->max_loras;
  MOELORA_REQUIRE(rows + (rows < pairs ? rows : pairs) * (MAX_BLOCK_ROWS - 1) <= INT32_MAX,
                  "%s has %lld rows (M * top_k), too many for row numbers of 32 bits after padding "
                  "by expert and adapter",
                  MOELORA_ARG("topk_ids", topk_ids).name, (long long)rows);
  return MOELORA_OK;
}

/* ---- one adapter ---- */

/* Rows defined by routing, or by lists. */
static moelora_status check_rows_of(const moelora_delta_args *args, int64_t max_loras,
                                    moelora_source source, moelora_delta_problem *problem) {
  const moelora_tensor *topk_ids = &args->routing.topk_ids;
  moelora_routes *routes = &problem->routes;
  routes->num_experts = args->num_experts;
  if (moelora_is_absent(&args->lists.sorted_token_ids)) {
    MOELORA_TRY(moelora_check_adapters(&args->adapters, topk_ids, max_loras, source, routes));
    drop_unused_tables(routes);
    return check_padded_pairs(topk_ids, routes);
  }
  moelora_adapters tables = args->adapters;
  tables.token_lora_mapping = (moelora_tensor){0};
  MOELORA_TRY(moelora_check_adapters(&tables, topk_ids, max_loras, source, routes));
  return check_lists(&args->lists, max_loras, source, &problem->lists);
}

static moelora_status check_extents(const moelora_delta_args *args, moelora_routes *routes) {
  if (moelora_is_absent(&args->lists.sorted_token_ids))
    return moelora_check_routing(&args->routing, args->mul_routed_weight, routes);
  MOELORA_REQUIRE(args->num_tokens >= 0 && args->top_k >= 1 &&
                      args->num_tokens <= INT32_MAX / args->top_k,
                  "num_tokens is %lld and top_k is %d, expected top_k of at least 1 and at most "
                  "2147483647 rows",
                  (long long)args->num_tokens, args->top_k);
  routes->num_tokens = args->num_tokens;
  routes->top_k = args->top_k;
  routes->num_rows = args->num_tokens * args->top_k;
  if (args->mul_routed_weight)
    MOELORA_TRY(moelora_check_topk_weights(&args->routing.topk_weights,
                                           moelora_words("the number of tokens"),
                                           moelora_words("top_k"), routes));
  return MOELORA_OK;
}

static moelora_status check_x(moelora_arg x, const moelora_routes *routes,
                              moelora_delta_problem *problem) {
  const int64_t rows = x.tensor->size[0];
  MOELORA_REQUIRE(rows == routes->num_tokens || rows == routes->num_rows,
                  "%s.size(0) is %lld, expected M, which is %lld, or M * top_k, which is %lld",
                  x.name, (long long)rows, (long long)routes->num_tokens,
                  (long long)routes->num_rows);
  problem->x = x.tensor->data;
  problem->x_stride = moelora_stride(x.tensor, 0);
  problem->x_per_row = rows != routes->num_tokens;
  return MOELORA_OK;
}

static moelora_status check_h(moelora_arg h, moelora_dtype dtype, const char *dtype_source,
                              const moelora_routes *routes, moelora_delta_problem *problem) {
  MOELORA_TRY(moelora_check_view(h, 4, "[slices, M, top_k, R]"));
  MOELORA_TRY(moelora_check_dtype(h, dtype, dtype_source));
  const struct {
    int64_t want;
    const char *source;
  } sizes[] = {
      {problem->lora.num_slices, "the number of slices"},
      {routes->num_tokens, "the number of tokens"},
      {routes->top_k, "top_k"},
      {problem->lora.max_rank, "the rank of the factors"},
  };
  for (int32_t i = 0; i < 4; i++)
    MOELORA_TRY(moelora_check_size(h, i, sizes[i].want, moelora_words(sizes[i].source)));
  MOELORA_TRY(moelora_check_rows(h));
  problem->xa = h.tensor->data;
  for (int32_t i = 0; i < 3; i++)
    problem->xa_stride[i] = moelora_stride(h.tensor, i);
  return MOELORA_OK;
}

static moelora_status check_out(const moelora_delta_args *args, moelora_dtype dtype,
                                const char *dtype_source, moelora_delta_problem *problem) {
  const moelora_arg out = MOELORA_ARG("out", &args->out);
  const moelora_routes *routes = &problem->routes;
  const bool summed = args->out.ndim == 2;
  MOELORA_TRY(moelora_check_view(out, summed ? 2 : 3, summed ? "[M, N]" : "[M, top_k, N]"));
  MOELORA_TRY(moelora_check_dtype(out, dtype, dtype_source));
  MOELORA_TRY(
      moelora_check_size(out, 0, routes->num_tokens, moelora_words("the number of tokens")));
  if (!summed)
    MOELORA_TRY(moelora_check_size(out, 1, routes->top_k, moelora_words("top_k")));

  problem->columns = problem->lora.num_slices * problem->lora.slice_n;
  const int64_t columns = args->silu_and_mul ? problem->columns / 2 : problem->columns;
  const int64_t width = args->out.size[summed ? 1 : 2];
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
  MOELORA_TRY(moelora_check_rows(out));
  MOELORA_TRY(moelora_check_distinct(out));
  problem->silu_and_mul = args->silu_and_mul;
  problem->add_inputs = args->add_inputs;
  problem->mul_routed_weight = args->mul_routed_weight;
  problem->sum_top_k = summed;
  if (args->out.data)
    problem->out = (char *)args->out.data + (size_t)args->out_offset * moelora_dtype_bytes(dtype);
  problem->out_stride[0] = moelora_stride(&args->out, 0);
  problem->out_stride[1] = summed ? 0 : moelora_stride(&args->out, 1);
  return MOELORA_OK;
}

/* Outputs share no memory with inputs. Inputs that a mode does not read are unchecked and must not
 * be looked at. */
static moelora_status check_apart(const moelora_delta_args *args, moelora_arg written,
                                  moelora_arg read) {
  const bool listed = !moelora_is_absent(&args->lists.sorted_token_ids);
  moelora_routing routing = args->routing;
  moelora_adapters adapters = args->adapters;
  if (listed) {
    routing = (moelora_routing){0};
    adapters.token_lora_mapping = (moelora_tensor){0};
    if (args->mul_routed_weight)
      routing.topk_weights = args->routing.topk_weights;
  }
  MOELORA_TRY(moelora_check_disjoint(written, read));
  for (int32_t i = 0; i < args->lora.num_slices; i++) {
    if (!moelora_is_absent(&args->x))
      MOELORA_TRY(moelora_check_disjoint(written, moelora_entry("lora_a", i, &args->lora.a[i])));
    if (!moelora_is_absent(&args->out))
      MOELORA_TRY(moelora_check_disjoint(written, moelora_entry("lora_b", i, &args->lora.b[i])));
  }
  MOELORA_TRY(moelora_check_disjoint_routes(written, &routing, &adapters));
  if (!listed)
    return MOELORA_OK;
  const moelora_arg lists[] = {
      MOELORA_ARG("sorted_token_ids", &args->lists.sorted_token_ids),
      MOELORA_ARG("expert_ids", &args->lists.expert_ids),
      MOELORA_ARG("num_tokens_post_padded", &args->lists.num_tokens_post_padded),
      MOELORA_ARG("lora_ids", &args->lists.lora_ids),
  };
  for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
    MOELORA_TRY(moelora_check_disjoint(written, lists[i]));
  return MOELORA_OK;
}

moelora_status moelora_check_delta(const moelora_delta_args *args, moelora_delta_problem *problem) {
  *problem = (moelora_delta_problem){0};
  const moelora_arg x = MOELORA_ARG("x", &args->x), h = MOELORA_ARG("h", &args->h);
  const moelora_arg out = MOELORA_ARG("out", &args->out);
  const bool has_x = !moelora_is_absent(&args->x), has_h = !moelora_is_absent(&args->h);
  const bool has_out = !moelora_is_absent(&args->out);
  MOELORA_REQUIRE(has_x + has_h + has_out == 2,
                  "%d of x, h and out are given, expected two: x and h, h and out, or x and out",
                  has_x + has_h + has_out);
  MOELORA_REQUIRE(args->num_experts >= 1, "num_experts is %d, expected at least 1",
                  args->num_experts);
  const moelora_arg input = has_x ? x : h;
  if (has_x) {
    MOELORA_TRY(moelora_check_view(x, 2, "[M, K] or [M * top_k, K]"));
    MOELORA_REQUIRE(args->x.size[1] >= 1, "%s.size(1) is 0, expected at least 1", x.name);
    MOELORA_TRY(moelora_check_rows(x));
  } else {
    MOELORA_TRY(moelora_check_view(h, 4, "[slices, M, top_k, R]"));
  }
  MOELORA_TRY(moelora_check_compute_dtype(input));
  problem->dtype = input.tensor->dtype;
  problem->k = has_x ? args->x.size[1] : 0;

  moelora_routes *routes = &problem->routes;
  MOELORA_TRY(check_extents(args, routes));
  int64_t max_loras = -1;
  const bool whole = has_x && has_out && moelora_is_absent(&args->lists.sorted_token_ids);
  MOELORA_TRY(check_slices(&args->lora, "lora_a", "lora_b", input, args->num_experts, problem->k,
                           moelora_size_of(x, 1), has_out, whole, &max_loras, &problem->lora));
  const moelora_arg first = has_x ? moelora_entry("lora_a", 0, &args->lora.a[0])
                                  : moelora_entry("lora_b", 0, &args->lora.b[0]);
  MOELORA_TRY(check_rows_of(args, max_loras, moelora_size_of(first, 0), problem));
  if (has_x)
    MOELORA_TRY(check_x(x, routes, problem));
  if (has_h)
    MOELORA_TRY(check_h(h, problem->dtype, input.name, routes, problem));
  if (has_out)
    MOELORA_TRY(check_out(args, problem->dtype, input.name, problem));
  if (!has_out)
    MOELORA_TRY(moelora_check_distinct(h));
  return check_apart(args, has_out ? out : h, input);
}

/* ---- SGLang's adapter MLP ---- */

moelora_status moelora_check_mlp_delta(const moelora_mlp_delta_args *args,
                                       moelora_mlp_delta_problem *problem) {
  *problem = (moelora_mlp_delta_problem){0};
  const moelora_arg x = MOELORA_ARG("hidden_states", &args->hidden_states);
  const moelora_arg out = MOELORA_ARG("output", &args->out);
  const moelora_arg topk_ids = MOELORA_ARG("topk_ids", &args->routing.topk_ids);
  const moelora_arg gate_up_a = moelora_entry("gate_up_a", 0, &args->gate_up.a[0]);
  const moelora_arg gate_up_b = moelora_entry("gate_up_b", 0, &args->gate_up.b[0]);
  const moelora_arg down_a = moelora_entry("down_a", 0, &args->down.a[0]);
  const moelora_arg down_b = moelora_entry("down_b", 0, &args->down.b[0]);
  moelora_routes *routes = &problem->routes;
  MOELORA_REQUIRE(args->num_experts >= 1, "num_experts is %d, expected at least 1",
                  args->num_experts);
  MOELORA_TRY(moelora_check_view(x, 2, "[M, K]"));
  MOELORA_REQUIRE(args->hidden_states.size[1] >= 1, "%s.size(1) is 0, expected at least 1", x.name);
  MOELORA_TRY(moelora_check_compute_dtype(x));
  MOELORA_TRY(moelora_check_rows(x));
  problem->dtype = args->hidden_states.dtype;
  problem->hidden = args->hidden_states.size[1];

  MOELORA_REQUIRE(args->gate_up.num_slices <= 2, "%s has %d slices, expected 1, or gate and up",
                  gate_up_a.name, args->gate_up.num_slices);
  MOELORA_REQUIRE(args->down.num_slices <= 1, "%s has %d slices, expected 1", down_a.name,
                  args->down.num_slices);
  int64_t max_loras = -1;
  MOELORA_TRY(check_slices(&args->gate_up, "gate_up_a", "gate_up_b", x, args->num_experts,
                           problem->hidden, moelora_size_of(x, 1), true, false, &max_loras,
                           &problem->gate_up));
  const int64_t columns = problem->gate_up.num_slices * problem->gate_up.slice_n;
  MOELORA_REQUIRE(columns % 2 == 0, "%s has %lld columns, expected as many of up as of gate",
                  gate_up_b.name, (long long)columns);
  problem->intermediate = columns / 2;
  MOELORA_TRY(check_slices(&args->down, "down_a", "down_b", x, args->num_experts,
                           problem->intermediate,
                           moelora_words("half of the columns of gate and up"), true, false,
                           &max_loras, &problem->down));
  MOELORA_TRY(moelora_check_size(down_b, 2, problem->hidden, moelora_size_of(x, 1)));

  MOELORA_TRY(moelora_check_routing(&args->routing, true, routes));
  routes->num_experts = args->num_experts;
  MOELORA_TRY(moelora_check_size(x, 0, routes->num_tokens, moelora_size_of(topk_ids, 0)));
  MOELORA_TRY(moelora_check_adapters(&args->adapters, topk_ids.tensor, max_loras,
                                     moelora_size_of(gate_up_a, 0), routes));
  drop_unused_tables(routes);
  MOELORA_TRY(check_padded_pairs(topk_ids.tensor, routes));

  MOELORA_TRY(moelora_check_view(out, 2, "[M, K]"));
  MOELORA_TRY(moelora_check_dtype(out, problem->dtype, x.name));
  MOELORA_TRY(moelora_check_size(out, 0, routes->num_tokens, moelora_size_of(topk_ids, 0)));
  MOELORA_TRY(moelora_check_size(out, 1, problem->hidden, moelora_size_of(x, 1)));
  MOELORA_TRY(moelora_check_rows(out));
  MOELORA_TRY(moelora_check_distinct(out));
  MOELORA_TRY(moelora_check_disjoint(out, x));
  MOELORA_TRY(moelora_check_disjoint_lora(out, &args->gate_up, "gate_up_a", "gate_up_b"));
  MOELORA_TRY(moelora_check_disjoint_lora(out, &args->down, "down_a", "down_b"));
  MOELORA_TRY(moelora_check_disjoint_routes(out, &args->routing, &args->adapters));

  problem->x = args->hidden_states.data;
  problem->x_stride = moelora_stride(&args->hidden_states, 0);
  problem->out = args->out.data;
  problem->out_stride = moelora_stride(&args->out, 0);
  return MOELORA_OK;
}
