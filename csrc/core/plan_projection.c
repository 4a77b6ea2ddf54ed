/* Plans the launch of a projection, given its kernel, and of the shrink before it. */
#include "core/format.h"
#include "core/plan.h"

static bool has_adapters(const moelora_projection_load *load) {
  return load->routes->token_lora_mapping.data && load->lora->num_slices > 0;
}

static moelora_epilogue_plan epilogue_of(const moelora_projection_load *load,
                                         const moelora_variant *v) {
  if (load->out && moelora_stores_by_row(v))
    return MOELORA_EPILOGUE_PLAIN;
  if (load->weighted || (load->out && v->needs == MOELORA_SM90))
    return MOELORA_EPILOGUE_GENERAL;
  return load->gated ? MOELORA_EPILOGUE_GATED : MOELORA_EPILOGUE_PLAIN;
}

/* Returns the launch mode. A projection directly after another one waits for all of it, so that PDL
 * gains little; without PDL, a small grid is spread over all SMs. */
static moelora_grid_plan grid_of(const moelora_projection_load *load, const moelora_variant *v) {
  return v->needs == MOELORA_SM90 && !has_adapters(load) && load->x_rows_each == 0 &&
                 moelora_shares_sm(v->block_n)
             ? MOELORA_GRID_SPREAD
             : MOELORA_GRID_OVERLAPPED;
}

/* e4m3 x is in the workspace; for Hopper kernels, its rows are padded to whole K tiles. */
static bool is_vector_x(const moelora_projection_load *load, const moelora_variant *v) {
  if (moelora_is_e4m3_kernel(v->format))
    return v->needs == MOELORA_SM90 || load->w->k % 8 == 0;
  return moelora_is_vector_row(load->x, load->x_stride, load->w->k);
}

static bool is_vector_out(const moelora_projection_load *load) {
  return load->out ? moelora_is_vector_row(load->out, load->out_stride[0], load->n_out) &&
                         load->out_stride[1] % 8 == 0
                   : load->n_out % 8 == 0;
}

/* Whether boxes cannot cover B: gate and up rows alternate, and two slices with an odd number of
 * rows split one such pair between them. */
static bool cuts_boxes(const moelora_projection_load *load) {
  return load->gated && load->interleaved && load->lora->num_slices == 2 &&
         load->lora->slice_n % 2 != 0;
}

/* Returns the number of counters of a tile scheduler: one for the tiles fetched and, if it is
 * dynamic, one per tile for its successor. Saturates at SIZE_MAX, which exceeds any workspace. */
static int64_t num_counters_of(const moelora_projection_load *load, const moelora_variant *v) {
  if (v->needs != MOELORA_SM90 || moelora_shares_sm(v->block_n))
    return 1;
  const size_t blocks =
      (size_t)moelora_max_blocks(load->routes, v->block_m, moelora_cluster_blocks(v));
  const size_t columns = (size_t)moelora_divide_up(load->w->n, v->block_n);
  return (int64_t)moelora_times(blocks + 1, columns);
}

/* Maximum number of column tiles of a block in a run. With longer runs, kernels look up rows less
 * often, but more time passes until another block reads the same weights. */
enum { MAX_RUN_COLUMNS = 8 };

/* Returns the number of tiles in a run of the dynamic tile scheduler; 1: no runs. Tiles with enough
 * k steps to hide the search for the next tile need none. Tiles of a run share their adapters, so
 * there must be at most one slice. */
static int32_t run_of(const moelora_projection_load *load, const moelora_variant *v) {
  if (v->needs != MOELORA_SM90 || moelora_shares_sm(v->block_n) ||
      epilogue_of(load, v) != MOELORA_EPILOGUE_PLAIN || load->lora->num_slices > 1 ||
      moelora_divide_up(load->w->k, v->block_k) > 2 * v->stages)
    return 1;
  const int64_t columns = moelora_divide_up(load->w->n, v->block_n);
  return (int32_t)moelora_divide_up(columns, moelora_divide_up(columns, MAX_RUN_COLUMNS));
}

/* Returns a quarter of L2, in elements of x as the kernel reads it. */
static int32_t l2_elements_of(const moelora_variant *v, const moelora_device_info *device) {
  const bool bytes = moelora_is_e4m3_kernel(v->format) && v->needs == MOELORA_SM90;
  return device->l2_bytes / 4 / (bytes ? 1 : 2);
}

moelora_projection_plan moelora_plan_projection(const moelora_projection_load *load,
                                                const moelora_variant *v,
                                                const moelora_device_info *device) {
  const moelora_factors *lora = load->lora;
  const bool e4m3_x = moelora_is_e4m3_kernel(v->format);
  moelora_projection_plan plan = {
      .epilogue = epilogue_of(load, v),
      .grid = grid_of(load, v),
      .vectors = is_vector_x(load, v) && is_vector_out(load) && moelora_is_vector_weights(load->w),
      .a_vectors = moelora_are_vector_factors(lora->a, lora->num_slices),
      .quantizes_x = e4m3_x && !load->x_is_quantized,
      .quantizes_vectors = e4m3_x && moelora_is_vector_row(load->x, load->x_stride, load->w->k),
      .stores_out = true,
      .num_counters = num_counters_of(load, v),
      .l2_elements = l2_elements_of(v, device),
      .weights_again = moelora_reads_weights_again(v, moelora_rows_per_expert(load->routes)),
      .run = run_of(load, v),
  };
  const bool b_vectors = moelora_are_vector_factors(lora->b, lora->num_slices);
  plan.b_vectors = b_vectors && lora->max_rank % 8 == 0;
  plan.b_boxes = b_vectors && moelora_are_map_factors(lora->b, lora->num_slices, lora->slice_n) &&
                 !cuts_boxes(load);
  /* A per-token scale is known only after the last tile of the token. */
  const moelora_weights *next = load->next;
  if (next && load->gated && v->needs == MOELORA_SM90 &&
      moelora_stores_e4m3(v->format, v->block_n) && moelora_takes_e4m3(next->format) &&
      next->x != MOELORA_X_NATIVE && next->x != MOELORA_X_TOKEN && load->n_out % 128 == 0) {
    plan.stores_e4m3 = true;
    plan.stores_out = load->next_reads_out;
  }
  return plan;
}

moelora_shrink_plan moelora_plan_projection_shrink(const moelora_projection_load *load,
                                                   const moelora_variant *v,
                                                   const moelora_align_plan *align,
                                                   const moelora_variant *tuned,
                                                   const moelora_device_info *device) {
  if (!has_adapters(load))
    return (moelora_shrink_plan){0};
  const moelora_routes *routes = load->routes;
  const moelora_factors *lora = load->lora;
  const int64_t pairs = (int64_t)routes->num_experts * routes->max_loras;
  const int64_t blocks = moelora_max_blocks(routes, v->block_m, moelora_cluster_blocks(v));
  const int64_t x_rows =
      load->x_rows_each ? routes->num_rows / load->x_rows_each : blocks * v->block_m;
  const moelora_shrink_load shrink = {
      .dtype = v->dtype,
      .family = (moelora_family)v->needs,
      .rows = routes->num_rows,
      .segments = routes->num_rows < pairs ? routes->num_rows : pairs,
      .columns = moelora_padded_columns(lora),
      .depth = load->w->k,
      .vectors = moelora_is_vector_row(load->x, load->x_stride, load->w->k) &&
                 moelora_are_vector_factors(lora->a, lora->num_slices),
      .boxes = moelora_are_boxes(lora, x_rows, load->x_stride),
      .listed = align->segments,
      .tuned = tuned,
      .max_blocks = blocks,
      .block_rows = v->block_m,
      .by_position = load->x_rows_each == 0,
      .x_rows = x_rows};
  return moelora_plan_shrink_blocks(&shrink, device);
}
