/* Interfaces between the files of the CPU backend. */
#pragma once

#include "core/backend.h"
#include "cpu/kernels.h"
#include "cpu/sort.h"

static inline int64_t moelora_min(int64_t a, int64_t b) {
  return a < b ? a : b;
}
static inline int64_t moelora_max(int64_t a, int64_t b) {
  return a > b ? a : b;
}
/* No BLOCK_N of variants.inc exceeds this. */
#define MOELORA_CPU_MAX_BLOCK_N 256

/* isa.c: returns the bits of moelora_isa that this machine supports. */
uint32_t moelora_cpu_isa(void);

/* parallel.c: runs task(context, i, worker) for every i in [0, count), scheduled dynamically.
 * `worker` is in [0, moelora_workers(exec)) and identifies the scratch memory of the task.
 * `elements`, roughly the number of elements that all tasks read, limits the number of threads. */
typedef void (*moelora_cpu_task)(void *context, int64_t index, int32_t worker);
void moelora_cpu_parallel(const moelora_exec *exec, int64_t count, double elements,
                          moelora_cpu_task task, void *context);

/* tile.c: scratch memory of one worker. */
typedef struct moelora_scratch {
  const void **x;         /* [block_m] operand rows of a tile */
  const void **x_pass;    /* [block_m] the same rows, from the current pass over K on */
  const float **x_scales; /* [block_m] scales of e4m3 rows, per K group */
  float *c;               /* [block_m, block_n] accumulators */
  float *line;            /* [block_n] one output row */
  char *w;                /* [MOELORA_DOT_N or MOELORA_MATRIX_ROWS, block_k] weight operands */
  char *panels;           /* [block_m, block_k] panels of x of a pass; NULL: no matrix registers */
} moelora_scratch;

moelora_scratch *moelora_scratch_take(const moelora_variant *variant, const moelora_exec *exec,
                                      moelora_arena *arena);

static inline const char *moelora_row_at(const moelora_weights *w, moelora_dtype dtype, int64_t n) {
  int64_t at = w->packed ? n / MOELORA_PACK * w->stride_nt + n % MOELORA_PACK * w->stride_n
                         : n * w->stride_n;
  return (const char *)w->data + (size_t)at * moelora_dtype_bytes(dtype);
}

/* Returns the factor of sorted row `at` as an n by k matrix. */
static inline moelora_weights moelora_factor_matrix(const moelora_variant *variant,
                                                    const moelora_factor *factor,
                                                    const moelora_sorted *sorted, int64_t at,
                                                    int64_t n, int64_t k) {
  const int64_t from =
      sorted->adapter[at] * factor->stride_l + sorted->expert[at] * factor->stride_e;
  return (moelora_weights){
      .data = (const char *)factor->data + (size_t)from * moelora_dtype_bytes(variant->dtype),
      .n = n,
      .k = k,
      .stride_n = factor->stride_i,
  };
}

/* tile.c: c[i * ldc + n - begin] += x[i] . w[n] over k, for i < m <= block_m and n in [begin, end).
 * `w` is not quantized, for instance a factor; the rows of x are scratch->x. `next`: the first of
 * MOELORA_DOT_N rows, laid out as in w, to prefetch for this worker's next tile, or NULL. */
void moelora_cpu_tile(const moelora_variant *variant, const moelora_weights *w, int64_t begin,
                      int64_t end, int64_t m, const void *next, float *c, int64_t ldc,
                      moelora_scratch *scratch);

/* Weight rows [begin, end), whose products are columns [at, at + end - begin) of a tile. */
typedef struct moelora_columns_of {
  int64_t begin, end, at;
} moelora_columns_of;

/* tile.c: adds to c the products of x and one or two ranges of rows of one expert's weights, which
 * are not quantized. With matrix registers, the caller must be between enter() and leave(). */
void moelora_cpu_weights_tile(const moelora_variant *variant, const moelora_weights *w,
                              const moelora_columns_of *ranges, int num_ranges, int64_t m, float *c,
                              int64_t ldc, moelora_scratch *scratch);
/* tile.c: begins a pass over `depth` elements of K from k on: fills scratch->x_pass, and
 * scratch->panels if there are matrix registers. */
void moelora_cpu_begin_pass(const moelora_variant *variant, int64_t k, int64_t depth, int64_t m,
                            moelora_scratch *scratch);
/* Returns the bytes of a panel of `depth` elements of K. */
static inline int64_t moelora_panel_bytes(int64_t depth) {
  return moelora_divide_up(depth, MOELORA_MATRIX_STEP) * MOELORA_PANEL_STEP;
}

/* quantized.c: does the same as moelora_cpu_weights_tile() for quantized weights. If x is e4m3,
 * scratch->x has its rows, and scratch->x_scales their scales. */
void moelora_cpu_quantized_tile(const moelora_variant *variant, const moelora_weights *w,
                                const moelora_columns_of *ranges, int num_ranges, int64_t m,
                                float *c, int64_t ldc, moelora_scratch *scratch);

/* quantized.c: dequantizes the 128 columns of row r of an FP8 tile to operands, rounded to the
 * dtype. */
void moelora_cpu_fp8_row(const moelora_cpu_kernels *kernels, const moelora_weights *w,
                         moelora_dtype dtype, const char *tile, int64_t r, void *to);

static inline moelora_weights moelora_expert_weights(const moelora_weights *w, moelora_dtype dtype,
                                                     int64_t expert) {
  moelora_weights one = *w;
  const size_t unit = moelora_is_quantized(w->format) ? 1 : moelora_dtype_bytes(dtype);
  one.data = (const char *)w->data + (size_t)(expert * w->stride_e) * unit;
  return one;
}

/* quantize.c: rows of x, quantized to e4m3 as the moelora_x_format of the weights defines. */
typedef struct moelora_quantized_rows {
  void *values;   /* [rows, K] operands; NULL: x is not quantized */
  float *scales;  /* [rows, groups] */
  int64_t groups; /* number of K groups */
} moelora_quantized_rows;

moelora_quantized_rows moelora_quantized_rows_take(const moelora_variant *variant,
                                                   const moelora_weights *w, int64_t rows,
                                                   moelora_arena *arena);

/* gemm.c: one grouped projection over sorted rows. */
typedef enum moelora_row_index {
  MOELORA_BY_TOKEN,  /* x[p / top_k] */
  MOELORA_BY_ROW,    /* x[p] */
  MOELORA_BY_SORTED, /* x[position] */
} moelora_row_index;

typedef struct moelora_projection moelora_projection;
struct moelora_projection {
  const moelora_variant *variant;
  const moelora_routes *routes;
  const moelora_sorted *sorted;
  moelora_scratch *scratch; /* [workers] */
  const void *x;            /* operand rows of w->k values */
  int64_t x_stride;
  moelora_row_index x_index;
  const moelora_weights *w;
  moelora_quantized_rows x_e4m3; /* x quantized for w; values NULL: not quantized */
  const moelora_factors *lora;
  void *xa; /* [P, num_slices, R] operands by sorted position; NULL: no adapters */
  /* gated: an output column is computed from a column of gate and one of up. */
  bool gated, interleaved, activated;
  int64_t first_column, columns; /* output columns to compute; columns == 0: all */
  moelora_activation_problem activation;
  void *before; /* [P, w->n] by flat row in the dtype, before the activation; NULL: not saved */
  int64_t before_stride;
  /* Receives the finished float32 columns [begin, begin + count) of sorted row `at`. */
  void (*emit)(const moelora_projection *projection, int64_t at, int64_t begin, int64_t count,
               const float *values);
  void *out;
  int64_t out_stride[2];
  bool mul_routed_weight, add; /* used by moelora_cpu_emit_out */
};

void moelora_cpu_project(const moelora_projection *projection, const moelora_exec *exec);

/* tile.c: stores pointers to rows of x for adapters, for sorted rows [first, first + m). */
void moelora_cpu_rows(const moelora_projection *projection, int64_t first, int64_t m,
                      const void **x);
/* tile.c: the same for the rows of x that w multiplies, in scratch->x; if x is e4m3, also stores
 * pointers to their scales in scratch->x_scales. */
void moelora_cpu_base_rows(const moelora_projection *projection, int64_t first, int64_t m,
                           moelora_scratch *scratch);

static inline int64_t moelora_rows_of_x(const moelora_routes *routes, bool x_per_row) {
  return x_per_row ? routes->num_rows : routes->num_tokens;
}

static inline void *moelora_take_operands(const moelora_variant *variant, int64_t rows, int64_t k,
                                          moelora_arena *arena) {
  return moelora_take_array(arena, moelora_times((size_t)rows, (size_t)k),
                            moelora_cpu_kernels_of(variant)->operand_bytes);
}

/* gemm.c: converts `rows` rows of p->x to operands in `out`, which becomes p->x. Unless weight is
 * NULL, row i is multiplied by weight[i] first. Does nothing if `out` is NULL. */
void moelora_cpu_operands(moelora_projection *p, int64_t rows, const float *weight, void *out,
                          const moelora_exec *exec);

/* Returns the output of routed row `row`, from `column` on. */
static inline char *moelora_cpu_out(const moelora_projection *p, int64_t row, int64_t column) {
  const int32_t top_k = p->routes->top_k;
  int64_t at = row / top_k * p->out_stride[0] + row % top_k * p->out_stride[1] + column;
  return (char *)p->out + (size_t)at * moelora_dtype_bytes(p->variant->dtype);
}

/* combine.c: implementations of `emit`. They write, in this order,
 *   operands by sorted position,
 *   float32 by flat row, with first_column as the first column of a row,
 *   the caller's output: out = (or +=) values, times routing weights with mul_routed_weight. */
void moelora_cpu_emit_operands(const moelora_projection *projection, int64_t at, int64_t begin,
                               int64_t count, const float *values);
void moelora_cpu_emit_f32(const moelora_projection *projection, int64_t at, int64_t begin,
                          int64_t count, const float *values);
void moelora_cpu_emit_out(const moelora_projection *projection, int64_t at, int64_t begin,
                          int64_t count, const float *values);

/* combine.c: out[m] = (or +=) sum over j of weight * z[p], in float32, rounded once. */
typedef struct moelora_combine {
  const moelora_variant *variant;
  const moelora_routes *routes;
  const moelora_tables *tables;
  const float *z; /* [P, columns] */
  int64_t columns;
  /* [P] whether a row is summed; tokens without such rows are left unchanged. NULL: rows with an
   * expert are summed, and every token is written */
  const uint8_t *active;
  bool weighted, add;
  void *out; /* [M, columns] */
  int64_t out_stride;
} moelora_combine;

void moelora_cpu_combine(const moelora_combine *combine, const moelora_exec *exec);

/* quantize.c: quantizes the operand rows of x; does nothing if x_e4m3.values is NULL. */
void moelora_cpu_quantize(const moelora_projection *projection, int64_t rows,
                          const moelora_exec *exec);

/* lora.c */
void *moelora_take_xa(const moelora_variant *variant, const moelora_routes *routes,
                      const moelora_factors *lora, moelora_arena *arena);
/* Computes projection->xa = rounded(s * x A^T) for every row with an adapter. */
void moelora_cpu_shrink(const moelora_projection *projection, const moelora_exec *exec);
/* Prefetches into L2 the rows of B that moelora_cpu_expand will read. */
void moelora_cpu_expand_ahead(const moelora_projection *projection, int64_t first, int64_t m,
                              int64_t begin, int64_t end);
/* Computes c += xa B^T for sorted rows [first, first + m) of one expert, columns [begin, end). */
void moelora_cpu_expand(const moelora_projection *projection, int64_t first, int64_t m,
                        int64_t begin, int64_t end, float *c, int64_t ldc,
                        moelora_scratch *scratch);

/* round_factors.c: fills the copies `to` of float32 factors, which moelora_rounded() allocated. */
void moelora_cpu_round_factors(const moelora_variant *variant, const moelora_routes *routes,
                               const moelora_factors *from, const moelora_factors *to,
                               const moelora_exec *exec);

/* Functions of the backend's table. */
#define OPERATOR(NAME, ...) moelora_##NAME##_function moelora_cpu_##NAME;
#define CONVERSION(NAME, ...) OPERATOR(NAME)
#include "core/operators.inc"
