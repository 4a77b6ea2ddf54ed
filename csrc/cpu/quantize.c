/* Quantizes rows of x to e4m3 for FP8 weights (see moelora_x_format in moelora.h):
 *
 *   s                      = scale per K group or per row, or x_scale of the layout
 *   values [rows, K]       = e4m3(x / s) for per-row s, otherwise e4m3(x (1/s))
 *   scales [rows, groups]  = s, repeated if groups share it
 *
 * Values are stored as operands (kernels.h), which represent e4m3 exactly. The result of a row does
 * not depend on other rows. */
#include <math.h>

#include "core/format.h"
#include "cpu/convert.h"
#include "cpu/cpu.h"

enum { LANES = 8, GROUP = 128 };

moelora_quantized_rows moelora_quantized_rows_take(const moelora_variant *variant,
                                                   const moelora_weights *w, int64_t rows,
                                                   moelora_arena *arena) {
  if (w->x == MOELORA_X_NATIVE)
    return (moelora_quantized_rows){0};
  const int64_t groups = moelora_divide_up(w->k, moelora_x_group(w->format));
  return (moelora_quantized_rows){
      .values = moelora_take_operands(variant, rows, w->k, arena),
      .scales = moelora_take_floats(arena, rows, groups),
      .groups = groups,
  };
}

/* Returns the maximum of `least` and all magnitudes; ignores NaN. */
static float largest(const float *line, int64_t count, float least) {
  float most[LANES];
  for (int lane = 0; lane < LANES; lane++)
    most[lane] = least;
  for (int64_t i = 0; i < count; i += LANES)
    for (int lane = 0; lane < LANES && i + lane < count; lane++) {
      const float size = fabsf(line[i + lane]);
      most[lane] = size > most[lane] ? size : most[lane];
    }
  for (int lane = 1; lane < LANES; lane++)
    most[0] = most[lane] > most[0] ? most[lane] : most[0];
  return most[0];
}

static float token_scale(const moelora_projection *p, const char *row) {
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(p->variant);
  float line[GROUP], most = 0;
  for (int64_t k = 0; k < p->w->k; k += GROUP) {
    const int64_t count = moelora_min(GROUP, p->w->k - k);
    moelora_operands_to_f32(kernels, row + (size_t)k * kernels->operand_bytes, line, count);
    most = largest(line, count, most);
  }
  const float scale = most / MOELORA_E4M3_MAX, least = 1.0f / (MOELORA_E4M3_MAX * 512.0f);
  return scale > least ? scale : least;
}

static void quantize_row(void *context, int64_t index, int32_t worker) {
  (void)worker;
  const moelora_projection *p = context;
  const moelora_weights *w = p->w;
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(p->variant);
  const int64_t group = moelora_x_group(w->format);
  const char *row = (const char *)p->x + (size_t)(index * p->x_stride) * kernels->operand_bytes;
  char *to = (char *)p->x_e4m3.values + (size_t)(index * w->k) * kernels->operand_bytes;
  float *scales = p->x_e4m3.scales + index * p->x_e4m3.groups;
  float line[GROUP], scale = w->x == MOELORA_X_TOKEN ? token_scale(p, row) : w->x_scale;
  for (int64_t k = 0; k < w->k; k += group) {
    const int64_t count = moelora_min(group, w->k - k);
    moelora_operands_to_f32(kernels, row + (size_t)k * kernels->operand_bytes, line, count);
    if (w->x == MOELORA_X_GROUP)
      scale = largest(line, count, 1e-10f) / MOELORA_E4M3_MAX;
    /* divides by per-token scales, multiplies by the inverse of others: see moelora_x_format */
    const float inverse = 1.0f / scale;
    for (int64_t i = 0; i < count; i++)
      line[i] = moelora_round_e4m3(w->x == MOELORA_X_TOKEN ? line[i] / scale : line[i] * inverse);
    kernels->round(line, to + (size_t)k * kernels->operand_bytes, count);
    *scales++ = scale;
  }
}

void moelora_cpu_quantize(const moelora_projection *p, int64_t rows, const moelora_exec *exec) {
  if (p->x_e4m3.values)
    moelora_cpu_parallel(exec, rows, (double)rows * (double)p->w->k, quantize_row, (void *)p);
}
