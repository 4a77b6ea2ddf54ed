/* exec.device_index is where a call runs, whichever device is current in the calling thread; that
 * one stays current. Needs two GPUs of one kind; prints how many runs were compared. */
#include <cuda_runtime_api.h>

#include "harness.h"

#define CUDA(CALL)                                                                                 \
  do {                                                                                             \
    cudaError_t error_ = (CALL);                                                                   \
    if (error_ != cudaSuccess)                                                                     \
      FAIL("%s: %s", #CALL, cudaGetErrorString(error_));                                           \
  } while (0)

enum { E = 8, TOP_K = 2, K = 256, I = 192, SLOTS = 3, R = 16, DEVICES = 2 };

static int compared;

static void *device_memory(size_t bytes) {
  void *data = NULL;
  CUDA(cudaMalloc(&data, bytes ? bytes : 1));
  return data;
}

/* The same values on the current device. */
static moelora_tensor upload(moelora_tensor t) {
  const size_t bytes = (size_t)count_of(&t) * dtype_bytes(t.dtype);
  void *data = device_memory(bytes);
  CUDA(cudaMemcpy(data, t.data, bytes, cudaMemcpyHostToDevice));
  t.data = data;
  return t;
}

static moelora_lora upload_lora(moelora_lora lora) {
  for (int32_t i = 0; i < lora.num_slices; i++) {
    lora.a[i] = upload(lora.a[i]);
    lora.b[i] = upload(lora.b[i]);
  }
  return lora;
}

static moelora_lora host_lora(int32_t slices, int64_t n, int64_t k) {
  moelora_lora lora = {.num_slices = slices};
  for (int32_t i = 0; i < slices; i++) {
    lora.a[i] = random_tensor(MOELORA_BF16, 0.1, SIZES(SLOTS, E, R, k));
    lora.b[i] = random_tensor(MOELORA_BF16, 0.1, SIZES(SLOTS, E, n / slices, R));
  }
  return lora;
}

static moelora_experts_args host_layer(int64_t tokens) {
  return (moelora_experts_args){
      .hidden_states = random_tensor(MOELORA_BF16, 1, SIZES(tokens, K)),
      .w13 = random_tensor(MOELORA_BF16, 0.1, SIZES(E, 2 * I, K)),
      .w2 = random_tensor(MOELORA_BF16, 0.1, SIZES(E, K, I)),
      .routing = {.topk_ids = random_ids(MOELORA_I32, 0, E - 1, SIZES(tokens, TOP_K)),
                  .topk_weights = random_tensor(MOELORA_F32, 1, SIZES(tokens, TOP_K))},
      .adapters = {.token_lora_mapping = random_ids(MOELORA_I32, -1, SLOTS - 1, SIZES(tokens))},
      .w13_lora = host_lora(2, 2 * I, K),
      .w2_lora = host_lora(1, K, I),
      .out = new_tensor(MOELORA_BF16, SIZES(tokens, K)),
  };
}

static moelora_experts_args upload_layer(moelora_experts_args a) {
  a.hidden_states = upload(a.hidden_states);
  a.w13 = upload(a.w13);
  a.w2 = upload(a.w2);
  a.routing.topk_ids = upload(a.routing.topk_ids);
  a.routing.topk_weights = upload(a.routing.topk_weights);
  a.adapters.token_lora_mapping = upload(a.adapters.token_lora_mapping);
  a.w13_lora = upload_lora(a.w13_lora);
  a.w2_lora = upload_lora(a.w2_lora);
  a.out = upload(a.out);
  return a;
}

static void check_current(int device) {
  int current = -1;
  CUDA(cudaGetDevice(&current));
  CHECK_INT(current, device);
}

/* Runs the layer of `args`, whose memory is of device `at`, while `current` is current; its output
 * on the host. */
static moelora_tensor run_layer(const moelora_experts_args *args, int at, int current,
                                bool default_stream) {
  cudaStream_t stream = NULL;
  CUDA(cudaSetDevice(at));
  CUDA(cudaMemset(args->out.data, 0xff, (size_t)count_of(&args->out) * 2));
  if (!default_stream)
    CUDA(cudaStreamCreate(&stream));
  CUDA(cudaDeviceSynchronize());

  CUDA(cudaSetDevice(current));
  moelora_exec exec = {.device = MOELORA_CUDA, .device_index = at, .stream = stream};
  moelora_call call;
  CHECK_OK(moelora_prepare_experts(args, &exec, &call));
  check_current(current);
  CUDA(cudaSetDevice(at));
  exec.workspace = device_memory(call.workspace_bytes);
  exec.workspace_bytes = call.workspace_bytes;
  CUDA(cudaSetDevice(current));
  CHECK_OK(moelora_run(&call, &exec));
  check_current(current);

  CUDA(cudaSetDevice(at));
  CUDA(cudaStreamSynchronize(stream));
  const moelora_tensor out = new_tensor(MOELORA_BF16, args->out.ndim, args->out.size);
  CUDA(cudaMemcpy(out.data, args->out.data, (size_t)count_of(&out) * 2, cudaMemcpyDeviceToHost));
  CUDA(cudaFree(exec.workspace));
  if (stream)
    CUDA(cudaStreamDestroy(stream));
  return out;
}

static void check_same(const moelora_tensor *a, const moelora_tensor *b) {
  CHECK(memcmp(a->data, b->data, (size_t)count_of(a) * dtype_bytes(a->dtype)) == 0);
  compared++;
}

/* The other device is current first: what is found out about a kernel then is about this one. */
static void test_layer(int64_t tokens) {
  const moelora_experts_args host = host_layer(tokens);
  moelora_tensor first = absent;
  for (int at = DEVICES - 1; at >= 0; at--) {
    CUDA(cudaSetDevice(at));
    const moelora_experts_args args = upload_layer(host);
    for (int run = 0; run < 4; run++) {
      const int current = run < 2 ? DEVICES - 1 - at : at;
      const moelora_tensor out = run_layer(&args, at, current, run % 2);
      if (first.data)
        check_same(&first, &out);
      else
        first = out;
    }
  }
  release_all();
}

static void test_packing(void) {
  const moelora_tensor host = random_tensor(MOELORA_BF16, 1, SIZES(E, 128, K));
  moelora_tensor want = new_tensor(MOELORA_BF16, SIZES(E, 2, K / 64, 64, 64));
  const moelora_tensor got = new_tensor(MOELORA_BF16, SIZES(E, 2, K / 64, 64, 64));
  CHECK_OK(moelora_pack_weights(&host, &want, &(moelora_exec){.device = MOELORA_CPU}));
  for (int at = 0; at < DEVICES; at++) {
    CUDA(cudaSetDevice(at));
    const moelora_tensor w = upload(host), out = upload(got);
    CUDA(cudaSetDevice(DEVICES - 1 - at));
    const moelora_exec exec = {.device = MOELORA_CUDA, .device_index = at};
    CHECK_OK(moelora_pack_weights(&w, &out, &exec));
    check_current(DEVICES - 1 - at);
    CUDA(cudaSetDevice(at));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaMemcpy(got.data, out.data, (size_t)count_of(&got) * 2, cudaMemcpyDeviceToHost));
    check_same(&want, &got);
  }
  release_all();
}

int main(void) {
  int count = 0;
  CUDA(cudaGetDeviceCount(&count));
  CHECK(count >= DEVICES);
  const int64_t tokens[] = {300, 1, 24};
  for (int i = 0; i < 3; i++)
    test_layer(tokens[i]);
  test_packing();
  moelora_exec beyond = {.device = MOELORA_CUDA, .device_index = count};
  char message[80];
  snprintf(message, sizeof message, "exec.device_index is %d, there are %d devices", count, count);
  const moelora_experts_args any = host_layer(1);
  CHECK_FAILS(call_experts(&any, &beyond), MOELORA_INVALID_ARGUMENT, message);
  release_all();
  printf("two_devices: %d runs compared\n", compared);
  return 0;
}
