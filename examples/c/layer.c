/* A mixture-of-experts layer with LoRA adapters from C: no Python, no torch. Sorts routed rows,
 * runs one projection and the whole layer, and compares both with plain loops.
 *
 *   python3 setup.py build_core
 *   cc -std=c11 -O2 -Icsrc examples/c/layer.c build/core/libmoelora.a -lm -lpthread -o layer
 *
 * and, for a run on a GPU besides:
 *
 *   python3 setup.py build_core --cuda
 *   cc -std=c11 -O2 -DUSE_CUDA -Icsrc -I$CUDA_HOME/include examples/c/layer.c \
 *     build/core-cuda/libmoelora.a -L$CUDA_HOME/lib64 \
 *     -lcudart_static -lstdc++ -ldl -lrt -lm -lpthread -o layer
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef USE_CUDA
#include <cuda_runtime_api.h>
#endif

#include "moelora.h"

enum { M = 9, TOP_K = 2, E = 4, K = 128, I = 64, SLOTS = 2, R = 16, P = M * TOP_K, BLOCK = 16 };

/* ---- the layer's numbers, on the host ---- */

static float x[M][K], w13[E][2 * I][K], w2[E][K][I], topk_weights[M][TOP_K];
static float a13[2][SLOTS][E][R][K], b13[2][SLOTS][E][I][R]; /* gate, up */
static float a2[SLOTS][E][R][I], b2[SLOTS][E][K][R];
static int32_t topk_ids[M][TOP_K];
static const int32_t lora_of_token[M] = {-1, 0, 1, 1, 0, -1, 0, 1, 0};
static const int32_t lora_ranks[SLOTS] = {4, 16};
static const float lora_scalings[SLOTS] = {2, 0.5f};

/* Multiples of scale / 128 in [-scale, scale], which bfloat16 holds exactly. */
static void fill(void *data, size_t bytes, float scale) {
  for (size_t i = 0; i < bytes / sizeof(float); i++)
    ((float *)data)[i] = (float)(rand() % 257 - 128) / 128 * scale;
}

static void fill_all(void) {
  srand(1);
  fill(x, sizeof x, 1);
  fill(w13, sizeof w13, 0.125f);
  fill(w2, sizeof w2, 0.125f);
  fill(a13, sizeof a13, 0.125f);
  fill(b13, sizeof b13, 0.25f);
  fill(a2, sizeof a2, 0.125f);
  fill(b2, sizeof b2, 0.25f);
  for (int m = 0; m < M; m++)
    for (int j = 0; j < TOP_K; j++) {
      topk_ids[m][j] = (m + j * (1 + m % 3)) % E;
      topk_weights[m][j] = j ? 0.375f : 0.625f;
    }
}

/* ---- plain loops ---- */

/* y[n] += x w^T, and with an adapter y[n] += s (x a^T) b^T */
static void project(const double *in, int k, const float *w, int n, const float *a, const float *b,
                    int lora, double *y) {
  for (int i = 0; i < n; i++)
    for (int j = 0; j < k; j++)
      y[i] += in[j] * w[i * k + j];
  for (int r = 0; lora >= 0 && r < lora_ranks[lora]; r++) {
    double h = 0;
    for (int j = 0; j < k; j++)
      h += in[j] * a[r * k + j];
    for (int i = 0; i < n; i++)
      y[i] += lora_scalings[lora] * h * b[i * R + r];
  }
}

/* Gate and up of token m through expert e. */
static void loop_gemm(int m, int e, int lora, double y[2 * I]) {
  double in[K];
  int slot = lora < 0 ? 0 : lora;
  for (int k = 0; k < K; k++)
    in[k] = x[m][k];
  memset(y, 0, 2 * I * sizeof *y);
  for (int slice = 0; slice < 2; slice++)
    project(in, K, w13[e][slice * I], I, a13[slice][slot][e][0], b13[slice][slot][e][0], lora,
            y + slice * I);
}

static void loop_layer(int m, bool with_adapters, double out[K]) {
  int lora = with_adapters ? lora_of_token[m] : -1, slot = lora < 0 ? 0 : lora;
  memset(out, 0, K * sizeof *out);
  for (int j = 0; j < TOP_K; j++) {
    int e = topk_ids[m][j];
    double y[2 * I], h[I], z[K] = {0};
    loop_gemm(m, e, lora, y);
    for (int i = 0; i < I; i++)
      h[i] = y[i] / (1 + exp(-y[i])) * y[I + i];
    project(h, I, w2[e][0], K, a2[slot][e][0], b2[slot][e][0], lora, z);
    for (int k = 0; k < K; k++)
      out[k] += topk_weights[m][j] * z[k];
  }
}

/* ---- memory of a device ---- */

static void check(moelora_status status) {
  if (status == MOELORA_OK)
    return;
  fprintf(stderr, "moelora: %s\n", moelora_error_message());
  exit(1);
}

static void copy(moelora_device device, void *to, const void *from, size_t bytes) {
#ifdef USE_CUDA
  if (device == MOELORA_CUDA) {
    cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
    return;
  }
#endif
  (void)device;
  memcpy(to, from, bytes);
}

static struct {
  moelora_device device;
  void *data;
} allocations[64];
static int num_allocations;

static void free_all(void) {
  while (num_allocations--) {
#ifdef USE_CUDA
    if (allocations[num_allocations].device == MOELORA_CUDA)
      cudaFree(allocations[num_allocations].data);
#endif
    if (allocations[num_allocations].device == MOELORA_CPU)
      free(allocations[num_allocations].data);
  }
}

/* Lives until free_all. */
static void *allocate(moelora_device device, size_t bytes) {
  void *data = NULL;
#ifdef USE_CUDA
  if (device == MOELORA_CUDA)
    cudaMalloc(&data, bytes);
#endif
  if (device == MOELORA_CPU)
    data = aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (!data || num_allocations == sizeof allocations / sizeof *allocations) {
    fprintf(stderr, "out of memory\n");
    exit(1);
  }
  allocations[num_allocations].device = device;
  allocations[num_allocations++].data = data;
  return data;
}

static size_t bytes_of(moelora_dtype dtype) {
  return dtype == MOELORA_BF16 ? 2 : 4;
}

/* A contiguous tensor of uninitialized memory; sizes end at the first 0. */
static moelora_tensor empty(moelora_device device, moelora_dtype dtype, const int64_t size[4]) {
  moelora_tensor t = {.dtype = dtype};
  int64_t count = 1;
  while (t.ndim < 4 && size[t.ndim]) {
    t.size[t.ndim] = size[t.ndim];
    count *= size[t.ndim++];
  }
  for (int32_t i = t.ndim - 1; i >= 0; i--)
    t.stride[i] = i == t.ndim - 1 ? 1 : t.size[i + 1] * t.stride[i + 1];
  t.data = allocate(device, (size_t)count * bytes_of(dtype));
  return t;
}

#define SIZE(...) ((const int64_t[4]){__VA_ARGS__})

static size_t count_of(const moelora_tensor *t) {
  size_t count = 1;
  for (int32_t i = 0; i < t->ndim; i++)
    count *= (size_t)t->size[i];
  return count;
}

/* The same with the host's values: int32 as it is, float as `dtype`. */
static moelora_tensor upload(moelora_device device, moelora_dtype dtype, const void *host,
                             const int64_t size[4]) {
  moelora_tensor t = empty(device, dtype, size);
  size_t count = count_of(&t);
  if (dtype != MOELORA_BF16) {
    copy(device, t.data, host, count * 4);
    return t;
  }
  uint16_t *halves = malloc(count * 2);
  for (size_t i = 0; i < count; i++) /* exact, as the low bits are 0: see fill */
    memcpy(halves + i, (const char *)host + i * 4 + 2, 2);
  copy(device, t.data, halves, count * 2);
  free(halves);
  return t;
}

static float *download(moelora_device device, const moelora_tensor *t) {
  size_t count = count_of(t);
  char *raw = malloc(count * 4);
  float *values = calloc(count, 4);
  copy(device, raw, t->data, count * bytes_of(t->dtype));
  if (t->dtype == MOELORA_BF16)
    for (size_t i = 0; i < count; i++)
      memcpy((char *)(values + i) + 2, raw + i * 2, 2);
  else
    memcpy(values, raw, count * 4);
  free(raw);
  return values;
}

/* ---- the operators ---- */

static int failures;

static void report(const char *what, const float *got, const double *want, int count,
                   double allowed) {
  double difference = 0, largest = 0;
  for (int i = 0; i < count; i++) {
    difference = fmax(difference, fabs(got[i] - want[i]));
    largest = fmax(largest, fabs(want[i]));
  }
  printf("  %-20s max difference %.2e of %.3g   %s\n", what, difference, largest,
         moelora_last_plan());
  if (!(difference <= allowed * largest))
    failures++;
}

/* Gives a prepared call the memory that it works in, and runs it. */
static void run(const moelora_call *call, moelora_exec exec) {
  exec.workspace_bytes = call->workspace_bytes;
  exec.workspace = allocate(exec.device, exec.workspace_bytes);
  check(moelora_run(call, &exec));
}

static void run_align(moelora_exec exec, const moelora_routing *routing,
                      const moelora_adapters *adapters) {
  int64_t blocks = moelora_align_max_blocks(MOELORA_ALIGN_SEGMENTED, P, E, SLOTS, BLOCK);
  moelora_align_args args = {
      .mode = MOELORA_ALIGN_SEGMENTED,
      .num_experts = E,
      .block_size = BLOCK,
      .max_loras = SLOTS,
      .routing = *routing,
      .adapters = *adapters,
      .sorted_token_ids = empty(exec.device, MOELORA_I32, SIZE(blocks * BLOCK)),
      .expert_ids = empty(exec.device, MOELORA_I32, SIZE(blocks)),
      .lora_ids = empty(exec.device, MOELORA_I32, SIZE(blocks * BLOCK)),
      .num_tokens_post_padded = empty(exec.device, MOELORA_I32, SIZE(1)),
  };
  moelora_call call;
  check(moelora_prepare_align(&args, &exec, &call));
  run(&call, exec);
  int32_t rows[P + E * BLOCK], experts[P + E], loras[P + E * BLOCK], used;
  copy(exec.device, rows, args.sorted_token_ids.data, (size_t)(blocks * BLOCK) * 4);
  copy(exec.device, experts, args.expert_ids.data, (size_t)blocks * 4);
  copy(exec.device, loras, args.lora_ids.data, (size_t)(blocks * BLOCK) * 4);
  copy(exec.device, &used, args.num_tokens_post_padded.data, 4);
  printf("  align: %d rows in %d blocks of %d\n", P, used / BLOCK, BLOCK);
  int seen = 0;
  for (int i = 0; i < used; i++) {
    if (rows[i] == P)
      continue;
    seen++;
    if (topk_ids[rows[i] / TOP_K][rows[i] % TOP_K] != experts[i / BLOCK] ||
        lora_of_token[rows[i] / TOP_K] != loras[i])
      failures++;
  }
  failures += seen != P;
}

static void run_gemm(moelora_exec exec, moelora_gemm_args *args, double allowed) {
  moelora_call call;
  check(moelora_prepare_gemm(args, &exec, &call));
  run(&call, exec);
  static double want[M][TOP_K][2 * I];
  for (int m = 0; m < M; m++)
    for (int j = 0; j < TOP_K; j++)
      loop_gemm(m, topk_ids[m][j], lora_of_token[m], want[m][j]);
  float *got = download(exec.device, &args->out);
  report("gemm with adapters", got, want[0][0], P * 2 * I, allowed);
  free(got);
}

static void run_layer(moelora_exec exec, moelora_experts_args *args, bool with_adapters,
                      double allowed) {
  moelora_call call;
  check(moelora_prepare_experts(args, &exec, &call));
  run(&call, exec);
  static double want[M][K];
  for (int m = 0; m < M; m++)
    loop_layer(m, with_adapters, want[m]);
  float *got = download(exec.device, &args->out);
  report(with_adapters ? "layer with adapters" : "layer", got, want[0], M * K, allowed);
  free(got);
}

static void run_all(moelora_device device, moelora_dtype dtype, double allowed) {
  const moelora_exec exec = {.device = device};
  const moelora_routing routing = {
      .topk_ids = upload(device, MOELORA_I32, topk_ids, SIZE(M, TOP_K)),
      .topk_weights = upload(device, MOELORA_F32, topk_weights, SIZE(M, TOP_K)),
  };
  const moelora_adapters adapters = {
      .token_lora_mapping = upload(device, MOELORA_I32, lora_of_token, SIZE(M)),
      .lora_ranks = upload(device, MOELORA_I32, lora_ranks, SIZE(SLOTS)),
      .lora_scalings = upload(device, MOELORA_F32, lora_scalings, SIZE(SLOTS)),
  };
  moelora_experts_args layer = {
      .hidden_states = upload(device, dtype, x, SIZE(M, K)),
      .w13 = upload(device, dtype, w13, SIZE(E, 2 * I, K)),
      .w2 = upload(device, dtype, w2, SIZE(E, K, I)),
      .routing = routing,
      .activation = MOELORA_SILU,
      .out = empty(device, dtype, SIZE(M, K)),
  };
  run_align(exec, &routing, &adapters);
  run_layer(exec, &layer, false, allowed);

  layer.adapters = adapters;
  layer.w13_lora.num_slices = 2;
  for (int slice = 0; slice < 2; slice++) {
    layer.w13_lora.a[slice] = upload(device, dtype, a13[slice], SIZE(SLOTS, E, R, K));
    layer.w13_lora.b[slice] = upload(device, dtype, b13[slice], SIZE(SLOTS, E, I, R));
  }
  layer.w2_lora.num_slices = 1;
  layer.w2_lora.a[0] = upload(device, dtype, a2, SIZE(SLOTS, E, R, I));
  layer.w2_lora.b[0] = upload(device, dtype, b2, SIZE(SLOTS, E, K, R));
  moelora_gemm_args gemm = {
      .x = layer.hidden_states,
      .w = layer.w13,
      .routing = routing,
      .adapters = adapters,
      .lora = layer.w13_lora,
      .out = empty(device, dtype, SIZE(M, TOP_K, 2 * I)),
  };
  run_gemm(exec, &gemm, allowed);
  run_layer(exec, &layer, true, allowed);
}

int main(void) {
  fill_all();
  printf("CPU (%s)\n", *moelora_cpu_features() ? moelora_cpu_features() : "scalar");
  run_all(MOELORA_CPU, MOELORA_F32, 1e-5);
#ifdef USE_CUDA
  if (moelora_has_device(MOELORA_CUDA)) {
    printf("CUDA\n");
    run_all(MOELORA_CUDA, MOELORA_BF16, 2e-2);
  } else {
    printf("CUDA: no device, or a build without CUDA\n");
  }
#endif
  free_all();
  return failures != 0;
}
