/* Alignment in its four modes against a sort by (expert, adapter, row) written as three loops. */
#include "naive.h"

typedef struct expected {
  int32_t *row_ids, *expert_ids, *lora_ids;
  float *weights;
  int64_t blocks; /* blocks in use */
} expected;

/* Pads the current block. */
static void finish_block(expected *want, int64_t *used, int32_t block_size) {
  if (*used % block_size)
    *used += block_size - *used % block_size;
  want->blocks = *used / block_size;
}

static void align_naively(const moelora_align_args *args, expected *want) {
  const moelora_align_mode mode = args->mode;
  const moelora_tensor *ids = &args->routing.topk_ids, *map = &args->routing.expert_map;
  bool with_adapters = mode == MOELORA_ALIGN_UNIFORM || mode == MOELORA_ALIGN_SEGMENTED;
  int64_t top_k = ids->size[1], rows = ids->size[0] * top_k, used = 0;
  for (int64_t e = 0; e < args->num_experts; e++) {
    int64_t before = used;
    for (int64_t l = -1; l < (with_adapters ? args->max_loras : 0); l++) {
      for (int64_t p = 0; p < rows; p++) {
        int64_t m = p / top_k;
        int64_t adapter = with_adapters ? adapter_of(&args->adapters, args->max_loras, m) : -1;
        if (expert_of(&args->routing, args->num_experts, m, p % top_k) != e || adapter != l)
          continue;
        bool sorting = mode == MOELORA_ALIGN_SORTING;
        want->row_ids[used] = (int32_t)(sorting ? m : p);
        want->expert_ids[used / args->block_size] = (int32_t)e;
        if (mode == MOELORA_ALIGN_UNIFORM)
          want->lora_ids[used / args->block_size] = (int32_t)l;
        if (mode == MOELORA_ALIGN_SEGMENTED)
          want->lora_ids[used] = (int32_t)l;
        if (sorting)
          want->weights[used] = (float)at(&args->routing.topk_weights, m, p % top_k, 0, 0);
        used++;
      }
      if (mode == MOELORA_ALIGN_UNIFORM)
        finish_block(want, &used, args->block_size);
    }
    bool local = !map->data;
    for (int64_t i = 0; map->data && i < map->size[0]; i++)
      local = local || at(map, i, 0, 0, 0) == (double)e;
    if (mode == MOELORA_ALIGN_SORTING && used == before && local) {
      want->expert_ids[used / args->block_size] = (int32_t)e;
      used += args->block_size;
    }
    finish_block(want, &used, args->block_size);
  }
}

static void check_same(const char *what, const void *got, const int32_t *want, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (((const int32_t *)got)[i] != want[i])
      FAIL("%s[%lld] is %d, expected %d", what, (long long)i, ((const int32_t *)got)[i], want[i]);
}

static int32_t *filled(int64_t count, int32_t value) {
  int32_t *data = allocate((size_t)count * 4);
  for (int64_t i = 0; i < count; i++)
    data[i] = value;
  return data;
}

static void test_case(moelora_align_mode mode, uint64_t number) {
  seed(number);
  int64_t tokens = number % 7 == 0 ? 0 : random_in(1, 40), top_k = random_in(1, 4);
  int64_t num_experts = random_in(1, 9);
  bool mapped = random_in(0, 1);
  moelora_dtype ids = random_in(0, 1) ? MOELORA_I32 : MOELORA_I64;
  moelora_align_args args = {
      .mode = mode,
      .num_experts = (int32_t)num_experts,
      .block_size = (int32_t)random_in(1, 20),
      .max_loras = (int32_t)random_in(1, 5),
      .routing =
          {
              .topk_ids = random_ids(ids, -1, num_experts, SIZES(tokens, top_k)),
              .topk_weights = random_tensor(MOELORA_F32, 1, SIZES(tokens, top_k)),
          },
      .num_tokens_post_padded = new_tensor(MOELORA_I32, SIZES(1)),
  };
  if (mapped) { /* local experts in another order, some on other ranks */
    args.routing.expert_map = new_tensor(MOELORA_I32, 1, &num_experts);
    int32_t *map = args.routing.expert_map.data;
    for (int32_t i = 0; i < num_experts; i++)
      map[i] = i % 3 == 2 ? -1 : (int32_t)num_experts - 1 - i;
  }
  if (random_in(0, 3))
    args.adapters.token_lora_mapping = random_ids(ids, -2, args.max_loras, 1, &tokens);
  if (random_in(0, 1))
    args.adapters.adapter_enabled =
        random_ids(MOELORA_I32, 0, 1, SIZES(args.max_loras + random_in(0, 1)));

  int64_t blocks =
      random_in(0, 3) + moelora_align_max_blocks(mode, tokens * top_k, args.num_experts,
                                                 args.max_loras, args.block_size);
  int64_t rows = blocks * args.block_size;
  int64_t loras = mode == MOELORA_ALIGN_SEGMENTED ? rows : blocks;
  args.sorted_token_ids = new_tensor(MOELORA_I32, 1, &rows);
  args.expert_ids = new_tensor(MOELORA_I32, 1, &blocks);
  if (mode == MOELORA_ALIGN_UNIFORM || mode == MOELORA_ALIGN_SEGMENTED)
    args.lora_ids = new_tensor(MOELORA_I32, 1, &loras);
  if (mode == MOELORA_ALIGN_SORTING) {
    args.sorted_weights = new_tensor(MOELORA_F32, 1, &rows);
    args.out_to_zero = new_tensor(MOELORA_BF16, SIZES(tokens, 5));
  }

  expected want = {
      .row_ids = filled(rows, (int32_t)(tokens * top_k)),
      .expert_ids = filled(blocks, -1),
      .lora_ids = filled(loras, -1),
      .weights = (float *)filled(rows, 0),
  };
  align_naively(&args, &want);
  CHECK(want.blocks <= blocks);
  CHECK_RUN(align, &args, serial);
  check_same("sorted_token_ids", args.sorted_token_ids.data, want.row_ids, rows);
  check_same("expert_ids", args.expert_ids.data, want.expert_ids, blocks);
  if (args.lora_ids.data)
    check_same("lora_ids", args.lora_ids.data, want.lora_ids, loras);
  if (args.sorted_weights.data)
    CHECK(memcmp(args.sorted_weights.data, want.weights, (size_t)rows * 4) == 0);
  CHECK_INT(*(int32_t *)args.num_tokens_post_padded.data, want.blocks * args.block_size);
  for (int64_t i = 0; args.out_to_zero.data && i < tokens * 5; i++)
    CHECK(((uint16_t *)args.out_to_zero.data)[i] == 0);
  release_all();
}

/* The bound is attained by the worst routing, and does not overflow. */
static void test_max_blocks(void) {
  const struct {
    moelora_align_mode mode;
    int64_t rows;
    int32_t experts, loras, block;
    int64_t want;
  } table[] = {
      {MOELORA_ALIGN_BASE, 0, 8, 0, 16, 0},
      {MOELORA_ALIGN_BASE, 3, 8, 0, 16, 3},   /* three experts of one row */
      {MOELORA_ALIGN_BASE, 40, 8, 0, 16, 10}, /* seven of one row, one of 33 */
      {MOELORA_ALIGN_SEGMENTED, 40, 8, 4, 16, 10},
      {MOELORA_ALIGN_UNIFORM, 40, 2, 3, 16, 10},
      {MOELORA_ALIGN_UNIFORM, 40, 8, 4, 16, 40},
      {MOELORA_ALIGN_SORTING, 0, 8, 0, 16, 8},
      {MOELORA_ALIGN_SORTING, 40, 8, 0, 16, 10},
      {MOELORA_ALIGN_UNIFORM, INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX},
      {MOELORA_ALIGN_BASE, 40, 8, 0, 0, 0},
      {MOELORA_ALIGN_SORTING, INT64_MAX, 8, 0, 1, INT64_MAX}, /* limited by int64 */
      {MOELORA_ALIGN_UNIFORM, INT64_MAX, INT32_MAX, INT32_MAX, 1, INT64_MAX},
  };
  for (size_t i = 0; i < sizeof table / sizeof *table; i++)
    CHECK_INT(moelora_align_max_blocks(table[i].mode, table[i].rows, table[i].experts,
                                       table[i].loras, table[i].block),
              table[i].want);
}

int main(void) {
  const uint64_t cases = 200;
  test_max_blocks();
  for (int mode = MOELORA_ALIGN_BASE; mode <= MOELORA_ALIGN_SORTING; mode++)
    for (uint64_t number = 0; number < cases; number++)
      test_case((moelora_align_mode)mode, number);
  printf("test_align: 4 modes, %llu cases each\n", (unsigned long long)cases);
  return 0;
}
