/* Tables that another thread writes while a call reads them: routing, adapters and lists may
 * change at any time. A call uses each row as it was before or after, never writes outside its
 * memory, and does not read again once its threads have started. */
#include <stdatomic.h>

#include "cases.h"

enum { EXPERTS = 5, SLOTS = 4, RANK = 8, LISTED_BLOCK = 4 };

/* ---- tables with two states ---- */

/* Elements of 1 or 4 bytes; operators see `now`. */
typedef struct table {
  const char *name;
  moelora_tensor now, states[2];
} table;

enum { IDS, WEIGHTS, MAP, MAPPING, RANKS, SCALINGS, ONE_A, ENABLED, NUM_TABLES };

static table tables[NUM_TABLES];

static void set_table(table *t, int state) {
  const void *from = t->states[state].data;
  for (int64_t i = 0; i < count_of(&t->now); i++)
    if (t->now.dtype == MOELORA_BOOL)
      __atomic_store_n((uint8_t *)t->now.data + i, ((const uint8_t *)from)[i], __ATOMIC_RELAXED);
    else
      __atomic_store_n((int32_t *)t->now.data + i, ((const int32_t *)from)[i], __ATOMIC_RELAXED);
}

static void set_tables(int state) {
  for (int i = 0; i < NUM_TABLES; i++)
    set_table(&tables[i], state);
}

static moelora_tensor draw(moelora_dtype dtype, double low, double high, int32_t ndim,
                           const int64_t *size) {
  return dtype == MOELORA_F32 ? random_tensor(dtype, high, ndim, size)
                              : random_ids(dtype, (int64_t)low, (int64_t)high, ndim, size);
}

static void new_table(int at, const char *name, moelora_dtype dtype, double low, double high,
                      int32_t ndim, const int64_t *size) {
  table *t = &tables[at];
  *t = (table){name, new_tensor(dtype, ndim, size), {draw(dtype, low, high, ndim, size)}};
  t->states[1] = draw(dtype, low, high, ndim, size);
  set_table(t, 0);
}

static void new_tables(int64_t tokens, int64_t top_k) {
  const int64_t global = EXPERTS + 2;
  new_table(IDS, "topk_ids", MOELORA_I32, -1, global, SIZES(tokens, top_k));
  new_table(WEIGHTS, "topk_weights", MOELORA_F32, -1, 1, SIZES(tokens, top_k));
  new_table(MAP, "expert_map", MOELORA_I32, -1, EXPERTS, SIZES(global));
  new_table(MAPPING, "token_lora_mapping", MOELORA_I32, -1, SLOTS, SIZES(tokens));
  new_table(RANKS, "lora_ranks", MOELORA_I32, 0, RANK, SIZES(SLOTS));
  new_table(SCALINGS, "lora_scalings", MOELORA_F32, -2, 2, SIZES(SLOTS));
  new_table(ENABLED, "adapter_enabled", MOELORA_BOOL, 0, 1, SIZES(SLOTS));
  new_table(ONE_A, "w13_one_a", MOELORA_I32, 0, 1, SIZES(SLOTS));
}

static moelora_routing routing_now(void) {
  return (moelora_routing){tables[IDS].now, tables[WEIGHTS].now, tables[MAP].now};
}

static moelora_adapters adapters_now(void) {
  return (moelora_adapters){tables[MAPPING].now, tables[RANKS].now, tables[SCALINGS].now,
                            tables[ENABLED].now};
}

/* ---- the writing thread ---- */

static atomic_bool stop;
static int flipped; /* index of the changing table; NUM_TABLES: all */

static void *flip(void *unused) {
  (void)unused;
  for (int state = 1; !stop; state = !state)
    for (int i = 0; i < NUM_TABLES; i++)
      if (flipped == i || flipped == NUM_TABLES)
        set_table(&tables[i], state);
  return NULL;
}

static pthread_t start_flipping(int which) {
  pthread_t thread;
  stop = false;
  flipped = which;
  CHECK(pthread_create(&thread, NULL, flip, NULL) == 0);
  return thread;
}

static void stop_flipping(pthread_t thread) {
  stop = true;
  pthread_join(thread, NULL);
}

/* ---- operators on these tables ---- */

typedef struct operators {
  moelora_align_args align[4];
  moelora_align_lists_args lists;
  moelora_gemm_args gemm;
  moelora_experts_args experts;
  moelora_delta_args delta, summed, listed;
  moelora_mlp_delta_args mlp;
} operators;

static void new_alignments(int64_t rows, operators *o) {
  const int32_t known = (int32_t)tables[MAP].now.size[0], size = LISTED_BLOCK;
  for (int mode = 0; mode < 4; mode++) {
    moelora_align_args *a = &o->align[mode];
    *a = (moelora_align_args){
        .mode = (moelora_align_mode)mode,
        .num_experts = known,
        .block_size = size,
        .max_loras = SLOTS,
        .routing = routing_now(),
    };
    if (mode == MOELORA_ALIGN_UNIFORM || mode == MOELORA_ALIGN_SEGMENTED)
      a->adapters = adapters_now();
    new_alignment(a, rows);
  }
  o->lists = (moelora_align_lists_args){
      .num_experts = known,
      .max_loras = SLOTS,
      .routing = routing_now(),
      .adapters = adapters_now(),
      .lists = {.lora_ids = random_ids(MOELORA_I32, -1, SLOTS, SIZES(2 * SLOTS)),
                .num_active = 2 * SLOTS,
                .block_size = size},
  };
  new_lists(&o->lists, rows);
  for (int32_t slot = 0; slot < SLOTS; slot++) /* every adapter; random ones after them */
    ((int32_t *)o->lists.lists.lora_ids.data)[slot] = slot;
}

static operators new_operators(int64_t tokens, int64_t top_k, int64_t hidden, int64_t inner) {
  const sizes s = {tokens, top_k, EXPERTS, hidden, inner, SLOTS};
  const moelora_tensor x = random_tensor(MOELORA_F32, 1, SIZES(tokens, hidden));
  const moelora_tensor w = random_tensor(MOELORA_F32, 0.1, SIZES(EXPERTS, 2 * inner, hidden));
  operators o = {
      .gemm = {.x = x,
               .w = w,
               .routing = routing_now(),
               .adapters = adapters_now(),
               .lora = random_lora(s, MOELORA_F32, 2, RANK, 2 * inner, hidden),
               .mul_routed_weight = true,
               .out = new_tensor(MOELORA_F32, SIZES(tokens, top_k, 2 * inner))},
      .experts = {.hidden_states = x,
                  .w13 = w,
                  .w2 = random_tensor(MOELORA_F32, 0.1, SIZES(EXPERTS, hidden, inner)),
                  .routing = routing_now(),
                  .adapters = adapters_now(),
                  .w13_one_a = tables[ONE_A].now,
                  .w2_lora = random_lora(s, MOELORA_F32, 1, RANK, hidden, inner),
                  .out = new_tensor(MOELORA_F32, SIZES(tokens, hidden))},
      .delta = {.num_experts = EXPERTS,
                .x = x,
                .routing = routing_now(),
                .adapters = adapters_now(),
                .mul_routed_weight = true},
  };
  o.experts.w13_lora = o.delta.lora = o.gemm.lora;
  o.summed = o.delta;
  o.delta.out = new_tensor(MOELORA_F32, SIZES(tokens, top_k, 2 * inner));
  o.summed.out = new_tensor(MOELORA_F32, SIZES(tokens, 2 * inner));
  o.mlp = (moelora_mlp_delta_args){
      .num_experts = EXPERTS,
      .hidden_states = x,
      .routing = routing_now(),
      .adapters = adapters_now(),
      .gate_up = o.gemm.lora,
      .down = o.experts.w2_lora,
      .out = new_tensor(MOELORA_F32, SIZES(tokens, hidden)),
  };
  new_alignments(tokens * top_k, &o);
  o.listed = o.delta;
  o.listed.routing.topk_ids = o.listed.routing.expert_map = absent;
  o.listed.num_tokens = tokens, o.listed.top_k = (int32_t)top_k;
  o.listed.lists = o.lists.lists;
  return o;
}

/* Workspaces are allocated with malloc, so that a sanitizer sees their bounds. */
#define RUN(NAME, ARGS, EXEC)                                                                      \
  do {                                                                                             \
    moelora_exec exec_ = (EXEC);                                                                   \
    CHECK_OK(NAME##_bytes(ARGS, &exec_, &exec_.workspace_bytes));                                  \
    exec_.workspace = aligned_alloc(256, exec_.workspace_bytes + 256);                             \
    memset(exec_.workspace, 0xa5, exec_.workspace_bytes);                                          \
    CHECK_OK(call_##NAME(ARGS, &exec_));                                                           \
    free(exec_.workspace);                                                                         \
  } while (0)

/* Elements that deltas leave unchanged are 0. */
static void clear(const moelora_tensor *t) {
  memset(t->data, 0, (size_t)count_of(t) * dtype_bytes(t->dtype));
}

enum { GEMM, LAYER, DELTA, SUMMED, LISTED, MLP, NUM_COMPUTING };

/* Runs an operator that computes; returns its output. */
static const moelora_tensor *compute(operators *o, int which, moelora_exec exec) {
  const moelora_tensor *outs[] = {&o->gemm.out,   &o->experts.out, &o->delta.out,
                                  &o->summed.out, &o->listed.out,  &o->mlp.out};
  clear(outs[which]);
  const moelora_delta_args *const deltas[] = {&o->delta, &o->summed, &o->listed};
  if (which == GEMM)
    RUN(gemm, &o->gemm, exec);
  else if (which == LAYER)
    RUN(experts, &o->experts, exec);
  else if (which == MLP)
    RUN(mlp_delta, &o->mlp, exec);
  else
    RUN(delta, deltas[which - DELTA], exec);
  return outs[which];
}

/* ---- changes between the steps of a call ---- */

static int num_steps;
static const operators *stepping;

/* Changes every table before the threads of a step start. */
static void change_and_run(int64_t count, moelora_task task, void *context) {
  const moelora_lists *lists = &stepping->lists.lists;
  num_steps++;
  set_tables(num_steps % 2);
  memset(lists->sorted_token_ids.data, 0x7f, (size_t)count_of(&lists->sorted_token_ids) * 4);
  memset(lists->num_tokens_post_padded.data, 0x7f, SLOTS * 4);
  parallel_for(count, task, context);
}

static void test_steps(void) {
  seed(1);
  new_tables(90, 2);
  operators o = new_operators(90, 2, 1024, 256);
  const moelora_exec changing = {
      .device = MOELORA_CPU, .parallel_for = change_and_run, .num_threads = THREADS};
  stepping = &o;
  for (int which = 0; which < NUM_COMPUTING; which++) {
    set_tables(0);
    RUN(align_lists, &o.lists, serial);
    const moelora_tensor want = copy_of(compute(&o, which, serial));
    num_steps = 0;
    const moelora_tensor *got = compute(&o, which, changing);
    if (num_steps < 2)
      FAIL("operator %d has %d steps of several threads, expected at least 2", which, num_steps);
    if (!same_bytes(&want, got))
      FAIL("operator %d looks at its tables again after it has started", which);
  }
  release_all();
}

/* ---- changes at any time ---- */

static int32_t i32(const moelora_tensor *t, int64_t i) {
  return ((const int32_t *)t->data)[i];
}

/* Rows are in range, each at most once; experts exist; the total matches the blocks. */
static void check_aligned(const char *what, const int32_t *ids, const int32_t *experts,
                          int64_t blocks, int32_t used, int64_t rows, bool once) {
  unsigned char *seen = calloc((size_t)rows + 1, 1);
  if (used < 0 || used % LISTED_BLOCK || used > blocks * LISTED_BLOCK)
    FAIL("%s: %d rows in use", what, used);
  for (int64_t i = 0; i < blocks * LISTED_BLOCK; i++) {
    const int32_t expert = experts[i / LISTED_BLOCK];
    if (ids[i] < 0 || ids[i] > rows || (i >= used && ids[i] != rows))
      FAIL("%s: row %d at %lld of %d", what, ids[i], (long long)i, used);
    if (expert < -1 || expert >= EXPERTS + 2 || (expert < 0) != (i >= used))
      FAIL("%s: expert %d at %lld of %d", what, expert, (long long)i, used);
    if (once && ids[i] < rows && seen[ids[i]]++)
      FAIL("%s: row %d comes twice", what, ids[i]);
  }
  free(seen);
}

static void check_align(operators *o, int mode, int64_t rows) {
  static const char *const names[] = {"base", "uniform", "segmented", "sorting"};
  const moelora_align_args *a = &o->align[mode];
  RUN(align, a, serial);
  check_aligned(names[mode], a->sorted_token_ids.data, a->expert_ids.data, a->expert_ids.size[0],
                i32(&a->num_tokens_post_padded, 0), rows, mode != MOELORA_ALIGN_SORTING);
}

static void check_lists(operators *o, int64_t rows) {
  const moelora_lists *l = &o->lists.lists;
  const int64_t blocks = l->expert_ids.size[1];
  for (int64_t i = 0; i < count_of(&l->sorted_token_ids); i++)
    ((int32_t *)l->sorted_token_ids.data)[i] = (int32_t)rows;
  memset(l->expert_ids.data, 0xff, (size_t)count_of(&l->expert_ids) * 4);
  clear(&l->num_tokens_post_padded);
  RUN(align_lists, &o->lists, serial);
  for (int64_t i = 0; i < SLOTS; i++)
    check_aligned("lists", (int32_t *)l->sorted_token_ids.data + i * blocks * LISTED_BLOCK,
                  (int32_t *)l->expert_ids.data + i * blocks, blocks,
                  i32(&l->num_tokens_post_padded, i), rows, true);
}

static void test_any_time(int64_t tokens, int64_t top_k, int rounds) {
  seed((uint64_t)tokens);
  new_tables(tokens, top_k);
  operators o = new_operators(tokens, top_k, 5, 3);
  const moelora_tensor want = copy_of(compute(&o, GEMM, serial));
  const pthread_t thread = start_flipping(NUM_TABLES);
  for (int round = 0; round < rounds; round++) {
    for (int mode = 0; mode < 4; mode++)
      check_align(&o, mode, tokens * top_k);
    check_lists(&o, tokens * top_k);
    for (int which = 0; which < NUM_COMPUTING; which++) {
      const moelora_tensor *out = compute(&o, which, serial);
      for (int64_t i = 0; i < count_of(out); i++)
        CHECK(isfinite(read_value(out->data, MOELORA_F32, i)));
    }
  }
  stop_flipping(thread);

  /* After the last change, results are as usual. */
  set_tables(0);
  CHECK(same_bytes(compute(&o, GEMM, serial), &want));
  release_all();
}

/* With top_k = 1 and a single changing table, every row equals the row of one of the two states,
 * in all columns. */
static void test_rows_of_one_state(int which, int rounds) {
  const int64_t tokens = 60;
  for (int changing = 0; changing < NUM_TABLES; changing++) {
    seed((uint64_t)changing + 77);
    new_tables(tokens, 1);
    operators o = new_operators(tokens, 1, 40, 300);
    moelora_tensor want[2];
    for (int state = 1; state >= 0; state--) {
      set_table(&tables[changing], state);
      want[state] = copy_of(compute(&o, which, serial));
    }
    const pthread_t thread = start_flipping(changing);
    for (int round = 0; round < rounds; round++) {
      const moelora_tensor *out = compute(&o, which, serial);
      const int64_t columns = count_of(out) / tokens;
      for (int64_t m = 0; m < tokens; m++) {
        double off[2] = {0, 0};
        for (int64_t i = m * columns; i < (m + 1) * columns; i++)
          for (int state = 0; state < 2; state++)
            off[state] = fmax(off[state], fabs(read_value(out->data, MOELORA_F32, i) -
                                               read_value(want[state].data, MOELORA_F32, i)));
        if (fmin(off[0], off[1]) > 1e-4)
          FAIL("operator %d while %s changes: row %lld is %g off one state and %g off the other",
               which, tables[changing].name, (long long)m, off[0], off[1]);
      }
    }
    stop_flipping(thread);
    release_all();
  }
}

int main(int argc, char **argv) {
  const int rounds = argc > 1 ? atoi(argv[1]) : 20;
  test_steps();
  test_any_time(64, 2, 10 * rounds);
  test_any_time(3000, 2, rounds / 2);
  for (int which = 0; which < NUM_COMPUTING; which++)
    if (which != LISTED)
      test_rows_of_one_state(which, rounds);
  printf("test_changing: %d tables, %d rounds\n", NUM_TABLES, rounds);
  return 0;
}
