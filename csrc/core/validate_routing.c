/* Validates routing, adapters and alignment. */
#include "core/check.h"

static moelora_ids ids_of(const moelora_tensor *tensor) {
  moelora_ids ids = {.is_64 = tensor->dtype == MOELORA_I64};
  ids.data = moelora_take_view(tensor, ids.stride, 2);
  return ids;
}

moelora_status moelora_take_rows(moelora_arguments *all, moelora_extent tokens,
                                 moelora_extent top_k, const moelora_routing *routing,
                                 bool need_weights, moelora_routes *routes) {
  routes->num_tokens = tokens.value;
  routes->top_k = (int32_t)top_k.value;
  routes->num_rows = tokens.value * top_k.value;
  moelora_name_size(all, "M", tokens);
  moelora_name_size(all, "top_k", top_k);
  moelora_name_size(all, "M * top_k",
                    moelora_words(routes->num_rows, "the number of routed rows, M * top_k,"));
  if (!need_weights)
    return MOELORA_OK;
  routes->topk_weights = moelora_take_view(&routing->topk_weights, routes->topk_weights_stride, 2);
  return moelora_check_present(all, &routing->topk_weights);
}

moelora_status moelora_take_routing(moelora_arguments *all, const moelora_routing *routing,
                                    bool need_weights, moelora_routes *routes) {
  const moelora_tensor *ids = &routing->topk_ids, *map = &routing->expert_map;
  const moelora_arg topk_ids = MOELORA_ARG("topk_ids", ids);
  const int64_t rows = ids->size[0] * ids->size[1];
  MOELORA_REQUIRE_DIM(ids->size[1] >= 1, topk_ids, size, 1, "expected top_k of at least 1");
  MOELORA_REQUIRE(rows <= INT32_MAX, "%s has %lld rows (M * top_k), expected at most 2147483647",
                  topk_ids.name, (long long)rows);
  routes->topk_ids = ids_of(ids);
  MOELORA_TRY(moelora_take_rows(all, moelora_size_of(topk_ids, 0), moelora_size_of(topk_ids, 1),
                                routing, need_weights, routes));
  if (!moelora_is_absent(map)) {
    MOELORA_TRY(moelora_check_at_least_one(MOELORA_ARG("expert_map", map)));
    routes->expert_map = map->data;
    routes->num_global = (int32_t)map->size[0];
  }
  return MOELORA_OK;
}

void moelora_take_adapters(moelora_arguments *all, const moelora_adapters *adapters,
                           moelora_routes *routes) {
  const moelora_tensor *enabled = &adapters->adapter_enabled;
  const bool is_known = all->slots.value != MOELORA_ANY_SIZE;
  moelora_extent one_more = all->slots;
  one_more.value += is_known;
  moelora_name_size(all, "max_loras", all->slots);
  moelora_name_size(all, "max_loras + 1", one_more);
  if (!moelora_is_absent(&adapters->token_lora_mapping))
    routes->token_lora_mapping = ids_of(&adapters->token_lora_mapping);
  routes->lora_ranks = adapters->lora_ranks.data;
  routes->lora_scalings = adapters->lora_scalings.data;
  routes->adapter_enabled = enabled->data;
  routes->adapter_enabled_bytes = (int32_t)moelora_dtype_bytes(enabled->dtype);
  routes->max_loras = is_known ? (int32_t)all->slots.value : 0;
}

void moelora_drop_unused_tables(moelora_routes *routes) {
  if (routes->token_lora_mapping.data)
    return;
  routes->lora_ranks = NULL;
  routes->lora_scalings = NULL;
  routes->adapter_enabled = NULL;
}

/* Upper bound of the rows per block of an internal alignment. */
enum { MAX_BLOCK_ROWS = 256 };

moelora_status moelora_check_padded_rows(const moelora_routing *routing,
                                         const moelora_routes *routes, bool by_adapter) {
  const int64_t rows = routes->num_rows;
  const int64_t groups = (int64_t)routes->num_experts * (by_adapter ? routes->max_loras : 1);
  const int64_t touched = rows < groups ? rows : groups;
  MOELORA_REQUIRE(rows + touched * (MAX_BLOCK_ROWS - 1) <= INT32_MAX,
                  "%s has %lld rows (M * top_k), too many for row numbers of 32 bits after padding "
                  "by expert%s",
                  MOELORA_ARG("topk_ids", &routing->topk_ids).name, (long long)rows,
                  by_adapter ? " and adapter" : "");
  return MOELORA_OK;
}

/* ---- alignment ---- */

static moelora_status check_out_to_zero(const moelora_tensor *out, moelora_align_problem *problem) {
  if (moelora_is_absent(out))
    return MOELORA_OK;
  const moelora_arg arg = MOELORA_ARG("out_to_zero", out);
  MOELORA_REQUIRE(out->ndim >= 0 && out->ndim <= MOELORA_MAX_DIMS,
                  "%s has %d dimensions, expected 0 to %d", arg.name, out->ndim, MOELORA_MAX_DIMS);
  MOELORA_TRY(moelora_check_memory(arg, out->ndim, "of any shape"));
  MOELORA_TRY(moelora_check_class(arg, MOELORA_CLASS_compute));
  MOELORA_TRY(moelora_check_contiguous(arg));
  size_t bytes = moelora_dtype_bytes(out->dtype);
  for (int32_t i = 0; i < out->ndim; i++)
    bytes *= (size_t)out->size[i];
  problem->out_to_zero = bytes ? out->data : NULL;
  problem->out_to_zero_bytes = bytes;
  return MOELORA_OK;
}

/* Requires the outputs of the mode, and that those of other modes are absent. */
static moelora_status check_mode(const moelora_align_args *args, bool with_adapters) {
  const moelora_arg outputs[] = {MOELORA_ARG("lora_ids", &args->lora_ids),
                                 MOELORA_ARG("sorted_weights", &args->sorted_weights),
                                 MOELORA_ARG("out_to_zero", &args->out_to_zero)};
  const bool sorting = args->mode == MOELORA_ALIGN_SORTING;
  for (int i = 0; i < 3; i++)
    MOELORA_REQUIRE((i == 0 ? with_adapters : sorting) || moelora_is_absent(outputs[i].tensor),
                    "%s is given, but only %s writes it", outputs[i].name,
                    i == 0 ? "a mode with adapters" : "moe_sorting");
  if (with_adapters)
    return moelora_check_view(outputs[0],
                              args->mode == MOELORA_ALIGN_UNIFORM ? "[blocks]" : "[rows]");
  return sorting ? moelora_check_view(outputs[1], "[rows]") : MOELORA_OK;
}

static moelora_status check_align_outputs(const moelora_align_args *args, moelora_arguments *all,
                                          moelora_align_problem *problem) {
  const moelora_arg experts = MOELORA_ARG("expert_ids", &args->expert_ids);
  const int64_t least = moelora_align_max_blocks(
      args->mode, problem->routes.num_rows, args->num_experts, args->max_loras, args->block_size);
  const moelora_extent blocks = moelora_size_of(experts, 0);
  moelora_extent rows = blocks;
  rows.value *= args->block_size;
  rows.scale = " * block_size";
  MOELORA_REQUIRE_DIM(blocks.value >= least, experts, size, 0, "expected at least %lld blocks",
                      (long long)least);
  MOELORA_REQUIRE(rows.value <= INT32_MAX, "%s is %lld, expected at most 2147483647",
                  moelora_label_extent(rows).text, (long long)rows.value);
  moelora_name_size(all, "rows", rows);
  moelora_name_size(all, "1", moelora_words(1, "the number of totals"));
  moelora_name_size(all, "blocks or rows", args->mode == MOELORA_ALIGN_SEGMENTED ? rows : blocks);
  problem->max_blocks = blocks.value;
  problem->sorted_token_ids = args->sorted_token_ids.data;
  problem->expert_ids = args->expert_ids.data;
  problem->lora_ids = args->lora_ids.data;
  problem->num_tokens_post_padded = args->num_tokens_post_padded.data;
  problem->sorted_weights = args->sorted_weights.data;
  return check_out_to_zero(&args->out_to_zero, problem);
}

/* With an expert_map, num_experts is the number of global experts. */
static void name_experts(moelora_arguments *all, int32_t num_experts, moelora_routes *routes) {
  routes->num_experts = num_experts;
  moelora_name_size(all, "num_global_experts", moelora_words(num_experts, "num_experts"));
}

/* Takes the adapters of a call without factors, in which max_loras is an argument. */
static moelora_status take_slots(moelora_arguments *all, const moelora_adapters *adapters,
                                 int32_t max_loras, moelora_routes *routes) {
  MOELORA_REQUIRE(max_loras < INT32_MAX, "max_loras is %d, expected fewer", max_loras);
  MOELORA_TRY(moelora_check_at_least("max_loras", max_loras, 1));
  all->slots = moelora_words(max_loras, "max_loras");
  moelora_take_adapters(all, adapters, routes);
  return MOELORA_OK;
}

moelora_status moelora_check_align(const moelora_align_args *args, moelora_align_problem *problem) {
  const moelora_align_mode mode = args->mode;
  const bool with_adapters = mode == MOELORA_ALIGN_UNIFORM || mode == MOELORA_ALIGN_SEGMENTED;
  *problem = (moelora_align_problem){.mode = mode, .block_size = args->block_size};
  MOELORA_REQUIRE(mode >= MOELORA_ALIGN_BASE && mode <= MOELORA_ALIGN_SORTING,
                  "mode is %d, expected a moelora_align_mode", (int)mode);
  moelora_align_args read = *args; /* a mode without adapters ignores these arguments */
  if (!with_adapters)
    read.adapters = (moelora_adapters){0};
  moelora_arguments all;
  MOELORA_TRY(moelora_begin_align(&read, &all));
  MOELORA_TRY(
      moelora_take_routing(&all, &read.routing, mode == MOELORA_ALIGN_SORTING, &problem->routes));
  name_experts(&all, read.num_experts, &problem->routes);
  if (with_adapters)
    MOELORA_TRY(take_slots(&all, &read.adapters, read.max_loras, &problem->routes));
  MOELORA_TRY(check_mode(&read, with_adapters));
  MOELORA_TRY(check_align_outputs(&read, &all, problem));
  return moelora_check_fit(&all);
}

/* ---- vLLM's lists ---- */

moelora_status moelora_take_lists(const moelora_arguments *all, const moelora_lists *lists,
                                  moelora_list_blocks *blocks) {
  MOELORA_TRY(moelora_check_present(all, &lists->expert_ids));
  MOELORA_TRY(moelora_check_present(all, &lists->num_tokens_post_padded));
  MOELORA_TRY(moelora_check_present(all, &lists->lora_ids));
  const moelora_arg rows = MOELORA_ARG("sorted_token_ids", &lists->sorted_token_ids);
  const moelora_arg experts = MOELORA_ARG("expert_ids", &lists->expert_ids);
  MOELORA_REQUIRE(lists->num_active >= 0 && lists->num_active <= lists->lora_ids.size[0],
                  "num_active_loras is %d, expected 0 to %s.size(0), which is %lld",
                  lists->num_active, MOELORA_ARG("lora_ids", &lists->lora_ids).name,
                  (long long)lists->lora_ids.size[0]);
  MOELORA_TRY(moelora_check_at_least("block_size", lists->block_size, 1));
  MOELORA_REQUIRE_DIM(experts.tensor->size[1] * lists->block_size >= rows.tensor->size[1], experts,
                      size, 1, "expected at least a block of %d for each of the %lld rows of %s",
                      lists->block_size, (long long)rows.tensor->size[1], rows.name);
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
  const moelora_lists *lists = &args->lists;
  const moelora_arg rows = MOELORA_ARG("sorted_token_ids", &lists->sorted_token_ids);
  const moelora_arg experts = MOELORA_ARG("expert_ids", &lists->expert_ids);
  moelora_routes *routes = &problem->routes;
  *problem = (moelora_align_lists_problem){0};
  moelora_arguments all;
  MOELORA_TRY(moelora_begin_align_lists(args, &all));
  MOELORA_TRY(moelora_take_routing(&all, &args->routing, false, routes));
  name_experts(&all, args->num_experts, routes);
  MOELORA_TRY(take_slots(&all, &args->adapters, args->max_loras, routes));
  MOELORA_TRY(moelora_take_lists(&all, lists, &problem->lists));
  const int64_t blocks = moelora_align_max_blocks(MOELORA_ALIGN_BASE, routes->num_rows,
                                                  args->num_experts, 0, lists->block_size);
  MOELORA_REQUIRE_DIM(problem->lists.blocks >= blocks, experts, size, 1,
                      "expected at least %lld blocks", (long long)blocks);
  MOELORA_REQUIRE_DIM(problem->lists.rows >= blocks * lists->block_size, rows, size, 1,
                      "expected at least %lld rows", (long long)(blocks * lists->block_size));
  return moelora_check_fit(&all);
}
