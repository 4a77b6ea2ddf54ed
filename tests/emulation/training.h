/* Tests a training step of a layer: saved tensors and gradients against those of the CPU, outputs
 * against inference bit for bit, and part of the tokens with another kernel. */
#pragma once

#include "problems.h"

RUN(experts_backward)

static inline moelora_tensor gradient_of(const moelora_tensor *value, moelora_dtype dtype) {
  if (!value->data || random_in(0, 7) == 0)
    return absent;
  return random_tensor(dtype, 1, value->ndim, value->size);
}

static inline moelora_lora gradients_of_lora(const moelora_lora *lora, moelora_dtype dtype) {
  moelora_lora grads = {.num_slices = lora->num_slices};
  for (int32_t i = 0; i < lora->num_slices; i++) {
    grads.a[i] = gradient_of(&lora->a[i], maybe() ? dtype : MOELORA_F32);
    grads.b[i] = gradient_of(&lora->b[i], maybe() ? dtype : MOELORA_F32);
  }
  return grads;
}

/* All gradients of a call, those that are not asked for too. */
typedef struct gradients {
  int count;
  moelora_tensor *all[3 + 2 * MOELORA_MAX_SLICES];
  const char *names[3 + 2 * MOELORA_MAX_SLICES];
} gradients;
#define GRADIENT(FIELD) list.names[list.count] = #FIELD, list.all[list.count++] = &g->FIELD

static inline gradients gradients_of(moelora_experts_grads *g) {
  gradients list = {0};
  GRADIENT(hidden_states);
  GRADIENT(topk_weights);
  GRADIENT(w13_lora.a[0]);
  GRADIENT(w13_lora.a[1]);
  GRADIENT(w13_lora.b[0]);
  GRADIENT(w13_lora.b[1]);
  GRADIENT(w2_lora.a[0]);
  GRADIENT(w2_lora.b[0]);
  GRADIENT(w13_bias);
  GRADIENT(w2_bias);
  return list;
}

/* Gives each its own memory, with the same contents. */
static inline void copy_all(gradients list) {
  for (int i = 0; i < list.count; i++)
    if (list.all[i]->data)
      *list.all[i] = copy_of(list.all[i]);
}

static inline moelora_experts_grads copy_grads(const moelora_experts_grads *from) {
  moelora_experts_grads copy = *from;
  copy_all(gradients_of(&copy));
  return copy;
}

static inline moelora_saved new_saved(moelora_dtype dtype, const moelora_experts_args *args) {
  const int64_t rows = args->routing.topk_ids.size[0] * args->routing.topk_ids.size[1];
  const moelora_lora *w13 = &args->w13_lora, *w2 = &args->w2_lora;
  const bool packed = args->w13.ndim == 5, adapters = args->adapters.token_lora_mapping.data;
  const int64_t columns = args->w13_layout.format != MOELORA_NATIVE ? args->w13_layout.rows
                          : packed                                  ? args->w13.size[1] * 64
                                                                    : args->w13.size[1];
  moelora_saved saved = {.gate_up = new_tensor(dtype, SIZES(rows, columns))};
  if (adapters && w13->num_slices)
    saved.w13_shrink = new_tensor(dtype, SIZES(rows, w13->num_slices, w13->a[0].size[2]));
  if (adapters && w2->num_slices)
    saved.w2_shrink = new_tensor(dtype, SIZES(rows, w2->a[0].size[2]));
  return saved;
}

static inline void check_given(const char *what, const moelora_tensor *got,
                               const moelora_tensor *want, double slack) {
  if (got->data && count_of(got) > 0)
    check_output(what, got, want, slack);
}

/* Factors with NaN in one adapter. */
static inline moelora_lora with_nans(const moelora_lora *lora, int64_t slot) {
  moelora_lora sick = *lora;
  for (int32_t i = 0; i < lora->num_slices; i++) {
    moelora_tensor *const both[] = {&sick.a[i], &sick.b[i]};
    for (int j = 0; j < 2; j++) {
      *both[j] = copy_of(both[j]);
      const int64_t each = count_of(both[j]) / both[j]->size[0];
      for (int64_t k = 0; k < each; k++)
        write_value(both[j]->data, both[j]->dtype, slot * each + k, NAN);
    }
  }
  return sick;
}

/* Whether a token's adapter, or none, is not among `affected`, a bit for each slot. */
static bool is_other(const moelora_experts_backward_args *args, uint32_t affected, int64_t m) {
  const moelora_tensor *mapping = &args->forward.adapters.token_lora_mapping;
  const double id = read_value(mapping->data, mapping->dtype, m);
  return !(id >= 0 && id < 32 && affected >> (int)id & 1);
}

/* Checks that `changed`, which differs from `args` in `affected` adapters, computes the same
 * gradients for tokens of other adapters, and of those adapters, bit for bit. `before`: contents of
 * the gradients of `args` before its call. */
static void check_others(const moelora_experts_backward_args *args,
                         const moelora_experts_grads *before,
                         const moelora_experts_backward_args *changed, uint32_t affected,
                         const char *what) {
  moelora_experts_backward_args other = *changed;
  moelora_experts_grads want = args->grads;
  other.grads = copy_grads(before);
  run_experts_backward(&other, gpu());
  const gradients list = gradients_of(&other.grads), expected = gradients_of(&want);
  for (int i = 0; i < list.count; i++) {
    const moelora_tensor *got = list.all[i];
    const bool of_tokens = i < 2, of_adapters = got->ndim == 4;
    if (!got->data || !(of_tokens || of_adapters))
      continue;
    for (int64_t at = 0; at < got->size[0]; at++) {
      const size_t row = (size_t)got->stride[0] * dtype_bytes(got->dtype);
      if ((of_tokens ? is_other(args, affected, at) : !(affected >> at & 1)) &&
          memcmp((char *)got->data + (size_t)at * row,
                 (char *)expected.all[i]->data + (size_t)at * row, row))
        FAIL("%s: gradient of %s, %s %lld differs %s (%s)", drawn, list.names[i],
             of_tokens ? "token" : "adapter", (long long)at, what, moelora_last_plan());
    }
  }
}

static void test_training(uint64_t number) {
  seed(number + 8000);
  const moelora_dtype dtype = random_in(0, 3) ? MOELORA_BF16 : MOELORA_F16;
  const moelora_dtype of_factors = random_in(0, 3) ? dtype : MOELORA_F32;
  const layer_problem p = draw_layer(dtype, of_factors);
  const sizes s = p.s;
  const moelora_layout layout = p.w13, layout2 = p.w2;
  moelora_experts_backward_args args = {
      .forward = p.args,
      .dout = random_tensor(dtype, 1, SIZES(s.tokens, s.hidden)),
      .accumulate = maybe(),
  };
  moelora_experts_args *forward = &args.forward;
  if (random_in(0, 7) == 0)
    forward->adapters.token_lora_mapping = absent;
  describe_layer(number, &p, of_factors);
  DESCRIBE("%s", args.accumulate ? " accumulate" : "");

  /* The forward: outputs as in inference, and what it saves. */
  moelora_experts_args want = *forward, serving = *forward;
  want.out = copy_of(&forward->out);
  want.saved = new_saved(dtype, forward);
  serving.out = copy_of(&forward->out);
  RUN_BOTH(experts, &serving, &want, dtype, &layout);
  forward->saved = new_saved(dtype, forward);
  run_experts(forward, gpu());
  if (!same_bytes(&forward->out, &serving.out))
    FAIL("training%s: outputs are not those of serving (%s)", drawn, moelora_last_plan());
  const double slack = fmax(slack_of(&layout), slack_of(&layout2));
  check_output("gate_up", &forward->saved.gate_up, &want.saved.gate_up, slack_of(&layout));
  check_given("w13_shrink", &forward->saved.w13_shrink, &want.saved.w13_shrink, 2);
  check_given("w2_shrink", &forward->saved.w2_shrink, &want.saved.w2_shrink, 2 + slack);

  /* The backward, with the same saved tensors. */
  forward->saved = want.saved;
  args.grads = (moelora_experts_grads){
      .hidden_states = gradient_of(&forward->hidden_states, dtype),
      .topk_weights = gradient_of(&forward->routing.topk_weights, MOELORA_F32),
      .w13_lora = gradients_of_lora(&forward->w13_lora, dtype),
      .w2_lora = gradients_of_lora(&forward->w2_lora, dtype),
      .w13_bias = gradient_of(&forward->w13_bias, maybe() ? dtype : MOELORA_F32),
      .w2_bias = gradient_of(&forward->w2_bias, maybe() ? dtype : MOELORA_F32),
  };
  const moelora_experts_grads before = copy_grads(&args.grads);
  moelora_experts_backward_args on_cpu = args;
  on_cpu.grads = copy_grads(&before);
  moelora_experts_backward_args over = args;
  over.overwrites_gate_up = true;
  over.grads = copy_grads(&before);
  over.forward.saved.gate_up = copy_of(&forward->saved.gate_up);
  RUN_BOTH(experts_backward, &args, &on_cpu, dtype, &layout);
  run_experts_backward(&over, gpu());
  const gradients got = gradients_of(&args.grads), expected = gradients_of(&on_cpu.grads);
  const gradients same = gradients_of(&over.grads);
  for (int i = 0; i < got.count; i++) {
    check_given(got.names[i], got.all[i], expected.all[i], 6);
    if (got.all[i]->data && !same_bytes(got.all[i], same.all[i]))
      FAIL("training%s: other bits of %s in the memory of gate_up (%s)", drawn, got.names[i],
           moelora_last_plan());
  }

  /* Base tokens and one adapter, or base tokens, alone; and beside NaN in an adapter. */
  if (forward->adapters.token_lora_mapping.data) {
    const int64_t slot = random_in(0, s.slots - 1), kept = maybe() ? slot : INT32_MAX;
    const uint32_t all = (1u << s.slots) - 1, one = 1u << slot;
    moelora_experts_backward_args alone = args, sick = args;
    moelora_tensor *mapping = &alone.forward.adapters.token_lora_mapping;
    *mapping = copy_of(mapping);
    for (int64_t m = 0; m < s.tokens; m++)
      if (read_value(mapping->data, mapping->dtype, m) != (double)kept)
        write_value(mapping->data, mapping->dtype, m, -1);
    check_others(&args, &before, &alone, kept == slot ? all & ~one : all, "alone");
    sick.forward.w13_lora = with_nans(&forward->w13_lora, slot);
    sick.forward.w2_lora = with_nans(&forward->w2_lora, slot);
    check_others(&args, &before, &sick, one, "beside NaN");
  }

  /* A part of the tokens, by another kernel: its rows have the same bits. */
  const tokens some = draw_tokens(s);
  moelora_experts_backward_args less = args;
  less.forward.hidden_states = part(&forward->hidden_states, some, 1);
  take_part(&less.forward.routing, &less.forward.adapters, some);
  less.forward.saved.gate_up = part(&want.saved.gate_up, some, s.top_k);
  less.forward.saved.w13_shrink = part(&want.saved.w13_shrink, some, s.top_k);
  less.forward.saved.w2_shrink = part(&want.saved.w2_shrink, some, s.top_k);
  less.forward.out = new_tensor(dtype, SIZES(some.count, s.hidden));
  less.dout = part(&args.dout, some, 1);
  less.grads = (moelora_experts_grads){
      .hidden_states = new_tensor(dtype, SIZES(some.count, s.hidden)),
      .topk_weights = new_tensor(MOELORA_F32, SIZES(some.count, s.top_k)),
  };
  RUN_FORCED(experts_backward, &less, dtype, &layout);
  if (args.grads.hidden_states.data)
    same_rows(&less.grads.hidden_states, &args.grads.hidden_states, some.first);
  if (args.grads.topk_weights.data)
    same_rows(&less.grads.topk_weights, &args.grads.topk_weights, some.first);
  release_all();
}
