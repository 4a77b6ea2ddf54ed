#include "cpu/tables.h"

void moelora_tables_take(const moelora_routes *routes, moelora_arena *arena,
                         moelora_tables *tables) {
  const size_t rows = (size_t)routes->num_rows, slots = (size_t)routes->max_loras;
  *tables = (moelora_tables){0};
  if (routes->topk_ids.data)
    tables->expert = moelora_take_array(arena, rows, sizeof(int32_t));
  if (routes->token_lora_mapping.data)
    tables->adapter = moelora_take_array(arena, (size_t)routes->num_tokens, sizeof(int32_t));
  if (routes->lora_ranks || routes->adapter_enabled)
    tables->rank = moelora_take_array(arena, slots, sizeof(int32_t));
  if (routes->lora_scalings)
    tables->scaling = moelora_take_array(arena, slots, sizeof(float));
  if (routes->w13_one_a)
    tables->one_a = moelora_take_array(arena, slots, sizeof(int32_t));
  if (routes->topk_weights)
    tables->weight = moelora_take_array(arena, rows, sizeof(float));
  if (routes->expert_map)
    tables->expert_map = moelora_take_array(arena, (size_t)routes->num_global, sizeof(int32_t));
}

static float read_f32(const float *from) {
  float value;
  __atomic_load(from, &value, __ATOMIC_RELAXED);
  return value;
}

static int64_t read_id(const moelora_ids *ids, int64_t at) {
  return ids->is_64 ? __atomic_load_n((const int64_t *)ids->data + at, __ATOMIC_RELAXED)
                    : moelora_read_i32((const int32_t *)ids->data + at);
}

static bool read_enabled(const moelora_routes *routes, int32_t adapter) {
  const void *enabled = routes->adapter_enabled;
  if (!enabled)
    return true;
  return routes->adapter_enabled_bytes == 1
             ? __atomic_load_n((const uint8_t *)enabled + adapter, __ATOMIC_RELAXED) != 0
             : moelora_read_i32((const int32_t *)enabled + adapter) != 0;
}

static void read_slots(const moelora_routes *routes, moelora_tables *tables) {
  for (int32_t i = 0; tables->rank && i < routes->max_loras; i++) {
    const int32_t rank = routes->lora_ranks ? moelora_read_i32(&routes->lora_ranks[i]) : INT32_MAX;
    tables->rank[i] = !read_enabled(routes, i) ? -1 : rank < 0 ? 0 : rank;
  }
  for (int32_t i = 0; tables->scaling && i < routes->max_loras; i++)
    tables->scaling[i] = read_f32(&routes->lora_scalings[i]);
  for (int32_t i = 0; tables->one_a && i < routes->max_loras; i++)
    tables->one_a[i] = moelora_read_i32(&routes->w13_one_a[i]);
}

static void read_adapters(const moelora_routes *routes, moelora_tables *tables) {
  const moelora_ids *ids = &routes->token_lora_mapping;
  for (int64_t m = 0; tables->adapter && m < routes->num_tokens; m++)
    tables->adapter[m] = moelora_active_adapter(routes, tables, read_id(ids, m * ids->stride[0]));
}

static void read_experts(const moelora_routes *routes, moelora_tables *tables) {
  const moelora_ids *ids = &routes->topk_ids;
  for (int32_t i = 0; tables->expert_map && i < routes->num_global; i++) {
    const int32_t expert = moelora_read_i32(&routes->expert_map[i]);
    tables->expert_map[i] = expert >= 0 && expert < routes->num_experts ? expert : -1;
  }
  const int64_t known = tables->expert_map ? routes->num_global : routes->num_experts;
  int32_t *to = tables->expert;
  for (int64_t m = 0; to && m < routes->num_tokens; m++)
    for (int64_t j = 0; j < routes->top_k; j++) {
      const int64_t id = read_id(ids, m * ids->stride[0] + j * ids->stride[1]);
      *to++ = id < 0 || id >= known ? -1
              : tables->expert_map  ? tables->expert_map[id]
                                    : (int32_t)id;
    }
}

static void read_weights(const moelora_routes *routes, moelora_tables *tables) {
  const int64_t *stride = routes->topk_weights_stride;
  float *to = tables->weight;
  for (int64_t m = 0; to && m < routes->num_tokens; m++)
    for (int64_t j = 0; j < routes->top_k; j++)
      *to++ = read_f32(&routes->topk_weights[m * stride[0] + j * stride[1]]);
}

void moelora_tables_read(const moelora_routes *routes, moelora_tables *tables) {
  read_slots(routes, tables);
  read_adapters(routes, tables);
  read_experts(routes, tables);
  read_weights(routes, tables);
}
