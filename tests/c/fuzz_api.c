/* Random arguments for the public functions: fuzz_api [CALLS [SEED]], meant for sanitizers.
 *
 * Every call starts from the tensors that core/operators.inc lists for its operator, with sizes
 * that match, and overwrites a few fields: sizes, strides, dtypes, pointers, enumerators, numbers,
 * absence. Every view owns a block of exactly the bytes that it spans, so that the sanitizer
 * detects any access outside; ids, ranks, tables and factors hold arbitrary bits. A call must
 *   - not touch memory outside its arguments, whatever ids say;
 *   - keep to that, whichever of this machine's kernels runs;
 *   - refuse negative sizes and anything that spans more than memory can hold;
 *   - leave all outputs unchanged, and a message, if it refuses; leave no message otherwise.
 * Views too large to be backed by memory are only validated, by prepare. */
#include "core/backend.h"
#include "core/format.h"
#include "fuzz.h"

/* ---- sizes, by their names in core/operators.inc ---- */

enum { M, TOP_K, E, K, I, N, R, R13, R2, SLICES, SLOTS, GLOBAL, BLOCKS, ROWS, LISTS, COLUMNS };
enum { NUM_SIZES = COLUMNS + 8 };
static const char size_names[] =
    "M,top_k,E,K,I,N,R,R13,R2,slices,max_loras,num_global_experts,blocks,rows,num_lora_ids,columns,"
    "rows of x,any,groups of rows,groups of columns,tiles of rows,tiles of depth,bytes of a tile,";

/* Of this call. */
static int64_t size[NUM_SIZES];
static moelora_dtype compute;
static moelora_align_mode mode;
static int32_t block_size;

static void draw_sizes(void) {
  for (int i = 0; i < NUM_SIZES; i++)
    size[i] = random_in(1, 5);
  size[M] = random_in(0, 9);
  size[TOP_K] = one_in(4) ? 1 : random_in(1, 3);
  size[K] = one_in(3) ? 64 : random_in(1, 24);
  size[I] = one_in(3) ? 64 : random_in(1, 24);
  size[SLICES] = random_in(1, 3);
  size[N] = size[COLUMNS] = size[I] * size[SLICES];
  size[R] = size[R13] = size[R2] = random_in(1, 9);
  size[GLOBAL] = size[E] + random_in(0, 3);
  size[LISTS] = random_in(0, 5);
  compute = (moelora_dtype)random_in(MOELORA_F32, MOELORA_F16);
  mode = (moelora_align_mode)random_in(0, 3);
  block_size = (int32_t)random_in(1, 20);
  size[BLOCKS] = moelora_align_max_blocks(mode, size[M] * size[TOP_K], (int32_t)size[GLOBAL],
                                          (int32_t)size[SLOTS], block_size) +
                 random_in(0, 2);
  size[ROWS] = size[BLOCKS] * block_size;
}

static const char *find(const char *from, const char *end, const char *word) {
  const size_t length = strlen(word);
  for (; from + length <= end; from++)
    if (memcmp(from, word, length) == 0)
      return from;
  return end;
}

/* Of two alternatives, one. */
static void choose(const char **from, const char **end, const char *between) {
  const char *at = find(*from, *end, between);
  if (at < *end && one_in(2))
    *from = at + strlen(between);
  else
    *end = at;
}

static int64_t value_of(const char *from, const char *end) {
  const char *at;
  choose(&from, &end, " or ");
  if ((at = find(from, end, " * ")) < end)
    return value_of(from, at) * value_of(at + 3, end);
  if ((at = find(from, end, " + ")) < end)
    return value_of(from, at) + value_of(at + 3, end);
  if ((at = find(from, end, "/")) < end)
    return value_of(from, at) / value_of(at + 1, end);
  if (*from >= '0' && *from <= '9') {
    char *rest;
    const int64_t factor = strtoll(from, &rest, 10);
    return rest < end ? factor * value_of(rest + 1, end) : factor; /* "2 I" */
  }
  const char *name = size_names;
  for (int i = 0; i < NUM_SIZES; i++, name = strchr(name, ',') + 1)
    if (strchr(name, ',') - name == end - from && memcmp(name, from, (size_t)(end - from)) == 0)
      return size[i];
  STOP("core/operators.inc has a size without a row in size_names: %.*s", (int)(end - from), from);
}

/* ---- tensors ---- */

typedef enum use { READ, MAY_READ, WRITTEN, MAY_WRITE } use;

/* A tensor of an operator; factors have no dtype. The last row has no shape. */
typedef struct row {
  const char *shape, *dtype;
  size_t at;
  use use;
} row;

/* A contiguous view without memory. */
static moelora_tensor shaped(moelora_dtype dtype, int32_t ndim, const int64_t *sizes) {
  static char somewhere;
  return view(&somewhere, dtype, ndim, sizes);
}

static moelora_dtype dtype_of(const char *class) {
  static const struct {
    const char *name;
    moelora_dtype either, or;
  } classes[] = {{"ids", MOELORA_I32, MOELORA_I64},   {"weights", MOELORA_F32, MOELORA_F32},
                 {"f32", MOELORA_F32, MOELORA_F32},   {"half", MOELORA_BF16, MOELORA_F16},
                 {"bytes", MOELORA_U8, MOELORA_U8},   {"i32", MOELORA_I32, MOELORA_I32},
                 {"flags", MOELORA_BOOL, MOELORA_I32}};
  for (size_t i = 0; i < sizeof classes / sizeof *classes; i++)
    if (strcmp(classes[i].name, class) == 0)
      return one_in(2) ? classes[i].either : classes[i].or;
  return compute; /* also of what is special, until an operator's function below changes it */
}

static moelora_tensor tensor_of(const row *r) {
  const char *from = r->shape + 1, *end = from + strlen(from) - 1;
  int64_t sizes[MOELORA_MAX_DIMS];
  int32_t ndim = 0;
  choose(&from, &end, "] or [");
  for (const char *next; from < end; from = next + 2) {
    next = find(from, end, ", ");
    sizes[ndim++] = value_of(from, next);
  }
  return shaped(dtype_of(r->dtype), ndim, sizes);
}

/* Arguments that a call does not read may hold anything, and must not be looked at. */
static moelora_tensor *unread[16];
static int num_unread;
static const moelora_tensor *needed; /* without it, the call reads those */

static void draw_tensors(void *args, const row *r) {
  needed = NULL;
  for (; r->shape; r++)
    if (r->dtype)
      *(moelora_tensor *)((char *)args + r->at) =
          r->use == READ || r->use == WRITTEN || !one_in(8) ? tensor_of(r) : absent;
}

static void leave_unread(moelora_tensor *t) {
  *t = absent;
  unread[num_unread++] = t;
}

static moelora_tensor wild(void) {
  moelora_tensor t = shaped((moelora_dtype)random_in(-1, 7), SIZES(2, 3, 2, 3, 2));
  for (int32_t i = 0; i < MOELORA_MAX_DIMS; i++)
    t.size[i] = one_in(2) ? any_size() : 2;
  t.ndim = (int32_t)any_size();
  t.data = one_in(4) ? NULL : t.data;
  return t;
}

/* Overwrites fields of zero or more views, then allocates memory for all of them. */
static void disturb(void *args, const row *r) {
  moelora_tensor *all[2][MAX_VIEWS];
  int count[2] = {0, 0};
  for (; r->shape; r++) {
    const int written = r->use == WRITTEN || r->use == MAY_WRITE;
    moelora_tensor **to = all[written];
    if (r->dtype) {
      to[count[written]++] = (moelora_tensor *)((char *)args + r->at);
      continue;
    }
    moelora_lora *lora = (moelora_lora *)((char *)args + r->at);
    for (int32_t i = 0; i < lora->num_slices && i < MOELORA_MAX_SLICES; i++)
      to[count[written]++] = &lora->a[i], to[count[written]++] = &lora->b[i];
  }
  for (int64_t times = one_in(3) ? 0 : random_in(1, 3); times > 0; times--) {
    const int written = random_in(0, 9) >= 7;
    disturb_view(all[written][random_in(0, count[written] - 1)]);
  }
  backed = true;
  for (int written = 0; written < 2; written++)
    for (int i = 0; i < count[written]; i++)
      back(all[written][i], written);
  while (num_unread)
    *unread[--num_unread] = wild();
  backed = backed && (!needed || needed->data);
}

/* ---- what rows do not say ---- */

static int32_t mostly(int64_t value) {
  return (int32_t)(one_in(60) ? any_size() : value);
}

static double any_number(void) {
  static const double odd[] = {1e-300, 1e-39, 1e-30, 0.5, 1, 7, 3e38, 1e39, -1, INFINITY, NAN};
  return odd[random_in(0, sizeof odd / sizeof *odd - 1)];
}

static moelora_dtype of_factors(void) {
  return one_in(4) ? MOELORA_F32 : compute;
}

static moelora_lora any_lora(moelora_dtype dtype, int64_t n, int64_t k, int32_t slices) {
  moelora_lora lora = {.num_slices = one_in(4) ? 0 : slices};
  for (int32_t i = 0; i < lora.num_slices; i++) {
    lora.a[i] = shaped(dtype, SIZES(size[SLOTS], one_in(3) ? 1 : size[E], size[R], k));
    lora.b[i] = shaped(dtype, SIZES(size[SLOTS], one_in(3) ? 1 : size[E], n / slices, size[R]));
  }
  if (one_in(60))
    lora.num_slices = (int32_t)(one_in(2) ? any_size() : random_in(-1, MOELORA_MAX_SLICES + 1));
  return lora;
}

/* Weights [E, n, k]: some packed, some tiles with mostly correct sizes. */
static moelora_tensor any_weights(int64_t n, int64_t k, moelora_row_order order,
                                  moelora_layout *layout) {
  const int64_t e = size[E];
  *layout = (moelora_layout){0};
  if (!one_in(4))
    return n % 64 == 0 && k % 64 == 0 && one_in(2)
               ? shaped(compute, SIZES(e, n / 64, k / 64, 64, 64))
               : shaped(compute, SIZES(e, n, k));
  *layout = (moelora_layout){
      .format = one_in(2) ? (moelora_format)random_in(MOELORA_FP8, MOELORA_FP8_ROWS) /* any k */
                          : (moelora_format)random_in(1, MOELORA_FORMATS - 1),
      .order = one_in(10) ? (moelora_row_order)random_in(-1, 3) : order,
      .rows = one_in(20) ? any_size() : n,
  };
  if (moelora_is_fp8(layout->format))
    layout->x = (moelora_x_format)random_in(0, 3);
  if (one_in(20))
    layout->x = (moelora_x_format)random_in(-1, 4);
  if ((layout->x == MOELORA_X_STATIC) != one_in(20))
    layout->x_scale = one_in(10) ? -1.0f : 0.02f;
  const moelora_tensor tiles = shaped(MOELORA_U8, SIZES(e, moelora_row_tiles(order, n),
                                                        moelora_depth_tiles(layout->format, k),
                                                        moelora_tile_bytes(layout->format)));
  if (one_in(20))
    layout->format = (moelora_format)any_size();
  return tiles;
}

static void fix_align(moelora_align_args *a) {
  const bool adapters = mode == MOELORA_ALIGN_UNIFORM || mode == MOELORA_ALIGN_SEGMENTED;
  a->mode = (moelora_align_mode)mostly(mode);
  a->num_experts = mostly(a->routing.expert_map.data ? size[GLOBAL] : size[E]);
  a->block_size = mostly(block_size);
  a->max_loras = mostly(size[SLOTS]);
  a->lora_ids = a->sorted_weights = absent;
  if (adapters)
    a->lora_ids =
        shaped(MOELORA_I32, SIZES(mode == MOELORA_ALIGN_UNIFORM ? size[BLOCKS] : size[ROWS]));
  if (mode == MOELORA_ALIGN_SORTING)
    a->sorted_weights = shaped(MOELORA_F32, SIZES(size[ROWS]));
  else
    a->out_to_zero = absent;
  if (!adapters) {
    leave_unread(&a->adapters.token_lora_mapping), leave_unread(&a->adapters.adapter_enabled);
    leave_unread(&a->adapters.lora_ranks), leave_unread(&a->adapters.lora_scalings);
  }
}

static void fix_align_lists(moelora_align_lists_args *a) {
  a->max_loras = mostly(size[SLOTS]);
  a->num_experts = mostly(a->routing.expert_map.data ? size[GLOBAL] : size[E]);
  a->lists.num_active = mostly(random_in(0, size[LISTS]));
  a->lists.block_size = mostly(block_size);
}

static void fix_gemm(moelora_gemm_args *a) {
  a->w = any_weights(size[N], size[K], MOELORA_ROWS_PLAIN, &a->w_layout);
  a->lora = any_lora(of_factors(), size[N], size[K], (int32_t)size[SLICES]);
  a->mul_routed_weight = one_in(2);
}

static void fix_experts(moelora_experts_args *a) {
  const moelora_activation kind = (moelora_activation)random_in(0, NUM_ACTIVATIONS - 1);
  const bool gated = kind != MOELORA_RELU2;
  const int64_t n = 2 * size[I], inner = gated ? size[I] : n, k = size[K],
                p = size[M] * size[TOP_K];
  a->activation = (moelora_activation)mostly(kind);
  a->activation_alpha = one_in(30) ? any_number() : 0;
  a->activation_limit = one_in(8) ? any_number() : 0;
  a->apply_router_weight_on_input = size[TOP_K] == 1 || one_in(60);
  a->w13 = any_weights(n, k,
                       kind == MOELORA_SWIGLUOAI ? MOELORA_ROWS_INTERLEAVED
                       : gated                   ? MOELORA_ROWS_GATE_UP
                                                 : MOELORA_ROWS_PLAIN,
                       &a->w13_layout);
  a->w2 = any_weights(k, inner, MOELORA_ROWS_PLAIN, &a->w2_layout);
  a->w13_lora = any_lora(of_factors(), n, k, gated ? (int32_t)random_in(1, 2) : 1);
  a->w2_lora = any_lora(of_factors(), k, inner, 1);
  /* What is saved matches the factors, mostly. */
  const bool mapped = a->adapters.token_lora_mapping.data != NULL;
  a->saved = (moelora_saved){.gate_up = shaped(compute, SIZES(p, n))};
  if ((mapped && a->w13_lora.num_slices > 0) != one_in(60))
    a->saved.w13_shrink = shaped(compute, SIZES(p, a->w13_lora.num_slices, size[R]));
  if ((mapped && a->w2_lora.num_slices > 0) != one_in(60))
    a->saved.w2_shrink = shaped(compute, SIZES(p, size[R]));
  if (one_in(2))
    a->saved = (moelora_saved){.gate_up = absent};
}

/* A gradient of `like`, if requested. */
static moelora_tensor any_gradient(const moelora_tensor *like) {
  if (!like->data || one_in(4))
    return absent;
  return shaped(one_in(3) ? MOELORA_F32 : compute, like->ndim, like->size);
}

/* Some of them, of the touched pairs alone where experts have factors of their own. */
static moelora_lora any_gradients(const moelora_lora *lora, const moelora_tensor *pairs) {
  moelora_lora grads = {.num_slices = mostly(lora->num_slices)};
  for (int32_t i = 0; i < lora->num_slices && i < MOELORA_MAX_SLICES; i++) {
    const moelora_tensor *const from[] = {&lora->a[i], &lora->b[i]};
    moelora_tensor *const to[] = {&grads.a[i], &grads.b[i]};
    for (int j = 0; j < 2; j++) {
      *to[j] = any_gradient(from[j]);
      if (pairs->data && to[j]->data && to[j]->size[1] == size[E])
        *to[j] = shaped(to[j]->dtype, SIZES(1, random_in(1, 9), to[j]->size[2], to[j]->size[3]));
    }
  }
  return grads;
}

static void fix_gemm_backward(moelora_gemm_backward_args *a) {
  const bool alone = one_in(2); /* of adapters without weights */
  fix_gemm(&a->forward);
  if (alone) {
    a->forward.w = a->forward.bias = absent;
    a->forward.w_layout = (moelora_layout){0};
  }
  a->num_experts = mostly(alone ? size[E] : 0);
  a->accumulate = one_in(2);
  if (one_in(2))
    a->grads.pairs = absent;
  if (a->grads.x.data)
    a->grads.x = shaped(compute, 2, a->forward.x.size);
  a->grads.bias = any_gradient(&a->forward.bias);
  a->grads.lora = any_gradients(&a->forward.lora, &a->grads.pairs);
}

static void fix_experts_backward(moelora_experts_backward_args *a) {
  do
    fix_experts(&a->forward);
  while (!a->forward.saved.gate_up.data);
  a->accumulate = one_in(2);
  if (one_in(2))
    a->grads.pairs = absent;
  a->grads.w13_bias = any_gradient(&a->forward.w13_bias);
  a->grads.w2_bias = any_gradient(&a->forward.w2_bias);
  a->grads.w13_lora = any_gradients(&a->forward.w13_lora, &a->grads.pairs);
  a->grads.w2_lora = any_gradients(&a->forward.w2_lora, &a->grads.pairs);
}

/* One half or both, rows by routing or by lists. */
static void fix_delta(moelora_delta_args *a) {
  const bool listed = one_in(2), shrink = one_in(2), expand = !shrink || one_in(2);
  a->silu_and_mul = expand && one_in(8);
  const bool plain = expand && !a->silu_and_mul;
  a->num_experts = mostly(size[E]);
  a->lora = any_lora(compute, size[N], size[K], (int32_t)size[SLICES]);
  a->mul_routed_weight = plain && one_in(2), a->add_inputs = plain && one_in(2);
  a->out_offset = plain ? random_in(0, 3) : 0;
  if (one_in(30))
    a->out_offset = any_size(), bump(&a->out_offset, random_in(-9, 0));
  if (!shrink)
    a->x = absent;
  else if (!a->x.data)
    a->x = shaped(compute, SIZES(size[M], size[K]));
  a->h = shrink && expand ? absent
                          : shaped(compute, SIZES(size[SLICES], size[M], size[TOP_K], size[R]));
  const int64_t width = a->silu_and_mul ? size[N] / 2 : size[N] + random_in(3, 6);
  a->out = !expand              ? absent
           : plain && one_in(3) ? shaped(compute, SIZES(size[M], width))
                                : shaped(compute, SIZES(size[M], size[TOP_K], width));
  for (int32_t i = 0; i < a->lora.num_slices && i < MOELORA_MAX_SLICES && !(shrink && expand); i++)
    leave_unread(shrink ? &a->lora.b[i] : &a->lora.a[i]);
  a->num_tokens = listed ? mostly(size[M]) : any_size();
  a->top_k = listed ? mostly(size[TOP_K]) : (int32_t)any_size();
  a->lists.num_active = listed ? mostly(random_in(0, size[LISTS])) : (int32_t)any_size();
  a->lists.block_size = listed ? mostly(block_size) : -1;
  if (listed) {
    needed = &a->lists.sorted_token_ids;
    leave_unread(&a->routing.topk_ids), leave_unread(&a->routing.expert_map);
    leave_unread(&a->adapters.token_lora_mapping);
    if (!a->mul_routed_weight)
      leave_unread(&a->routing.topk_weights);
  } else {
    a->lists.sorted_token_ids = absent;
    leave_unread(&a->lists.expert_ids), leave_unread(&a->lists.num_tokens_post_padded);
    leave_unread(&a->lists.lora_ids);
  }
}

static void fix_mlp_delta(moelora_mlp_delta_args *a) {
  a->num_experts = mostly(size[E]);
  a->gate_up = any_lora(compute, 2 * size[I], size[K], (int32_t)random_in(1, 2));
  a->down = any_lora(compute, size[K], size[I], 1);
}

static void fix_pack_weights(moelora_pack_weights_args *a) {
  const int64_t e = random_in(0, 3), n = random_in(1, 2), k = random_in(1, 2);
  a->w = shaped(compute, SIZES(e, 64 * n, 64 * k));
  a->out = shaped(compute, SIZES(e, n, k, 64, 64));
}

/* Weights of n rows and k columns, as a checkpoint has them, and their tiles. */
static void fix_pack_quantized(moelora_pack_quantized_args *a) {
  const int64_t e = random_in(0, 3), n = random_in(1, 140), k = 64 * random_in(1, 3);
  const moelora_format f = (moelora_format)random_in(1, MOELORA_FORMATS - 1);
  const moelora_row_order order = (moelora_row_order)random_in(0, 2);
  const bool fp8 = moelora_is_fp8(f);
  const int64_t groups = moelora_tile_groups(f) == 1 ? 1 : k / (64 / moelora_tile_groups(f));
  const int64_t high = f == MOELORA_FP8_ROWS ? random_in(1, n) : n;
  a->dtype = one_in(2) ? MOELORA_BF16 : MOELORA_F16;
  a->w.values = shaped(MOELORA_U8, SIZES(e, n, fp8 ? k : k / 2));
  a->w.scales = shaped(moelora_scale_bytes(f) == 1 ? MOELORA_U8
                       : fp8                       ? MOELORA_F32
                                                   : (moelora_dtype)random_in(0, MOELORA_F16),
                       SIZES(e, fp8 ? (n - 1) / high + 1 : n, fp8 ? 1 : groups));
  a->w.zeros = moelora_has_zeros(f) ? shaped(MOELORA_U8, SIZES(e, n, groups)) : absent;
  a->w.tensor_scales = f == MOELORA_NVFP4 ? shaped(MOELORA_F32, SIZES(e, 1)) : absent;
  a->w.block_rows = one_in(20) ? any_size() : fp8 ? high : 0;
  a->w.block_columns = one_in(20) ? any_size() : fp8 ? k : 0;
  a->tiles = shaped(MOELORA_U8, SIZES(e, moelora_row_tiles(order, n), moelora_depth_tiles(f, k),
                                      moelora_tile_bytes(f)));
  a->layout = (moelora_layout){.format = one_in(20) ? (moelora_format)any_size() : f,
                               .order = order,
                               .rows = one_in(20) ? any_size() : n};
}

static void fix_unpack_quantized(moelora_unpack_quantized_args *a) {
  moelora_pack_quantized_args packed = {0};
  fix_pack_quantized(&packed);
  const int64_t *values = packed.w.values.size;
  const int64_t k = moelora_is_fp8(packed.layout.format) ? values[2] : 2 * values[2];
  a->tiles = packed.tiles;
  a->layout = packed.layout;
  a->out = shaped(packed.dtype, SIZES(values[0], values[1], k));
}

/* ---- calls ---- */

#define ROW(SHAPE, DTYPE, FIELD, USE) {SHAPE, DTYPE, offsetof(args_type, FIELD), USE},
#define ARG(KIND, ...) ARG_##KIND(__VA_ARGS__)
#define ARG_AT_LEAST(...)
#define ARG_INPUT(NAME, SHAPE, DTYPE, FIELD) ROW(SHAPE, #DTYPE, FIELD, READ)
#define ARG_OPTIONAL(NAME, SHAPE, DTYPE, FIELD) ROW(SHAPE, #DTYPE, FIELD, MAY_READ)
#define ARG_OUTPUT(NAME, SHAPE, DTYPE, FIELD) ROW(SHAPE, #DTYPE, FIELD, WRITTEN)
#define ARG_OPTIONAL_OUTPUT(NAME, SHAPE, DTYPE, FIELD) ROW(SHAPE, #DTYPE, FIELD, MAY_WRITE)
#define ARG_FACTORS(NAME_A, NAME_B, FIELD) ROW("", NULL, FIELD, READ)
#define ARG_FACTOR_GRADIENTS(NAME_A, NAME_B, FIELD) ROW("", NULL, FIELD, WRITTEN)
#define BEGIN(NAME)                                                                                \
  static void fuzz_##NAME(void) {                                                                  \
    typedef moelora_##NAME##_args args_type;                                                       \
    args_type args = {0};                                                                          \
    static const row rows[] = {
#define DRAW(NAME)                                                                                 \
  { 0 }                                                                                            \
  }                                                                                                \
  ;                                                                                                \
  draw_tensors(&args, rows);                                                                       \
  fix_##NAME(&args);                                                                               \
  disturb(&args, rows);
#define OPERATOR(NAME, ...) BEGIN(NAME)
#define END(NAME)                                                                                  \
  DRAW(NAME)                                                                                       \
  RUN(NAME, &args);                                                                                \
  }
#define CONVERSION(NAME, ...) BEGIN(NAME)
#define CONVERSION_END(NAME)                                                                       \
  DRAW(NAME)                                                                                       \
  convert_##NAME(&args);                                                                           \
  }

#define CONVERT(NAME, ...)                                                                         \
  static void convert_##NAME(const moelora_##NAME##_args *a) {                                     \
    const moelora_exec exec = any_exec();                                                          \
    remember_outputs();                                                                            \
    if (!backed)                                                                                   \
      return;                                                                                      \
    const moelora_status status = moelora_##NAME(__VA_ARGS__, &exec);                              \
    check_status(#NAME, status, true);                                                             \
    runs += status == MOELORA_OK;                                                                  \
  }
CONVERT(pack_weights, &a->w, &a->out)
CONVERT(pack_quantized, &a->w, &a->layout, a->dtype, &a->tiles)
CONVERT(unpack_quantized, &a->tiles, &a->layout, &a->out)

#include "core/operators.inc"

#define OPERATOR(NAME, ...) fuzz_##NAME,
#define CONVERSION(NAME, ...) fuzz_##NAME,
static void (*const operators[])(void) = {
#include "core/operators.inc"
};

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
  const int count = sizeof operators / sizeof *operators;
  for (long long i = 0; i < calls; i++) {
    current_seed = (uint64_t)(first + i);
    seed(current_seed);
    force_some_kernel();
    draw_sizes();
    operators[i % count]();
    forget_views();
  }
  if (calls >= 400 && (runs < calls / 10 || runs > calls * 9 / 10))
    FAIL("%lld of %lld calls ran: neither nearly all nor nearly none should", runs, calls);
  printf("fuzz_api: %lld calls from seed %lld on, %lld of them valid\n", calls, first, runs);
  return 0;
}
