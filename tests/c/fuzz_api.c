/* Random arguments for the public functions: fuzz_api [CALLS [SEED]], meant for sanitizers.
 *
 * Every call starts from valid arguments and overwrites a few fields: sizes, strides, dtypes,
 * pointers, enumerators, numbers, absence. Every view owns a block of exactly the bytes that it
 * spans, so that the sanitizer detects any access outside; ids, ranks, tables and factors hold
 * arbitrary bits. A call must
 *   - not touch memory outside its arguments, whatever ids say;
 *   - keep to that, whichever of this machine's kernels runs;
 *   - refuse negative sizes and anything that spans more than memory can hold;
 *   - leave all outputs unchanged, and a message, if it refuses; leave no message otherwise.
 * Views too large to be backed by memory are only validated, by prepare. */
#include "fuzz.h"

static double any_number(void) {
  static const double odd[] = {1e-300, 1e-39, 1e-30, 0.5, 1, 7, 3e38, 1e39, -1, INFINITY, NAN};
  return odd[random_in(0, sizeof odd / sizeof *odd - 1)];
}

/* ---- arguments: valid, then corrupted ---- */

/* A contiguous view without memory. */
static moelora_tensor shaped(moelora_dtype dtype, int32_t ndim, const int64_t *size) {
  static char somewhere;
  return view(&somewhere, dtype, ndim, size);
}

static moelora_tensor maybe(moelora_tensor t) {
  return one_in(2) ? t : absent;
}

static moelora_dtype id_dtype(void) {
  return one_in(3) ? MOELORA_I64 : MOELORA_I32;
}

typedef struct sizes {
  int64_t m, top_k, e, k, i, r, slots;
} sizes;

static sizes any_sizes(void) {
  return (sizes){
      .m = random_in(0, 9),
      .top_k = random_in(1, 3),
      .e = random_in(1, 5),
      .k = one_in(4) ? 64 : random_in(1, 24),
      .i = one_in(4) ? 64 : random_in(1, 24),
      .r = random_in(1, 9),
      .slots = random_in(1, 4),
  };
}

static moelora_routing any_routing(const sizes *s) {
  return (moelora_routing){
      .topk_ids = shaped(id_dtype(), SIZES(s->m, s->top_k)),
      .topk_weights = shaped(MOELORA_F32, SIZES(s->m, s->top_k)),
      .expert_map = one_in(3) ? shaped(MOELORA_I32, SIZES(s->e + random_in(0, 3))) : absent,
  };
}

static moelora_adapters any_adapters(const sizes *s) {
  return (moelora_adapters){
      .token_lora_mapping = one_in(6) ? absent : shaped(id_dtype(), SIZES(s->m)),
      .lora_ranks = maybe(shaped(MOELORA_I32, SIZES(s->slots))),
      .lora_scalings = maybe(shaped(MOELORA_F32, SIZES(s->slots))),
      .adapter_enabled =
          maybe(shaped(one_in(2) ? MOELORA_BOOL : MOELORA_I32, SIZES(s->slots + random_in(0, 1)))),
  };
}

static moelora_lora any_lora(const sizes *s, moelora_dtype dtype, int64_t n, int64_t k,
                             int32_t slices) {
  moelora_lora lora = {.num_slices = one_in(4) ? 0 : slices};
  for (int32_t i = 0; i < lora.num_slices; i++) {
    lora.a[i] = shaped(dtype, SIZES(s->slots, one_in(3) ? 1 : s->e, s->r, k));
    lora.b[i] = shaped(dtype, SIZES(s->slots, one_in(3) ? 1 : s->e, n / slices, s->r));
  }
  if (one_in(60))
    lora.num_slices = (int32_t)(one_in(2) ? any_size() : random_in(-1, MOELORA_MAX_SLICES + 1));
  return lora;
}

/* Weights [E, n, k], packed if possible. */
static moelora_tensor any_weights(moelora_dtype dtype, int64_t e, int64_t n, int64_t k) {
  if (n % 64 == 0 && k % 64 == 0 && one_in(2))
    return shaped(dtype, SIZES(e, n / 64, k / 64, 64, 64));
  return shaped(dtype, SIZES(e, n, k));
}

static moelora_dtype any_float(void) {
  return (moelora_dtype)random_in(MOELORA_F32, MOELORA_F16);
}

/* Arguments that a mode does not read may hold anything, and must not be looked at. */
static moelora_tensor wild(void) {
  moelora_tensor t = shaped((moelora_dtype)random_in(-1, 7), SIZES(2, 3, 2, 3, 2));
  for (int32_t i = 0; i < MOELORA_MAX_DIMS; i++)
    t.size[i] = one_in(2) ? any_size() : 2;
  t.ndim = (int32_t)any_size();
  t.data = one_in(4) ? NULL : t.data;
  return t;
}

static int64_t depth_tiles(const moelora_layout *layout, int64_t k) {
  return layout->format >= MOELORA_FP8 ? (k + 127) / 128 : (k + 63) / 64;
}

/* Some weights are tiles, with mostly correct sizes. */
static moelora_tensor any_tiles(moelora_tensor w, int64_t e, int64_t n, int64_t k,
                                moelora_row_order order, moelora_layout *layout) {
  if (!one_in(4) || e < 1 || n < 1 || k < 1)
    return w;
  *layout = (moelora_layout){
      .format = (moelora_format)random_in(1, 8),
      .order = one_in(10) ? (moelora_row_order)random_in(-1, 3) : order,
      .rows = one_in(20) ? any_size() : n,
  };
  if (layout->format >= MOELORA_FP8)
    layout->x = (moelora_x_format)random_in(0, 3);
  if (one_in(20))
    layout->x = (moelora_x_format)random_in(-1, 4);
  if ((layout->x == MOELORA_X_STATIC) != one_in(20))
    layout->x_scale = one_in(10) ? -1.0f : 0.02f;
  const int64_t rows = order == MOELORA_ROWS_PLAIN ? (n + 63) / 64 : 2 * ((n / 2 + 63) / 64);
  const moelora_tensor tiles = shaped(
      MOELORA_U8, SIZES(e, rows, depth_tiles(layout, k), moelora_tile_bytes(layout->format)));
  if (one_in(20))
    layout->format = (moelora_format)any_size();
  return tiles;
}

/* Inputs and outputs of a call, in any order. */
typedef struct list {
  moelora_tensor *at[MAX_VIEWS];
  int count;
} list;

static void put(list *l, moelora_tensor *t) {
  l->at[l->count++] = t;
}

static void put_common(list *inputs, moelora_routing *routing, moelora_adapters *adapters) {
  put(inputs, &routing->topk_ids), put(inputs, &routing->topk_weights);
  put(inputs, &routing->expert_map);
  put(inputs, &adapters->token_lora_mapping), put(inputs, &adapters->lora_ranks);
  put(inputs, &adapters->lora_scalings), put(inputs, &adapters->adapter_enabled);
}

static void put_lora(list *inputs, moelora_lora *lora) {
  for (int32_t i = 0; i < lora->num_slices && i < MOELORA_MAX_SLICES; i++)
    put(inputs, &lora->a[i]), put(inputs, &lora->b[i]);
}

/* Overwrites fields of zero or more views, then allocates memory for all of them. */
static void disturb(list *inputs, list *outputs) {
  list *lists[] = {inputs, outputs};
  for (int64_t times = one_in(3) ? 0 : random_in(1, 3); times > 0; times--) {
    list *l = lists[random_in(0, 9) < 7 ? 0 : 1];
    disturb_view(l->at[random_in(0, l->count - 1)]);
  }
  backed = true;
  for (int i = 0; i < inputs->count; i++)
    back(inputs->at[i], false);
  for (int i = 0; i < outputs->count; i++)
    back(outputs->at[i], true);
}

static void fuzz_align(void) {
  sizes s = any_sizes();
  moelora_align_mode mode = (moelora_align_mode)random_in(0, 3);
  int32_t block = (int32_t)random_in(1, 20);
  int64_t blocks =
      moelora_align_max_blocks(mode, s.m * s.top_k, (int32_t)s.e, (int32_t)s.slots, block) +
      random_in(0, 2);
  moelora_align_args args = {
      .mode = one_in(60) ? (moelora_align_mode)any_size() : mode,
      .num_experts = (int32_t)(one_in(60) ? any_size() : s.e),
      .block_size = (int32_t)(one_in(60) ? any_size() : block),
      .max_loras = (int32_t)(one_in(60) ? any_size() : s.slots),
      .routing = any_routing(&s),
      .sorted_token_ids = shaped(MOELORA_I32, SIZES(blocks * block)),
      .expert_ids = shaped(MOELORA_I32, SIZES(blocks)),
      .num_tokens_post_padded = shaped(MOELORA_I32, SIZES(1)),
  };
  if (args.routing.expert_map.data && !one_in(20))
    args.num_experts = (int32_t)args.routing.expert_map.size[0];
  bool with_adapters = args.mode == MOELORA_ALIGN_UNIFORM || args.mode == MOELORA_ALIGN_SEGMENTED;
  if (mode == MOELORA_ALIGN_UNIFORM || mode == MOELORA_ALIGN_SEGMENTED) {
    args.adapters.token_lora_mapping = shaped(id_dtype(), SIZES(s.m));
    args.adapters.adapter_enabled = maybe(shaped(MOELORA_BOOL, SIZES(s.slots)));
    args.lora_ids =
        shaped(MOELORA_I32, SIZES(mode == MOELORA_ALIGN_UNIFORM ? blocks : blocks * block));
  }
  if (mode == MOELORA_ALIGN_SORTING) {
    args.sorted_weights = shaped(MOELORA_F32, SIZES(blocks * block));
    args.out_to_zero = maybe(shaped(any_float(), SIZES(s.m, s.k)));
  }
  moelora_adapters unread = {0};
  list inputs = {0}, outputs = {0};
  put_common(&inputs, &args.routing, with_adapters ? &args.adapters : &unread);
  if (!with_adapters && one_in(4))
    args.adapters = (moelora_adapters){wild(), wild(), wild(), wild()};
  put(&outputs, &args.sorted_token_ids), put(&outputs, &args.expert_ids);
  put(&outputs, &args.lora_ids), put(&outputs, &args.num_tokens_post_padded);
  put(&outputs, &args.sorted_weights), put(&outputs, &args.out_to_zero);
  disturb(&inputs, &outputs);
  RUN(align, &args);
}

/* Without `out`; `alone`: of adapters without weights. `n` becomes the number of columns. */
static moelora_gemm_args any_gemm(const sizes *s, moelora_dtype dtype, moelora_dtype of_factors,
                                  bool alone, int64_t *n) {
  int32_t slices = (int32_t)random_in(1, 3);
  *n = s->i * slices;
  moelora_gemm_args args = {
      .x = shaped(dtype, SIZES(one_in(2) ? s->m : s->m * s->top_k, s->k)),
      .w = alone ? absent : any_weights(dtype, s->e, *n, s->k),
      .bias = alone ? absent : maybe(shaped(dtype, SIZES(s->e, *n))),
      .routing = any_routing(s),
      .adapters = any_adapters(s),
      .lora = any_lora(s, of_factors, *n, s->k, slices),
      .mul_routed_weight = one_in(2),
  };
  if (!alone)
    args.w = any_tiles(args.w, s->e, *n, s->k, MOELORA_ROWS_PLAIN, &args.w_layout);
  return args;
}

static void put_gemm(list *inputs, moelora_gemm_args *args) {
  put(inputs, &args->x), put(inputs, &args->w), put(inputs, &args->bias);
  put_common(inputs, &args->routing, &args->adapters);
  put_lora(inputs, &args->lora);
}

static void fuzz_gemm(void) {
  sizes s = any_sizes();
  int64_t n;
  moelora_dtype dtype = any_float();
  moelora_gemm_args args = any_gemm(&s, dtype, one_in(4) ? MOELORA_F32 : dtype, false, &n);
  args.out = shaped(dtype, SIZES(s.m, s.top_k, n));
  list inputs = {0}, outputs = {0};
  put_gemm(&inputs, &args);
  put(&outputs, &args.out);
  disturb(&inputs, &outputs);
  RUN(gemm, &args);
}

/* Some with float32 factors and a 16-bit dtype. `rows` becomes the number of rows of w13. */
static moelora_experts_args any_experts(sizes *given, moelora_dtype dtype, int64_t *rows) {
  sizes s = *given;
  moelora_activation activation = (moelora_activation)random_in(0, NUM_ACTIVATIONS - 1);
  int32_t slices = activation == MOELORA_RELU2 ? 1 : (int32_t)random_in(1, 2);
  int64_t n = activation == MOELORA_RELU2 ? s.i : 2 * s.i;
  if (one_in(4))
    s.top_k = 1;
  moelora_experts_args args = {
      .hidden_states = shaped(dtype, SIZES(s.m, s.k)),
      .w13 = any_weights(dtype, s.e, n, s.k),
      .w2 = any_weights(dtype, s.e, s.k, s.i),
      .w13_bias = maybe(shaped(dtype, SIZES(s.e, n))),
      .w2_bias = maybe(shaped(dtype, SIZES(s.e, s.k))),
      .routing = any_routing(&s),
      .adapters = any_adapters(&s),
      .w13_one_a = maybe(shaped(MOELORA_I32, SIZES(s.slots))),
      .w13_lora = any_lora(&s, one_in(4) ? MOELORA_F32 : dtype, n, s.k, slices),
      .w2_lora = any_lora(&s, one_in(4) ? MOELORA_F32 : dtype, s.k, s.i, 1),
      .activation = one_in(60) ? (moelora_activation)any_size() : activation,
      .activation_alpha = one_in(30) ? any_number() : 0,
      .activation_limit = one_in(8) ? any_number() : 0,
      .apply_router_weight_on_input = s.top_k == 1 || one_in(60),
      .out = shaped(dtype, SIZES(s.m, s.k)),
  };
  const moelora_row_order order = activation == MOELORA_SWIGLUOAI ? MOELORA_ROWS_INTERLEAVED
                                  : activation == MOELORA_RELU2   ? MOELORA_ROWS_PLAIN
                                                                  : MOELORA_ROWS_GATE_UP;
  args.w13 = any_tiles(args.w13, s.e, n, s.k, order, &args.w13_layout);
  args.w2 = any_tiles(args.w2, s.e, s.k, s.i, MOELORA_ROWS_PLAIN, &args.w2_layout);
  *given = s;
  *rows = n;
  return args;
}

/* Saved tensors of such a layer; occasionally too many or too few. */
static moelora_saved any_saved(const sizes *s, const moelora_experts_args *args, int64_t rows) {
  const moelora_dtype dtype = args->hidden_states.dtype;
  const bool mapped = args->adapters.token_lora_mapping.data != NULL;
  const int64_t p = s->m * s->top_k, slices = args->w13_lora.num_slices;
  const bool has13 = mapped && slices > 0, has2 = mapped && args->w2_lora.num_slices > 0;
  moelora_saved saved = {.gate_up = shaped(dtype, SIZES(p, rows))};
  if (has13 != one_in(60))
    saved.w13_shrink = shaped(dtype, SIZES(p, slices, s->r));
  if (has2 != one_in(60))
    saved.w2_shrink = shaped(dtype, SIZES(p, s->r));
  return saved;
}

static void put_saved(list *l, moelora_saved *saved) {
  put(l, &saved->gate_up), put(l, &saved->w13_shrink), put(l, &saved->w2_shrink);
}

static void put_experts(list *inputs, moelora_experts_args *args) {
  put(inputs, &args->hidden_states), put(inputs, &args->w13), put(inputs, &args->w2);
  put(inputs, &args->w13_bias), put(inputs, &args->w2_bias);
  put_common(inputs, &args->routing, &args->adapters);
  put(inputs, &args->w13_one_a);
  put_lora(inputs, &args->w13_lora), put_lora(inputs, &args->w2_lora);
}

static void fuzz_experts(void) {
  sizes s = any_sizes();
  int64_t rows;
  moelora_experts_args args = any_experts(&s, any_float(), &rows);
  if (one_in(3))
    args.saved = any_saved(&s, &args, rows);
  list inputs = {0}, outputs = {0};
  put_experts(&inputs, &args);
  put(&outputs, &args.out);
  put_saved(&outputs, &args.saved);
  disturb(&inputs, &outputs);
  RUN(experts, &args);
}

/* A gradient of `like`, if requested. */
static moelora_tensor any_gradient(const moelora_tensor *like, moelora_dtype dtype) {
  if (!like->data || one_in(4))
    return absent;
  return shaped(one_in(3) ? MOELORA_F32 : dtype, like->ndim, like->size);
}

/* Some of them, of the touched pairs alone where experts have factors of their own. */
static void any_factor_gradients(moelora_lora *grads, const moelora_lora *lora, moelora_dtype dtype,
                                 const sizes *s, const moelora_tensor *pairs) {
  grads->num_slices = one_in(60) ? (int32_t)any_size() : lora->num_slices;
  for (int32_t i = 0; i < lora->num_slices && i < MOELORA_MAX_SLICES; i++) {
    const moelora_tensor *const from[] = {&lora->a[i], &lora->b[i]};
    moelora_tensor *const to[] = {&grads->a[i], &grads->b[i]};
    for (int j = 0; j < 2; j++) {
      *to[j] = any_gradient(from[j], dtype);
      if (pairs->data && to[j]->data && to[j]->size[1] == s->e)
        *to[j] = shaped(to[j]->dtype, SIZES(1, random_in(1, 9), to[j]->size[2], to[j]->size[3]));
    }
  }
}

static moelora_tensor any_pairs(const sizes *s) {
  return one_in(3) ? shaped(MOELORA_I32, SIZES(s->slots, s->e)) : absent;
}

static void fuzz_experts_backward(void) {
  sizes s = any_sizes();
  int64_t rows;
  const moelora_dtype dtype = any_float();
  moelora_experts_backward_args args = {.accumulate = one_in(2)};
  args.forward = any_experts(&s, dtype, &rows);
  args.forward.saved = any_saved(&s, &args.forward, rows);
  args.dout = shaped(dtype, SIZES(s.m, s.k));
  moelora_experts_grads *grads = &args.grads;
  if (one_in(2))
    grads->hidden_states = shaped(dtype, SIZES(s.m, s.k));
  if (one_in(2))
    grads->topk_weights = shaped(MOELORA_F32, SIZES(s.m, s.top_k));
  grads->pairs = any_pairs(&s);
  any_factor_gradients(&grads->w13_lora, &args.forward.w13_lora, dtype, &s, &grads->pairs);
  any_factor_gradients(&grads->w2_lora, &args.forward.w2_lora, dtype, &s, &grads->pairs);
  grads->w13_bias = any_gradient(&args.forward.w13_bias, dtype);
  grads->w2_bias = any_gradient(&args.forward.w2_bias, dtype);
  list inputs = {0}, outputs = {0};
  put_experts(&inputs, &args.forward);
  put_saved(&inputs, &args.forward.saved);
  put(&inputs, &args.dout), put(&inputs, &grads->pairs);
  put(&outputs, &grads->hidden_states), put(&outputs, &grads->topk_weights);
  put_lora(&outputs, &grads->w13_lora), put_lora(&outputs, &grads->w2_lora);
  put(&outputs, &grads->w13_bias), put(&outputs, &grads->w2_bias);
  disturb(&inputs, &outputs);
  RUN(experts_backward, &args);
}

static void fuzz_gemm_backward(void) {
  sizes s = any_sizes();
  int64_t n;
  const bool alone = one_in(2);
  const moelora_dtype dtype = any_float();
  moelora_gemm_backward_args args = {.accumulate = one_in(2)};
  args.forward = any_gemm(&s, dtype, one_in(4) ? MOELORA_F32 : dtype, alone, &n);
  args.num_experts = (int32_t)(one_in(60) ? any_size() : alone ? s.e : 0);
  args.dout = shaped(dtype, SIZES(s.m, s.top_k, n));
  moelora_gemm_grads *grads = &args.grads;
  if (one_in(2))
    grads->x = shaped(dtype, 2, args.forward.x.size);
  if (one_in(2))
    grads->topk_weights = shaped(MOELORA_F32, SIZES(s.m, s.top_k));
  grads->bias = any_gradient(&args.forward.bias, dtype);
  grads->pairs = any_pairs(&s);
  any_factor_gradients(&grads->lora, &args.forward.lora, dtype, &s, &grads->pairs);
  list inputs = {0}, outputs = {0};
  put_gemm(&inputs, &args.forward);
  put(&inputs, &args.dout), put(&inputs, &grads->pairs);
  put(&outputs, &grads->x), put(&outputs, &grads->topk_weights), put(&outputs, &grads->bias);
  put_lora(&outputs, &grads->lora);
  disturb(&inputs, &outputs);
  RUN(gemm_backward, &args);
}

/* ---- deltas ---- */

static moelora_lists any_lists(const sizes *s, int64_t blocks, int32_t block_size) {
  int64_t ids = random_in(0, 5);
  return (moelora_lists){
      .sorted_token_ids = shaped(MOELORA_I32, SIZES(s->slots, blocks * block_size)),
      .expert_ids = shaped(MOELORA_I32, SIZES(s->slots, blocks)),
      .num_tokens_post_padded = shaped(MOELORA_I32, SIZES(s->slots)),
      .lora_ids = shaped(MOELORA_I32, SIZES(ids)),
      .num_active = (int32_t)(one_in(60) ? any_size() : random_in(0, ids)),
      .block_size = (int32_t)(one_in(60) ? any_size() : block_size),
  };
}

static void put_lists(list *l, moelora_lists *lists) {
  put(l, &lists->sorted_token_ids), put(l, &lists->expert_ids);
  put(l, &lists->num_tokens_post_padded);
}

static void fuzz_align_lists(void) {
  sizes s = any_sizes();
  int32_t block_size = (int32_t)random_in(1, 20);
  moelora_align_lists_args args = {
      .max_loras = (int32_t)(one_in(60) ? any_size() : s.slots),
      .routing = any_routing(&s),
      .adapters = any_adapters(&s),
  };
  const moelora_tensor *map = &args.routing.expert_map;
  int64_t known = map->data ? map->size[0] : s.e;
  int64_t blocks =
      moelora_align_max_blocks(MOELORA_ALIGN_BASE, s.m * s.top_k, (int32_t)known, 0, block_size) +
      random_in(0, 2);
  args.num_experts = (int32_t)(one_in(60) ? any_size() : known);
  args.lists = any_lists(&s, blocks, block_size);
  list inputs = {0}, outputs = {0};
  put_common(&inputs, &args.routing, &args.adapters);
  put(&inputs, &args.lists.lora_ids), put_lists(&outputs, &args.lists);
  disturb(&inputs, &outputs);
  RUN(align_lists, &args);
}

/* One half or both, rows by routing or by lists. */
static void fuzz_delta(void) {
  sizes s = any_sizes();
  moelora_dtype dtype = any_float();
  int32_t slices = (int32_t)random_in(1, 3);
  int64_t n = s.i * slices;
  bool listed = one_in(2), shrink = one_in(2), expand = !shrink || one_in(2);
  moelora_delta_args args = {
      .num_experts = (int32_t)(one_in(60) ? any_size() : s.e),
      .routing = any_routing(&s),
      .adapters = any_adapters(&s),
      .lora = any_lora(&s, dtype, n, s.k, slices),
      .silu_and_mul = expand && one_in(8),
  };
  bool plain = expand && !args.silu_and_mul;
  args.mul_routed_weight = plain && one_in(2), args.add_inputs = plain && one_in(2);
  args.out_offset = plain ? random_in(0, 3) : 0;
  if (one_in(30))
    args.out_offset = any_size(), bump(&args.out_offset, random_in(-9, 0));
  list inputs = {0}, outputs = {0};
  if (shrink)
    args.x = shaped(dtype, SIZES(one_in(2) ? s.m : s.m * s.top_k, s.k)), put(&inputs, &args.x);
  if (!shrink || !expand)
    args.h = shaped(dtype, SIZES(slices, s.m, s.top_k, s.r)),
    put(expand ? &inputs : &outputs, &args.h);
  if (expand) {
    int64_t width = args.silu_and_mul ? n / 2 : n + random_in(0, 3) + 3;
    args.out = plain && one_in(3) ? shaped(dtype, SIZES(s.m, width))
                                  : shaped(dtype, SIZES(s.m, s.top_k, width));
    put(&outputs, &args.out);
  }
  for (int32_t i = 0; i < args.lora.num_slices && i < MOELORA_MAX_SLICES; i++) {
    if (shrink)
      put(&inputs, &args.lora.a[i]);
    if (expand)
      put(&inputs, &args.lora.b[i]);
    if (!shrink || !expand)
      *(shrink ? &args.lora.b[i] : &args.lora.a[i]) = wild();
  }
  if (!listed) {
    put_common(&inputs, &args.routing, &args.adapters);
    args.lists = (moelora_lists){absent, wild(), wild(), wild(), (int32_t)any_size(), -1};
    args.num_tokens = any_size(), args.top_k = (int32_t)any_size();
  } else {
    int32_t block_size = (int32_t)random_in(1, 6);
    args.lists = any_lists(&s, random_in(0, 5), block_size);
    args.num_tokens = one_in(60) ? any_size() : s.m;
    args.top_k = (int32_t)(one_in(60) ? any_size() : s.top_k);
    put_lists(&inputs, &args.lists), put(&inputs, &args.lists.lora_ids);
    put(&inputs, &args.adapters.lora_ranks), put(&inputs, &args.adapters.lora_scalings);
    put(&inputs, &args.adapters.adapter_enabled);
    args.adapters.token_lora_mapping = wild();
    args.routing.topk_ids = wild(), args.routing.expert_map = wild();
    if (args.mul_routed_weight)
      put(&inputs, &args.routing.topk_weights);
    else
      args.routing.topk_weights = wild();
  }
  disturb(&inputs, &outputs);
  if (listed && !args.lists.sorted_token_ids.data) /* then routing is used, which has no memory */
    backed = false;
  RUN(delta, &args);
}

static void fuzz_mlp_delta(void) {
  sizes s = any_sizes();
  moelora_dtype dtype = any_float();
  moelora_mlp_delta_args args = {
      .num_experts = (int32_t)(one_in(60) ? any_size() : s.e),
      .hidden_states = shaped(dtype, SIZES(s.m, s.k)),
      .routing = any_routing(&s),
      .adapters = any_adapters(&s),
      .gate_up = any_lora(&s, dtype, 2 * s.i, s.k, (int32_t)random_in(1, 2)),
      .down = any_lora(&s, dtype, s.k, s.i, 1),
      .out = shaped(dtype, SIZES(s.m, s.k)),
  };
  list inputs = {0}, outputs = {0};
  put(&inputs, &args.hidden_states), put_common(&inputs, &args.routing, &args.adapters);
  put_lora(&inputs, &args.gate_up), put_lora(&inputs, &args.down);
  put(&outputs, &args.out);
  disturb(&inputs, &outputs);
  RUN(mlp_delta, &args);
}

static void fuzz_pack(void) {
  moelora_dtype dtype = any_float();
  int64_t e = random_in(0, 3), n = random_in(1, 2), k = random_in(1, 2);
  moelora_tensor w = shaped(dtype, SIZES(e, 64 * n, 64 * k));
  moelora_tensor out = shaped(dtype, SIZES(e, n, k, 64, 64));
  list inputs = {0}, outputs = {0};
  put(&inputs, &w), put(&outputs, &out);
  disturb(&inputs, &outputs);
  remember_outputs();
  if (!backed)
    return;
  moelora_exec exec = any_exec();
  moelora_status status = moelora_pack_weights(&w, &out, &exec);
  check_status("moelora_pack_weights", status, true);
  runs += status == MOELORA_OK;
}

static void fuzz_pack_quantized(void) {
  const int64_t e = random_in(0, 3), n = random_in(1, 140), k = 32 * random_in(1, 5);
  moelora_layout layout = {.format = (moelora_format)random_in(1, 8),
                           .order = (moelora_row_order)random_in(0, 2),
                           .rows = n};
  const bool fp8 = layout.format >= MOELORA_FP8, zeros = !fp8 && layout.format >= MOELORA_INT4_ZP;
  const int64_t groups = !fp8 && layout.format % 2 == 1 ? k / 32 : 1;
  const int64_t block = layout.format == MOELORA_FP8_ROWS ? random_in(1, n) : n;
  const int64_t rows = layout.order == MOELORA_ROWS_PLAIN ? (n + 63) / 64 : 2 * ((n / 2 + 63) / 64);
  const moelora_dtype scale = layout.format == MOELORA_MXFP4 ? MOELORA_U8
                              : fp8                          ? MOELORA_F32
                                                             : any_float();
  moelora_quantized w = {
      .values = shaped(MOELORA_U8, SIZES(e, n, fp8 ? k : k / 2)),
      .scales = shaped(scale, SIZES(e, fp8 ? (n - 1) / block + 1 : n, groups)),
      .zeros = zeros ? shaped(MOELORA_U8, SIZES(e, n, groups)) : absent,
      .block_rows = one_in(20) ? any_size()
                    : fp8      ? block
                               : 0,
      .block_columns = one_in(20) ? any_size()
                       : fp8      ? k
                                  : 0,
  };
  const int64_t bytes = moelora_tile_bytes(layout.format);
  moelora_tensor tiles = shaped(MOELORA_U8, SIZES(e, rows, depth_tiles(&layout, k), bytes));
  moelora_tensor out = shaped(one_in(2) ? MOELORA_BF16 : MOELORA_F16, SIZES(e, n, k));
  if (one_in(20))
    layout.format = (moelora_format)any_size();
  if (one_in(20))
    layout.rows = any_size();
  const bool packs = one_in(2);
  list inputs = {0}, outputs = {0};
  put(packs ? &outputs : &inputs, &tiles);
  if (packs)
    put(&inputs, &w.values), put(&inputs, &w.scales), put(&inputs, &w.zeros);
  else
    put(&outputs, &out);
  disturb(&inputs, &outputs);
  remember_outputs();
  if (!backed)
    return;
  moelora_exec exec = any_exec();
  const moelora_status status = packs
                                    ? moelora_pack_quantized(&w, &layout, out.dtype, &tiles, &exec)
                                    : moelora_unpack_quantized(&tiles, &layout, &out, &exec);
  check_status("quantized", status, true);
  runs += status == MOELORA_OK;
}

/* Defined by sanitizers, if the program was built with one. */
void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static void say_seed(void) {
  fprintf(stderr, "seed %llu\n", (unsigned long long)current_seed);
}

/* Half of the calls of its dtype run a kernel that is not the planned one. */
static void force_some_kernel(void) {
  static const char *names[64];
  static int count;
  const char *name;
  for (int32_t i = count ? -1 : 0; i >= 0 && (name = moelora_variant_name(i)); i++)
    if (moelora_variant_usable(i) && !strstr(name, "_sm"))
      names[count++] = name;
  moelora_force_variant(one_in(2) ? names[random_in(0, count - 1)] : NULL);
}

int main(int argc, char **argv) {
  if (__sanitizer_set_death_callback)
    __sanitizer_set_death_callback(say_seed);
  long long calls = argc > 1 ? atoll(argv[1]) : 20000, first = argc > 2 ? atoll(argv[2]) : 1;
  void (*const operators[])(void) = {fuzz_align,        fuzz_gemm,           fuzz_experts,
                                     fuzz_pack,         fuzz_align_lists,    fuzz_delta,
                                     fuzz_mlp_delta,    fuzz_pack_quantized, fuzz_experts_backward,
                                     fuzz_gemm_backward};
  const int count = sizeof operators / sizeof *operators;
  for (long long i = 0; i < calls; i++) {
    current_seed = (uint64_t)(first + i);
    seed(current_seed);
    force_some_kernel();
    operators[i % count]();
    forget_views();
  }
  if (calls >= 400 && (runs < calls / 10 || runs > calls * 9 / 10))
    FAIL("%lld of %lld calls ran: neither nearly all nor nearly none should", runs, calls);
  printf("fuzz_api: %lld calls from seed %lld on, %lld of them valid\n", calls, first, runs);
  return 0;
}
