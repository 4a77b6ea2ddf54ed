/* Stores the outputs of a projection, and sums the rows of a token. */
#include "cpu/cpu.h"

void moelora_cpu_emit_operands(const moelora_projection *p, int64_t at, int64_t begin,
                               int64_t count, const float *values) {
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(p->variant);
  kernels->round(values,
                 (char *)p->out + (size_t)(at * p->out_stride[0] + begin) * kernels->operand_bytes,
                 count);
}

void moelora_cpu_emit_f32(const moelora_projection *p, int64_t at, int64_t begin, int64_t count,
                          const float *values) {
  float *z = (float *)p->out + p->sorted->row[at] * p->out_stride[0] + begin - p->first_column;
  for (int64_t j = 0; j < count; j++)
    z[j] = values[j];
}

void moelora_cpu_emit_out(const moelora_projection *p, int64_t at, int64_t begin, int64_t count,
                          const float *values) {
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(p->variant);
  const int64_t row = p->sorted->row[at];
  char *out = moelora_cpu_out(p, row, begin);
  const float weight = p->mul_routed_weight ? p->sorted->tables.weight[row] : 1.0f;
  float line[MOELORA_CPU_MAX_BLOCK_N] = {0};
  if (p->add)
    kernels->load(out, line, count);
  for (int64_t j = 0; j < count; j++)
    line[j] += weight * values[j];
  kernels->store(line, out, count);
}

static void combine_token(void *context, int64_t m, int32_t worker) {
  (void)worker;
  const moelora_combine *combine = context;
  const moelora_routes *routes = combine->routes;
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(combine->variant);
  const size_t bytes = moelora_dtype_bytes(combine->variant->dtype);
  const int64_t first = m * routes->top_k, end = first + routes->top_k;
  bool any = !combine->active;
  for (int64_t p = first; p < end && !any; p++)
    any = combine->active[p];
  if (!any)
    return;
  char *out = (char *)combine->out + (size_t)(m * combine->out_stride) * bytes;
  for (int64_t k = 0; k < combine->columns; k += 256) {
    const int64_t count = moelora_min(256, combine->columns - k);
    float sum[256] = {0};
    for (int64_t p = first; p < end; p++) {
      if (combine->active ? !combine->active[p] : combine->tables->expert[p] < 0)
        continue;
      const float weight = combine->weighted ? combine->tables->weight[p] : 1.0f;
      const float *z = combine->z + p * combine->columns + k;
      for (int64_t i = 0; i < count; i++)
        sum[i] += weight * z[i];
    }
    if (combine->add) {
      float before[256];
      kernels->load(out + (size_t)k * bytes, before, count);
      for (int64_t i = 0; i < count; i++)
        sum[i] += before[i];
    }
    kernels->store(sum, out + (size_t)k * bytes, count);
  }
}

void moelora_cpu_combine(const moelora_combine *combine, const moelora_exec *exec) {
  moelora_cpu_parallel(exec, combine->routes->num_tokens,
                       (double)combine->routes->num_rows * (double)combine->columns, combine_token,
                       (void *)combine);
}
