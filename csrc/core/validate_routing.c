/* Validates routing, adapters and alignment; computes upper bounds of blocks. */
#include "core/check.h"

int64_t moelora_align_max_blocks(moelora_align_mode mode, int64_t num_rows, int32_t num_experts,
                                 int32_t max_loras, int32_t block_size) {
  if (num_rows < 0 || num_experts < 1 || block_size < 1 ||
      (mode == MOELORA_ALIGN_UNIFORM && max_loras < 0))
    return 0;
  if (mode == MOELORA_ALIGN_SORTING) {
    int64_t blocks;
    return __builtin_add_overflow(num_rows / block_size, num_experts, &blocks) ? INT64_MAX : blocks;
  }
  /* Each group adds at most one partial block. */
  int64_t groups = num_experts;
  if (mode == MOELORA_ALIGN_UNIFORM)
    groups *= (int64_t)max_loras + 1;
  if (groups > num_rows)
    groups = num_rows;
  return groups + (num_rows - groups) / block_size;
}

static moelora_ids ids_of(const moelora_tensor *tensor) {
  return (moelora_ids){
      .data = tensor->data,
      .stride = {moelora_stride(tensor, 0), tensor->ndim > 1 ? moelora_stride(tensor, 1) : 0},
      .is_64 = tensor->dtype == MOELORA_I64,
  };
}

moelora_status moelora_check_topk_weights(const moelora_tensor *weights,
                                          moelora_source tokens_source, moelora_source top_k_source,
                                          moelora_routes *routes) {
  const moelora_arg arg = MOELORA_ARG("topk_weights", weights);
  MOELORA_TRY(moelora_check_view(arg, 2, "[M, top_k]"));
  MOELORA_TRY(moelora_check_dtype(arg, MOELORA_F32, NULL));
  MOELORA_TRY(moelora_check_size(arg, 0, routes->num_tokens, tokens_source));
  MOELORA_TRY(moelora_check_size(arg, 1, routes->top_k, top_k_source));
  routes->topk_weights = weights->data;
  routes->topk_weights_stride[0] = moelora_stride(weights, 0);
  routes->topk_weights_stride[1] = moelora_stride(weights, 1);
  return MOELORA_OK;
}

moelora_status moelora_check_routing(const moelora_routing *routing, bool need_weights,
                                     moelora_routes *routes) {
  const moelora_tensor *ids = &routing->topk_ids, *weights = &routing->topk_weights;
  const moelora_arg topk_ids = MOELORA_ARG("topk_ids", ids);
  MOELORA_TRY(moelora_check_view(topk_ids, 2, "[M, top_k]"));
  MOELORA_TRY(moelora_check_id_dtype(topk_ids));
  int64_t num_tokens = ids->size[0], top_k = ids->size[1];
  MOELORA_REQUIRE(top_k >= 1, "%s.size(1) is 0, expected top_k of at least 1", topk_ids.name);
  MOELORA_REQUIRE(num_tokens * top_k <= INT32_MAX,
                  "%s has %lld rows (M * top_k), expected at most 2147483647", topk_ids.name,
                  (long long)(num_tokens * top_k));
  routes->num_tokens = num_tokens;
  routes->top_k = (int32_t)top_k;
  routes->num_rows = num_tokens * top_k;
  routes->topk_ids = ids_of(ids);

  if (need_weights || !moelora_is_absent(weights))
    MOELORA_TRY(moelora_check_topk_weights(weights, moelora_size_of(topk_ids, 0),
                                           moelora_size_of(topk_ids, 1), routes));
  if (!need_weights)
    routes->topk_weights = NULL;

  const moelora_tensor *map = &routing->expert_map;
  if (!moelora_is_absent(map)) {
    const moelora_arg expert_map = MOELORA_ARG("expert_map", map);
    MOELORA_TRY(moelora_check_vector(expert_map, MOELORA_I32, "[num_global_experts]"));
    MOELORA_REQUIRE(map->size[0] >= 1, "%s.size(0) is 0, expected at least 1", expert_map.name);
    routes->expert_map = map->data;
    routes->num_global = (int32_t)map->size[0];
  }
  return MOELORA_OK;
}

static moelora_status check_mapping(const moelora_adapters *adapters,
                                    const moelora_tensor *topk_ids, moelora_routes *routes) {
  const moelora_tensor *mapping = &adapters->token_lora_mapping;
  const moelora_arg arg = MOELORA_ARG("token_lora_mapping", mapping);
  if (moelora_is_absent(mapping))
    return MOELORA_OK;
  MOELORA_TRY(moelora_check_view(arg, 1, "[M]"));
  MOELORA_TRY(moelora_check_id_dtype(arg));
  MOELORA_TRY(moelora_check_size(arg, 0, routes->num_tokens,
                                 moelora_size_of(MOELORA_ARG("topk_ids", topk_ids), 0)));
  routes->token_lora_mapping = ids_of(mapping);
  return MOELORA_OK;
}

static moelora_status check_enabled(const moelora_adapters *adapters, int64_t max_loras,
                                    moelora_source source, moelora_routes *routes) {
  const moelora_tensor *enabled = &adapters->adapter_enabled;
  if (moelora_is_absent(enabled))
    return MOELORA_OK;
  const moelora_arg arg = MOELORA_ARG("adapter_enabled", enabled);
  MOELORA_TRY(moelora_check_view(arg, 1, "[max_loras] or [max_loras + 1]"));
  MOELORA_REQUIRE(enabled->dtype == MOELORA_BOOL || enabled->dtype == MOELORA_I32,
                  "%s has dtype %s, expected bool or int32", arg.name,
                  moelora_dtype_name(enabled->dtype));
  MOELORA_TRY(moelora_check_contiguous(arg));
  MOELORA_REQUIRE(
      max_loras < 0 || enabled->size[0] == max_loras || enabled->size[0] == max_loras + 1,
      "%s.size(0) is %lld, %s is %lld: expected as many entries or one more", arg.name,
      (long long)enabled->size[0], moelora_label_source(source).text, (long long)max_loras);
  routes->adapter_enabled = enabled->data;
  routes->adapter_enabled_bytes = (int32_t)moelora_dtype_bytes(enabled->dtype);
  return MOELORA_OK;
}

/* max_loras < 0: there are no factors, so the length of the tables is unknown. */
moelora_status moelora_check_adapters(const moelora_adapters *adapters,
                                      const moelora_tensor *topk_ids, int64_t max_loras,
                                      moelora_source source, moelora_routes *routes) {
  MOELORA_TRY(check_mapping(adapters, topk_ids, routes));
  const moelora_tensor *ranks = &adapters->lora_ranks, *scalings = &adapters->lora_scalings;
  if (!moelora_is_absent(ranks)) {
    const moelora_arg arg = MOELORA_ARG("lora_ranks", ranks);
    MOELORA_TRY(moelora_check_vector(arg, MOELORA_I32, "[max_loras]"));
    if (max_loras >= 0)
      MOELORA_TRY(moelora_check_size(arg, 0, max_loras, source));
    routes->lora_ranks = ranks->data;
  }
  if (!moelora_is_absent(scalings)) {
    const moelora_arg arg = MOELORA_ARG("lora_scalings", scalings);
    MOELORA_TRY(moelora_check_vector(arg, MOELORA_F32, "[max_loras]"));
    if (max_loras >= 0)
      MOELORA_TRY(moelora_check_size(arg, 0, max_loras, source));
    routes->lora_scalings = scalings->data;
  }
  MOELORA_TRY(check_enabled(adapters, max_loras, source, routes));
  routes->max_loras = max_loras < 0 ? 0 : (int32_t)max_loras;
  return MOELORA_OK;
}

moelora_status moelora_check_disjoint_routes(moelora_arg out, const moelora_routing *routing,
                                             const moelora_adapters *adapters) {
  const moelora_arg inputs[] = {
      MOELORA_ARG("topk_ids", &routing->topk_ids),
      MOELORA_ARG("topk_weights", &routing->topk_weights),
      MOELORA_ARG("expert_map", &routing->expert_map),
      MOELORA_ARG("token_lora_mapping", &adapters->token_lora_mapping),
      MOELORA_ARG("lora_ranks", &adapters->lora_ranks),
      MOELORA_ARG("lora_scalings", &adapters->lora_scalings),
      MOELORA_ARG("adapter_enabled", &adapters->adapter_enabled),
  };
  for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
    MOELORA_TRY(moelora_check_disjoint(out, inputs[i]));
  return MOELORA_OK;
}

/* ---- alignment ---- */

static moelora_status check_align_output(moelora_arg arg, moelora_dtype dtype, int64_t want,
                                         moelora_source source, const char *layout) {
  MOELORA_TRY(moelora_check_vector(arg, dtype, layout));
  return moelora_check_size(arg, 0, want, source);
}

/* `arg` belongs to another mode: an output passed here would silently not be written. */
static moelora_status check_unused(moelora_arg arg, const char *modes) {
  MOELORA_REQUIRE(moelora_is_absent(arg.tensor), "%s is given, but only %s writes it", arg.name,
                  modes);
  return MOELORA_OK;
}

static moelora_status check_out_to_zero(const moelora_tensor *out, moelora_align_problem *problem) {
  if (moelora_is_absent(out))
    return MOELORA_OK;
  const moelora_arg arg = MOELORA_ARG("out_to_zero", out);
  MOELORA_REQUIRE(out->ndim >= 0 && out->ndim <= MOELORA_MAX_DIMS,
                  "%s has %d dimensions, expected 0 to %d", arg.name, out->ndim, MOELORA_MAX_DIMS);
  MOELORA_TRY(moelora_check_large_view(arg, out->ndim, "of any shape"));
  MOELORA_REQUIRE(out->dtype <= MOELORA_F16,
                  "%s has dtype %s, expected float32, bfloat16 or float16", arg.name,
                  moelora_dtype_name(out->dtype));
  MOELORA_TRY(moelora_check_contiguous(arg));
  size_t bytes = moelora_dtype_bytes(out->dtype);
  for (int32_t i = 0; i < out->ndim; i++)
    bytes *= (size_t)out->size[i];
  problem->out_to_zero = bytes ? out->data : NULL;
  problem->out_to_zero_bytes = bytes;
  return MOELORA_OK;
}

static moelora_status check_align_outputs(const moelora_align_args *args,
                                          moelora_align_problem *problem) {
  const moelora_align_mode mode = args->mode;
  const moelora_arg row_ids = MOELORA_ARG("sorted_token_ids", &args->sorted_token_ids);
  const moelora_arg experts = MOELORA_ARG("expert_ids", &args->expert_ids);
  const moelora_arg loras = MOELORA_ARG("lora_ids", &args->lora_ids);
  const moelora_arg weights = MOELORA_ARG("sorted_weights", &args->sorted_weights);
  const moelora_arg count = MOELORA_ARG("num_tokens_post_padded", &args->num_tokens_post_padded);

  MOELORA_TRY(moelora_check_vector(experts, MOELORA_I32, "[blocks]"));
  int64_t blocks = args->expert_ids.size[0], rows = blocks * args->block_size;
  int64_t least = moelora_align_max_blocks(mode, problem->routes.num_rows, args->num_experts,
                                           args->max_loras, args->block_size);
  const moelora_source want_blocks = moelora_size_of(experts, 0);
  moelora_source want_rows = want_blocks;
  want_rows.scale = " * block_size";
  MOELORA_REQUIRE(blocks >= least, "%s is %lld, expected at least %lld blocks",
                  moelora_label_source(want_blocks).text, (long long)blocks, (long long)least);
  MOELORA_REQUIRE(rows <= INT32_MAX, "%s is %lld, expected at most 2147483647",
                  moelora_label_source(want_rows).text, (long long)rows);
  MOELORA_TRY(check_align_output(row_ids, MOELORA_I32, rows, want_rows, "[rows]"));
  MOELORA_TRY(
      check_align_output(count, MOELORA_I32, 1, moelora_words("the number of totals"), "[1]"));
  if (mode == MOELORA_ALIGN_UNIFORM)
    MOELORA_TRY(check_align_output(loras, MOELORA_I32, blocks, want_blocks, "[blocks]"));
  else if (mode == MOELORA_ALIGN_SEGMENTED)
    MOELORA_TRY(check_align_output(loras, MOELORA_I32, rows, want_rows, "[rows]"));
  else
    MOELORA_TRY(check_unused(loras, "a mode with adapters"));
  if (mode == MOELORA_ALIGN_SORTING) {
    MOELORA_TRY(check_align_output(weights, MOELORA_F32, rows, want_rows, "[rows]"));
    MOELORA_TRY(check_out_to_zero(&args->out_to_zero, problem));
  } else {
    MOELORA_TRY(check_unused(weights, "moe_sorting"));
    MOELORA_TRY(check_unused(MOELORA_ARG("out_to_zero", &args->out_to_zero), "moe_sorting"));
  }

  const moelora_arg outputs[] = {row_ids, experts, loras,
                                 weights, count,   MOELORA_ARG("out_to_zero", &args->out_to_zero)};
  /* Inputs that a mode does not read are unchecked and must not be looked at. */
  const bool with_adapters = mode == MOELORA_ALIGN_UNIFORM || mode == MOELORA_ALIGN_SEGMENTED;
  const moelora_adapters none = {0};
  const moelora_adapters *adapters = with_adapters ? &args->adapters : &none;
  for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++) {
    MOELORA_TRY(moelora_check_disjoint_routes(outputs[i], &args->routing, adapters));
    for (size_t j = 0; j < i; j++)
      MOELORA_TRY(moelora_check_disjoint(outputs[i], outputs[j]));
  }

  problem->max_blocks = blocks;
  problem->sorted_token_ids = args->sorted_token_ids.data;
  problem->expert_ids = args->expert_ids.data;
  problem->lora_ids = args->lora_ids.data;
  problem->num_tokens_post_padded = args->num_tokens_post_padded.data;
  problem->sorted_weights = args->sorted_weights.data;
  return MOELORA_OK;
}

moelora_status moelora_check_align(const moelora_align_args *args, moelora_align_problem *problem) {
  *problem = (moelora_align_problem){.mode = args->mode, .block_size = args->block_size};
  moelora_routes *routes = &problem->routes;
  MOELORA_REQUIRE(args->mode >= MOELORA_ALIGN_BASE && args->mode <= MOELORA_ALIGN_SORTING,
                  "mode is %d, expected a moelora_align_mode", (int)args->mode);
  MOELORA_REQUIRE(args->num_experts >= 1, "num_experts is %d, expected at least 1",
                  args->num_experts);
  MOELORA_REQUIRE(args->block_size >= 1, "block_size is %d, expected at least 1", args->block_size);
  MOELORA_TRY(moelora_check_routing(&args->routing, args->mode == MOELORA_ALIGN_SORTING, routes));
  if (routes->expert_map)
    MOELORA_TRY(moelora_check_size(MOELORA_ARG("expert_map", &args->routing.expert_map), 0,
                                   args->num_experts, moelora_words("num_experts")));
  routes->num_experts = args->num_experts;
  if (args->mode == MOELORA_ALIGN_UNIFORM || args->mode == MOELORA_ALIGN_SEGMENTED) {
    MOELORA_REQUIRE(args->max_loras >= 1 && args->max_loras < INT32_MAX,
                    "max_loras is %d, expected at least 1", args->max_loras);
    MOELORA_TRY(moelora_check_adapters(&args->adapters, &args->routing.topk_ids, args->max_loras,
                                       moelora_words("max_loras"), routes));
  }
  return check_align_outputs(args, problem);
}
