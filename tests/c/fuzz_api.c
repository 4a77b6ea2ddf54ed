/* Random arguments against the public functions: fuzz_api [CALLS [SEED]], meant for sanitizers.
 *
 * Every call starts from valid arguments, of which a few fields are overwritten: sizes, strides,
 * dtypes, pointers, enumerators, numbers, absence. Every view owns a block of exactly the bytes
 * that it spans, so that the sanitizer sees any access beside it; ids, ranks, tables and factors
 * hold any bits. A call must
 *   - not touch memory outside its arguments, whatever ids say;
 *   - refuse sizes below 0 and whatever spans more than memory can hold;
 *   - leave all outputs alone, and a message, when it refuses; leave no message when it does not.
 * Views too large to be backed are only validated, by the *_workspace_size functions. */
#include "harness.h"

enum { MAX_VIEWS = 40, LARGEST = 1 << 16, SPACE = 1 << 22 };

static uint64_t current_seed;

#define STOP(...)                                                                                  \
  do {                                                                                             \
    fprintf(stderr, "seed %llu: ", (unsigned long long)current_seed);                              \
    FAIL(__VA_ARGS__);                                                                             \
  } while (0)

static bool one_in(int64_t n) {
  return random_in(1, n) == 1;
}

/* ---- views ---- */

typedef struct owned {
  moelora_tensor *view;
  unsigned char *memory; /* exactly `bytes`, from malloc */
  size_t bytes;
  bool output;
  unsigned char *before; /* of outputs */
} owned;

static owned views[MAX_VIEWS];
static int num_views;
static bool backed; /* every view has all the memory that it claims */

static void forget_views(void) {
  for (int i = 0; i < num_views; i++) {
    free(views[i].memory);
    free(views[i].before);
  }
  num_views = 0;
}

/* Bytes from the first element to the end of the last; -1 if no memory can be meant. */
static int64_t bytes_of(const moelora_tensor *t) {
  if (t->ndim < 0 || t->ndim > MOELORA_MAX_DIMS || (int)t->dtype < 0 || t->dtype > MOELORA_BOOL)
    return -1;
  double last = 0; /* exact where it matters */
  bool empty = false;
  for (int32_t i = 0; i < t->ndim; i++) {
    if (t->size[i] < 0 || (t->size[i] > 1 && t->stride[i] < 0))
      return -1;
    empty = empty || t->size[i] == 0;
    last += t->size[i] > 1 ? (double)(t->size[i] - 1) * (double)t->stride[i] : 0;
  }
  double bytes = empty ? 0 : (last + 1) * (double)dtype_bytes(t->dtype);
  return bytes > 0x1p60 ? INT64_MAX : (int64_t)bytes;
}

static int64_t any_size(void) {
  static const int64_t odd[] = {
      -1,        0,        1, 2, 3, 63, 64, 65, INT32_MAX, (int64_t)1 << 31, (int64_t)1 << 62,
      INT64_MAX, INT64_MIN};
  return odd[random_in(0, sizeof odd / sizeof *odd - 1)];
}

static double any_number(void) {
  static const double odd[] = {1e-300, 1e-39, 1e-30, 0.5, 1, 7, 3e38, 1e39, -1, INFINITY, NAN};
  return odd[random_in(0, sizeof odd / sizeof *odd - 1)];
}

static void bump(int64_t *value, int64_t by) { /* wraps */
  *value = (int64_t)((uint64_t)*value + (uint64_t)by);
}

static void disturb_view(moelora_tensor *t) {
  int32_t dim = (int32_t)random_in(0, MOELORA_MAX_DIMS - 1);
  switch (random_in(0, 7)) {
  case 0:
    t->size[dim] = any_size();
    break;
  case 1:
    bump(&t->size[dim], random_in(-1, 1));
    break;
  case 2:
    t->stride[dim] = any_size();
    break;
  case 3:
    bump(&t->stride[dim], random_in(-2, 8));
    break;
  case 4:
    t->ndim = (int32_t)(one_in(4) ? any_size() : t->ndim + (int64_t)random_in(-1, 1));
    break;
  case 5:
    t->dtype = (moelora_dtype)random_in(-1, 7);
    break;
  case 6:
    *t = absent;
    break;
  default: /* a step wider in every row */
    for (int32_t i = 0; i + 1 < t->ndim && i < MOELORA_MAX_DIMS; i++)
      bump(&t->stride[i], t->stride[i] / 2);
  }
}

/* Ids near the edges of what they may be; anything for the rest. */
static void fill(const owned *o, bool ids) {
  for (size_t i = 0; i < o->bytes; i++)
    o->memory[i] = (unsigned char)random_bits();
  if (!ids || one_in(4))
    return;
  for (size_t i = 0; i + 4 <= o->bytes; i += 4) {
    int32_t id = (int32_t)(one_in(16) ? any_size() : random_in(-2, 6));
    memcpy(o->memory + i, &id, 4);
  }
}

/* Gives a view its memory. A pointer may also be wrong: missing, odd, or another view's. */
static void back(moelora_tensor *t, bool output) {
  if (!t->data) /* absent */
    return;
  int64_t bytes = bytes_of(t);
  bool huge = bytes < 0 || bytes > LARGEST;
  backed = backed && !huge;
  owned *o = &views[num_views++];
  *o = (owned){.view = t, .output = output, .bytes = huge ? 0 : (size_t)bytes};
  bool odd_address = one_in(200);
  o->bytes += odd_address ? 1 : 0;
  o->memory = malloc(o->bytes ? o->bytes : 1);
  fill(o, t->dtype == MOELORA_I32 || t->dtype == MOELORA_I64);
  t->data = o->memory + (odd_address ? 1 : 0);
  if (one_in(200))
    t->data = NULL;
  if (one_in(200) && num_views > 1) {
    const owned *other = &views[random_in(0, num_views - 2)];
    t->data = other->memory;
    backed = backed && other->bytes >= o->bytes;
  }
}

static void remember_outputs(void) {
  for (int i = 0; i < num_views; i++) {
    owned *o = &views[i];
    if (o->output && o->bytes) {
      o->before = malloc(o->bytes);
      memcpy(o->before, o->memory, o->bytes);
    }
  }
}

static void check_status(const char *name, moelora_status status, bool ran) {
  bool has_message = *moelora_error_message() != '\0';
  if (has_message != (status != MOELORA_OK))
    STOP("%s: status %d with the message '%s'", name, (int)status, moelora_error_message());
  for (int i = 0; i < num_views; i++) {
    const owned *o = &views[i];
    if (status == MOELORA_OK && o->view->data && bytes_of(o->view) < 0)
      STOP("%s: accepted a view that no memory can hold", name);
    if ((status != MOELORA_OK || !ran) && o->before && memcmp(o->before, o->memory, o->bytes))
      STOP("%s: wrote to an output, status %d: %s", name, (int)status, moelora_error_message());
  }
}

/* ---- where ---- */

static moelora_exec any_exec(void) {
  moelora_exec exec = {.device = MOELORA_CPU};
  if (one_in(100))
    exec.device = (moelora_device)random_in(-1, 3);
  if (one_in(100))
    exec.device_index = (int32_t)any_size();
  if (one_in(100))
    exec.num_threads = (int32_t)any_size();
  return exec;
}

/* Exactly the workspace that was asked for, at the end of what there is. */
static moelora_exec with_workspace(moelora_exec exec, size_t bytes, unsigned char **memory) {
  *memory = aligned_alloc(256, (bytes + 511) / 256 * 256);
  exec.workspace = *memory;
  exec.workspace_bytes = bytes;
  if (one_in(50))
    exec.workspace_bytes -= bytes ? 1 : 0;
  if (one_in(50))
    exec.workspace = *memory + 8;
  return exec;
}

#define RUN(NAME, ARGS)                                                                            \
  do {                                                                                             \
    moelora_exec exec_ = any_exec();                                                               \
    size_t bytes_ = 0;                                                                             \
    remember_outputs();                                                                            \
    moelora_status status_ = NAME##_workspace_size(ARGS, &exec_, &bytes_);                         \
    check_status(#NAME "_workspace_size", status_, false);                                         \
    if (backed && bytes_ <= SPACE) {                                                               \
      unsigned char *memory_;                                                                      \
      exec_ = with_workspace(exec_, bytes_, &memory_);                                             \
      moelora_status second_ = NAME(ARGS, &exec_);                                                 \
      check_status(#NAME, second_, true);                                                          \
      if (status_ != MOELORA_OK && second_ == MOELORA_OK)                                          \
        STOP(#NAME " ran what its workspace_size refused");                                        \
      runs += second_ == MOELORA_OK;                                                               \
      free(memory_);                                                                               \
    }                                                                                              \
  } while (0)

static long long runs;

/* ---- arguments: valid, then disturbed ---- */

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

/* Weights [E, n, k], packed where they can be. */
static moelora_tensor any_weights(moelora_dtype dtype, int64_t e, int64_t n, int64_t k) {
  if (n % 64 == 0 && k % 64 == 0 && one_in(2))
    return shaped(dtype, SIZES(e, n / 64, k / 64, 64, 64));
  return shaped(dtype, SIZES(e, n, k));
}

static moelora_dtype any_float(void) {
  return (moelora_dtype)random_in(MOELORA_F32, MOELORA_F16);
}

/* Inputs and outputs of one call, in any order. */
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

/* Overwrites fields of none or a few views, then gives all of them memory. */
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
  if (!with_adapters && one_in(4)) { /* nothing may look at them */
    moelora_tensor wild = shaped(MOELORA_I32, SIZES(2, 3, 2, 3, 2));
    wild.ndim = (int32_t)any_size();
    args.adapters = (moelora_adapters){wild, wild, wild, wild};
  }
  put(&outputs, &args.sorted_token_ids), put(&outputs, &args.expert_ids);
  put(&outputs, &args.lora_ids), put(&outputs, &args.num_tokens_post_padded);
  put(&outputs, &args.sorted_weights), put(&outputs, &args.out_to_zero);
  disturb(&inputs, &outputs);
  RUN(moelora_align, &args);
}

static void fuzz_gemm(void) {
  sizes s = any_sizes();
  moelora_dtype dtype = any_float();
  int32_t slices = (int32_t)random_in(1, 3);
  int64_t n = s.i * slices, rows = one_in(2) ? s.m : s.m * s.top_k;
  moelora_gemm_args args = {
      .x = shaped(dtype, SIZES(rows, s.k)),
      .w = any_weights(dtype, s.e, n, s.k),
      .bias = maybe(shaped(dtype, SIZES(s.e, n))),
      .routing = any_routing(&s),
      .adapters = any_adapters(&s),
      .lora = any_lora(&s, dtype, n, s.k, slices),
      .mul_routed_weight = one_in(2),
      .out = shaped(dtype, SIZES(s.m, s.top_k, n)),
  };
  list inputs = {0}, outputs = {0};
  put(&inputs, &args.x), put(&inputs, &args.w), put(&inputs, &args.bias);
  put_common(&inputs, &args.routing, &args.adapters);
  put_lora(&inputs, &args.lora);
  put(&outputs, &args.out);
  disturb(&inputs, &outputs);
  RUN(moelora_gemm, &args);
}

static void fuzz_experts(void) {
  sizes s = any_sizes();
  moelora_dtype dtype = any_float();
  moelora_activation activation = (moelora_activation)random_in(0, 4);
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
      .w13_lora = any_lora(&s, dtype, n, s.k, slices),
      .w2_lora = any_lora(&s, dtype, s.k, s.i, 1),
      .activation = one_in(60) ? (moelora_activation)any_size() : activation,
      .activation_alpha = one_in(30) ? any_number() : 0,
      .activation_limit = one_in(8) ? any_number() : 0,
      .apply_router_weight_on_input = s.top_k == 1 || one_in(60),
      .out = shaped(dtype, SIZES(s.m, s.k)),
  };
  list inputs = {0}, outputs = {0};
  put(&inputs, &args.hidden_states), put(&inputs, &args.w13), put(&inputs, &args.w2);
  put(&inputs, &args.w13_bias), put(&inputs, &args.w2_bias);
  put_common(&inputs, &args.routing, &args.adapters);
  put_lora(&inputs, &args.w13_lora), put_lora(&inputs, &args.w2_lora);
  put(&outputs, &args.out);
  disturb(&inputs, &outputs);
  RUN(moelora_experts, &args);
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

/* Of the sanitizers, where the program was built with one. */
void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static void say_seed(void) {
  fprintf(stderr, "seed %llu\n", (unsigned long long)current_seed);
}

int main(int argc, char **argv) {
  if (__sanitizer_set_death_callback)
    __sanitizer_set_death_callback(say_seed);
  long long calls = argc > 1 ? atoll(argv[1]) : 20000, first = argc > 2 ? atoll(argv[2]) : 1;
  void (*const operators[])(void) = {fuzz_align, fuzz_gemm, fuzz_experts, fuzz_pack};
  for (long long i = 0; i < calls; i++) {
    current_seed = (uint64_t)(first + i);
    seed(current_seed);
    operators[i % 4]();
    forget_views();
  }
  if (calls >= 400 && (runs < calls / 10 || runs > calls * 9 / 10))
    FAIL("%lld of %lld calls ran: neither nearly all nor nearly none should", runs, calls);
  printf("fuzz_api: %lld calls from seed %lld on, %lld of them valid\n", calls, first, runs);
  return 0;
}
