/* What the host side of the adapters' delta hands to its kernels. Strides count elements. */
#ifndef MOELORA_CUDA_DELTA_H
#define MOELORA_CUDA_DELTA_H

#include <math.h>

#include "cuda/launch/launch.h"

/* Where rows come from, in which order. */
typedef enum delta_order {
  DELTA_BY_ROUTE, /* flat rows as they are */
  DELTA_GROUPED,  /* flat rows, by expert, then adapter within each window */
  DELTA_SORTED,   /* by expert, then adapter */
  DELTA_LISTED,   /* by the caller's lists */
} delta_order;

/* Pairs that the smallest window, of 256 rows, has bins for, and one behind them. */
#define DELTA_MAX_GROUPS (6 * 256 - 1)

/* Rows of an expert from which on segments are listed: 32 of each of eight adapters. */
#define DELTA_LONG_ROWS 256

/* Routed rows and what each of them carries. Kernels go over windows of `window` rows in this
 * order; a list is cut into windows block by block, so that each of these knows one pair. */
typedef struct delta_rows {
  delta_order order;
  int32_t window;
  int32_t max_rank;
  moelora_routes routes; /* resolved */
  moelora_list_blocks lists;
  /* DELTA_SORTED; `count` of P entries are rows */
  const int32_t *row, *expert, *adapter; /* [P]; adapter -1: none */
  const int32_t *count;                  /* [1] */
  const moelora_segment *segments;       /* as in moelora_blocks; NULL: not listed, too short */
} delta_rows;

/* Where a sort puts them, and its scratch memory. */
typedef struct delta_sorted {
  int32_t *row, *expert, *adapter, *count;
  moelora_segment *segments;
  void *scratch;
} delta_sorted;

/* xa[p, slice] = round(s x[p / x_divisor] A[l, e]^T), zero from the true rank to max_rank. */
typedef struct delta_shrink {
  delta_rows rows;
  const void *x; /* [P / x_divisor, k] */
  int64_t x_stride;
  int32_t x_divisor;
  int32_t k;
  moelora_factors lora;
  const float *scalings; /* [max_loras]; NULL: 1 */
  bool vectors;          /* x and A allow 16-byte accesses */
  bool xa_vectors;       /* xa allows 16-byte accesses */
  bool hopper;           /* kernels of sm_90 may be used */
  bool exact; /* xa is the caller's, else it has room for 16 ranks at a time, and what lies
               * behind a true rank is never read */
  void *xa;
  int64_t xa_stride[3]; /* slice, token, choice */
} delta_shrink;

/* z[p] = xa[p, slice] B[l, e]^T in columns slice * slice_n on; then silu, weight and sum. */
typedef struct delta_expand {
  delta_rows rows;
  const void *xa;
  int64_t xa_stride[3]; /* slice, token, choice */
  moelora_factors lora;
  bool silu_and_mul;
  const float *topk_weights; /* NULL: rows are not weighted */
  bool add;                  /* out += z */
  bool f32;                  /* out is float32 */
  bool vectors;              /* xa, B and out allow 16-byte accesses */
  void *out;
  int64_t out_stride[2]; /* token, choice */
  uint8_t *written;      /* [P], set to 1 for rows that are; NULL: not wanted */
  bool after_shrink;     /* queued right behind the shrink of the same rows: all but xa is there */
} delta_expand;

/* Pairs that the rows make on average if each is as likely to carry any of `adapters` as to go to
 * any expert. */
static inline double delta_expected_pairs(const moelora_routes *routes, int32_t adapters) {
  const double pool = (double)routes->num_experts * adapters;
  return pool > 0 ? pool * (1.0 - exp(-(double)routes->num_rows / pool)) : 0.0;
}

/* What lies idle of the slots is not known here, and more adapters are rarely in one batch. */
enum { DELTA_ADAPTERS = 8 };

static inline int32_t delta_likely_adapters(const moelora_routes *routes) {
  return routes->max_loras < DELTA_ADAPTERS ? routes->max_loras : DELTA_ADAPTERS;
}

/* Cuts the rows into windows of at most `most` rows for `groups` workers, each as many rows as the
 * others. Returns an upper bound of the number of windows and, in `shares`, how many workers take a
 * window together: no more than it has items, which are `part` rows of a segment in `columns`. */
static inline int64_t delta_set_window(delta_rows *r, int64_t most, int64_t part, int64_t columns,
                                       int64_t groups, int32_t *shares) {
  const int64_t rows = r->routes.num_rows;
  int64_t windows, used, items;
  *shares = r->window = 1;
  if (rows == 0)
    return 0;
  if (r->order == DELTA_LISTED) {
    const int64_t size = r->lists.block_size, per_block = (size + most - 1) / most;
    const int64_t pairs = (int64_t)r->routes.num_experts * r->routes.max_loras;
    r->window = (int32_t)((size + per_block - 1) / per_block);
    windows = r->lists.num_active * r->lists.blocks * per_block;
    used = (rows < pairs ? rows : pairs) + rows / r->window;
    items = (r->window + part - 1) / part * columns; // all of a block are of one pair
  } else {
    windows = (rows + most - 1) / most;
    if (rows > most * groups)
      windows = (windows + groups - 1) / groups * groups;
    else if (windows < groups / (most * groups / rows))
      windows = groups / (most * groups / rows);
    r->window = (int32_t)((rows + windows - 1) / windows);
    used = windows = (rows + r->window - 1) / r->window;
    items = r->window * columns;
  }
  const int64_t each = groups > used ? groups / used : 1;
  *shares = (int32_t)(each < items ? each : items);
  return windows;
}

#ifdef __cplusplus
extern "C" {
#endif

/* delta.cu: rows by expert, then adapter, in the form of DELTA_SORTED. */
delta_sorted delta_take_sorted(const moelora_routes *routes, moelora_arena *arena);
moelora_status delta_sort(const moelora_routes *routes, const delta_sorted *sorted,
                          const moelora_exec *exec);
/* delta_shrink.cu, delta_expand.cu; both choose the window of `rows`. */
moelora_status delta_launch_shrink(const delta_shrink *shrink, moelora_dtype dtype,
                                   const moelora_exec *exec);
moelora_status delta_launch_expand(const delta_expand *expand, moelora_dtype dtype,
                                   const moelora_exec *exec);
/* delta_expand_thin.cu: for short segments, and whether it takes an expand. */
bool delta_fits_thin_expand(const delta_expand *expand);
moelora_status delta_launch_thin_expand(const delta_expand *expand, moelora_dtype dtype,
                                        const moelora_exec *exec);
/* delta_thin.cu: both halves of few rows in one launch that keeps x A^T on the chip, and whether it
 * takes them. */
bool delta_fits_thin(const delta_shrink *shrink, const delta_expand *expand,
                     const moelora_exec *exec);
moelora_status delta_launch_thin(const delta_shrink *shrink, const delta_expand *expand,
                                 moelora_dtype dtype, const moelora_exec *exec);
/* delta_mlp.cu: an adapter MLP in one launch, for batches so small that launches are what they
 * cost. */
bool delta_mlp_fits(const moelora_mlp_delta_problem *problem, const moelora_exec *exec);
moelora_status delta_launch_mlp(const moelora_mlp_delta_problem *problem, const moelora_exec *exec);

#ifdef __cplusplus
}
#endif
#endif
