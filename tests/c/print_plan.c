/* Prints plans for devices that need not be present. Each line of stdin is a problem and a device,
 *
 *   DTYPE M TOP_K E GLOBAL_E K I RANK cpu ISA_BITS
 *   DTYPE M TOP_K E GLOBAL_E K I RANK cuda COMPUTE_CAPABILITY
 *
 * with RANK 0 for no adapters. Prints the plan of the layer to stdout:
 *
 *   VARIANT BLOCK_ROWS STAGED SORT SHRINK13 SHRINK2 SUM W2     or       error: MESSAGE
 *
 * STAGED is the variant that replaces a single-launch layer, - for others; kernels that are not
 * used, as all on a CPU, are -; W2 is the variant of the second projection, next to VARIANT or
 * STAGED. With arguments `formats W13 W2` before all others, weights are quantized: native, mxfp4,
 * int4, int4_g32, int4_zp, int4_zp_g32, fp8, fp8_g64, fp8_rows, or w8a8 and w8a8_g64: fp8 and
 * fp8_g64 with quantized x.
 * With a first argument `listed`, prints 1 or 0 for each shrink: whether it uses listed segments.
 * With `gemm`, the lines are products with w13 alone, without adapters; prints VARIANT.
 * With `delta`, the lines are deltas of x [M, K] to [M, TOP_K, I]; prints
 *
 *   ORDER SORT SHRINK EXPAND WAVES
 *
 * With `backward`, the lines are backwards of a layer; prints VARIANT BLOCK_ROWS SORT SUM. With
 * `project`, they are backwards of w13, with `alone`, of its LoRA without w13; prints VARIANT
 * BLOCK_ROWS SHRINK SUM. With `tiles`, prints every row that supports the layer as separate
 * launches, with the nanoseconds per 1000 weights of the cost model; the selected one is in
 * brackets:
 *
 *   NAME=NS [NAME=NS] ...
 *
 * A following `on SMS GB_PER_S` sets the number of SMs and the bandwidth of the GPU, which are
 * otherwise 132 and unknown. With MOELORA_LOG=plan the launches of layers and of `gemm`
 * are printed to stderr.
 *
 * Other arguments are tuned plans, nine words each:
 *
 *   cpu|cuda COMPUTE_CAPABILITY SMS DTYPE E TOP_K K I M:VARIANT */
#define _POSIX_C_SOURCE 200112L /* setenv */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/plan_tile.h"
#include "plans.h"

static moelora_dtype parse_dtype(const char *name) {
  static const char *const names[] = {"float32", "bfloat16", "float16"};
  for (int i = 0; i < 3; i++)
    if (strcmp(name, names[i]) == 0)
      return (moelora_dtype)i;
  fprintf(stderr, "dtype %s\n", name);
  exit(2);
}

/* Formats of a weight and of x. */
typedef struct operands {
  moelora_format format;
  moelora_x_format x;
} operands;

static operands parse_format(const char *name) {
  static const char *const names[MOELORA_FORMATS] = {
      "native", "mxfp4",   "int4",     "int4_g32", "int4_zp", "int4_zp_g32",
      "fp8",    "fp8_g64", "fp8_rows", "nvfp4",    "nf4",     "bnb_fp4",
  };
  if (strcmp(name, "w8a8") == 0 || strcmp(name, "w8a8_g64") == 0)
    return (operands){name[4] ? MOELORA_FP8_G64 : MOELORA_FP8, MOELORA_X_GROUP};
  for (int i = 0; i < MOELORA_FORMATS; i++)
    if (strcmp(name, names[i]) == 0)
      return (operands){(moelora_format)i, MOELORA_X_NATIVE};
  fprintf(stderr, "format %s\n", name);
  exit(2);
}

static void add_tuned_plan(char **words) {
  char *variant = strchr(words[8], ':') + 1;
  const moelora_tuned_plan plan = {
      .device = strcmp(words[0], "cuda") == 0 ? MOELORA_CUDA : MOELORA_CPU,
      .compute_capability = atoi(words[1]),
      .num_units = atoi(words[2]),
      .dtype = parse_dtype(words[3]),
      .num_experts = atoi(words[4]),
      .top_k = atoi(words[5]),
      .hidden = atoll(words[6]),
      .intermediate = atoll(words[7]),
      .tokens = atoll(words[8]),
      .variant = variant,
  };
  if (moelora_add_tuned_plan(&plan) != MOELORA_OK) {
    fprintf(stderr, "%s\n", moelora_error_message());
    exit(3);
  }
  memset(variant, '?', strlen(variant)); /* the library must not keep the string */
}

/* Per CTA; CUDA C++ programming guide, technical specifications per compute capability. */
static int shared_kib(int capability) {
  switch (capability) {
  case 80:
  case 87:
    return 163;
  case 90:
  case 100:
    return 227;
  default:
    return 99;
  }
}

static const char *subject = ""; /* the first argument */

static const char *name_of(const moelora_variant *variant) {
  return variant ? variant->name : "-";
}

static bool planned(moelora_status status) {
  if (status != MOELORA_OK)
    printf("error: %s\n", moelora_error_message());
  return status == MOELORA_OK;
}

static void print_delta(const moelora_experts_problem *layer, const moelora_device_info *device) {
  moelora_delta_problem problem =
      delta_of(layer->routes, layer->w2_lora.max_rank, layer->intermediate, layer->hidden);
  problem.dtype = layer->dtype;
  problem.add_inputs = true;
  static const char *const orders[] = {"route", "grouped", "sorted", "listed"};
  moelora_delta_plan plan;
  if (planned(moelora_plan_delta(&problem, device, &plan)))
    printf("%s %s %s %s %d\n", orders[plan.order], name_of(plan.align.rows.variant),
           name_of(plan.shrink[0].variant), name_of(plan.expand[0].variant), plan.expand[0].waves);
}

static void print_gemm(const moelora_experts_problem *layer, const moelora_device_info *device) {
  moelora_gemm_problem problem = gemm_of(layer->routes, layer->w13);
  problem.dtype = layer->dtype;
  moelora_gemm_plan plan;
  if (!planned(moelora_plan_gemm(&problem, device, &plan)))
    return;
  printf("%s\n", plan.variant->name);
  moelora_note_gemm(&problem, device, &plan);
}

static void print_backward(const moelora_experts_problem *layer,
                           const moelora_device_info *device) {
  moelora_experts_backward_problem problem = {
      .forward = *layer,
      .dout = memory,
      .dout_stride = layer->hidden,
      .dx = memory,
      .dx_stride = layer->hidden,
  };
  problem.forward.saved.gate_up = memory;
  problem.forward.saved.gate_up_stride = layer->w13.n;
  moelora_backward_plan plan;
  if (planned(moelora_plan_experts_backward(&problem, device, &plan)))
    printf("%s %d %s %s\n", plan.variant->name, plan.variant->block_m,
           name_of(plan.align.rows.variant), name_of(plan.sum));
}

static void print_projection(const moelora_experts_problem *layer,
                             const moelora_device_info *device) {
  moelora_gemm_backward_problem problem = {
      .forward = gemm_of(layer->routes, layer->w13),
      .dout = memory,
      .dx = memory,
      .dx_stride = layer->hidden,
  };
  moelora_gemm_problem *forward = &problem.forward;
  memcpy(problem.dout_stride, forward->out_stride, sizeof problem.dout_stride);
  forward->dtype = layer->dtype;
  forward->lora = layer->w13_lora;
  if (strcmp(subject, "alone") == 0)
    forward->w = (moelora_weights){.n = layer->w13.n, .k = layer->hidden};
  problem.b[0].data = memory;
  moelora_gemm_backward_plan plan;
  if (planned(moelora_plan_gemm_backward(&problem, device, &plan)))
    printf("%s %d %s %s\n", plan.variant->name, plan.variant->block_m, name_of(plan.shrink.variant),
           name_of(plan.sum));
}

static void print_layer(const moelora_experts_problem *layer, const moelora_device_info *device) {
  moelora_experts_plan plan;
  if (!planned(moelora_plan_experts(layer, device, &plan)))
    return;
  printf("%s %d %s %s %s %s %s %s\n", plan.variant->name, plan.variant->block_m,
         name_of(plan.staged), name_of(plan.align.rows.variant), name_of(plan.shrink[0].variant),
         name_of(plan.shrink[1].variant), name_of(plan.sum), name_of(plan.w2));
  moelora_note_experts(layer, device, &plan);
}

static void print_listed(const moelora_experts_problem *layer, const moelora_device_info *device) {
  moelora_experts_plan plan;
  if (planned(moelora_plan_experts(layer, device, &plan)))
    printf("%d %d\n", plan.shrink[0].listed, plan.shrink[1].listed);
}

/* With contiguous weights, which Hopper's kernels support, too. */
static void print_tiles(const moelora_experts_problem *layer, const moelora_device_info *device) {
  const moelora_access access = {
      .vectors = true,
      .tma = true,
      .layer = true,
      .x_rows = layer->routes.num_tokens,
      .x_stride = layer->x_stride,
      .k = layer->hidden,
      .format = moelora_kernel_format_of(layer->w13.format, layer->w13.x),
      .second = moelora_kernel_format_of(layer->w2.format, layer->w2.x),
  };
  const int64_t rows = moelora_rows_per_expert(&layer->routes);
  moelora_tile tiles[MOELORA_MAX_TILES];
  const int32_t count = moelora_list_tiles(rows, layer->dtype, &access, device, tiles);
  const char *space = "";
  for (int32_t i = 0; i < count; i++) {
    const moelora_variant *v = tiles[i].variant;
    if (!moelora_variant_runs_on(v, device) || moelora_tile_misfit(v, &access, device))
      continue;
    const bool chosen = !tiles[i].why_not;
    printf("%s%s%s=%.5f%s", space, chosen ? "[" : "", v->name,
           moelora_model_ns(v, rows, &access, device), chosen ? "]" : "");
    space = " ";
  }
  printf("\n");
}

/* What a first argument asks about; nothing: layers. */
static const struct {
  const char *name;
  void (*print)(const moelora_experts_problem *, const moelora_device_info *);
} subjects[] = {{"delta", print_delta},        {"listed", print_listed},
                {"tiles", print_tiles},        {"backward", print_backward},
                {"project", print_projection}, {"alone", print_projection},
                {"gemm", print_gemm}};

int main(int argc, char **argv) {
  void (*print)(const moelora_experts_problem *, const moelora_device_info *) = print_layer;
  subject = argc > 1 ? argv[1] : "";
  for (size_t i = 0; i < sizeof subjects / sizeof *subjects; i++)
    if (strcmp(subject, subjects[i].name) == 0)
      print = subjects[i].print;
  /* The environment is read once: what a process puts there afterwards is in no message. */
  moelora_check_environment();
  setenv("MOELORA_FORCE_VARIANT", "later", 1);
  setenv("MOELORA_MAX_CC", "later", 1);
  const int asked = 1 + (print != print_layer);
  const bool on = argc > asked + 2 && strcmp(argv[asked], "on") == 0;
  const int told = asked + 3 * on;
  const bool quantized = argc > told + 2 && strcmp(argv[told], "formats") == 0;
  const operands w13 = quantized ? parse_format(argv[told + 1]) : (operands){0};
  const operands w2 = quantized ? parse_format(argv[told + 2]) : (operands){0};
  for (int i = told + 3 * quantized; i + 9 <= argc; i += 9)
    add_tuned_plan(argv + i);
  char dtype[16], kind[8];
  long long tokens, top_k, experts, global, hidden, inner, rank;
  int level;
  while (scanf("%15s %lld %lld %lld %lld %lld %lld %lld %7s %i", dtype, &tokens, &top_k, &experts,
               &global, &hidden, &inner, &rank, kind, &level) == 10) {
    moelora_experts_problem problem =
        experts_of(routes_of(tokens, (int32_t)top_k, (int32_t)experts, rank ? 8 : 0),
                   weights_of(w13.format, w13.x, MOELORA_ROWS_GATE_UP, 2 * inner, hidden),
                   weights_of(w2.format, w2.x, MOELORA_ROWS_PLAIN, hidden, inner));
    problem.dtype = parse_dtype(dtype);
    if (global > experts) {
      problem.routes.expert_map = (const int32_t *)memory;
      problem.routes.num_global = (int32_t)global;
    }
    if (rank) {
      problem.w13_lora = factors_of(2, (int32_t)rank, 2 * inner, hidden);
      problem.w2_lora = factors_of(1, (int32_t)rank, hidden, inner);
    }
    moelora_device_info device = {
        .device = MOELORA_CPU, .num_units = 1, .cpu_isa = (uint32_t)level};
    if (strcmp(kind, "cuda") == 0)
      device = (moelora_device_info){.device = MOELORA_CUDA,
                                     .compute_capability = level,
                                     .num_units = on ? atoi(argv[asked + 1]) : 132,
                                     .memory_bytes_per_us = on ? atoll(argv[asked + 2]) * 1000 : 0,
                                     .l2_bytes = 60 << 20,
                                     .shared_bytes = shared_kib(level) * 1024,
                                     .overlaps = level >= 90};
    if (planned(moelora_check_environment()))
      print(&problem, &device);
  }
  return 0;
}
