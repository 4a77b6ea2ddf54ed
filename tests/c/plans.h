/* Problems for plans, which only read the alignment of addresses. */
#pragma once

#include "core/format.h"
#include "core/plan.h"

static _Alignas(256) char memory[256];

/* Contiguous weights with n rows and K = k; quantized ones in tiles. */
static inline moelora_weights weights_of(moelora_format format, moelora_x_format x,
                                         moelora_row_order order, int64_t n, int64_t k) {
  moelora_weights w = {.data = memory, .n = n, .k = k, .format = format, .x = x};
  if (format == MOELORA_NATIVE) {
    w.stride_e = n * k;
    w.stride_n = k;
    w.stride_nt = MOELORA_PACK * k;
    w.stride_kt = MOELORA_PACK;
    return w;
  }
  w.order = order;
  w.stride_kt = moelora_tile_size(format);
  w.stride_nt = moelora_depth_tiles(format, k) * w.stride_kt;
  w.stride_e = moelora_row_tiles(order, n) * w.stride_nt;
  w.half_tiles = moelora_half_tiles(order, n);
  return w;
}

static inline moelora_weights native_of(int64_t n, int64_t k) {
  return weights_of(MOELORA_NATIVE, MOELORA_X_NATIVE, MOELORA_ROWS_PLAIN, n, k);
}

/* Of adapters, if there are slots for them. */
static inline moelora_routes routes_of(int64_t tokens, int32_t top_k, int32_t experts,
                                       int32_t slots) {
  return (moelora_routes){.num_tokens = tokens,
                          .top_k = top_k,
                          .num_rows = tokens * top_k,
                          .num_experts = experts,
                          .max_loras = slots,
                          .token_lora_mapping = {.data = slots ? memory : NULL}};
}

static inline moelora_factors factors_of(int32_t slices, int32_t rank, int64_t n, int64_t k) {
  moelora_factors f = {.num_slices = slices, .max_rank = rank, .slice_n = n / slices};
  for (int32_t i = 0; i < slices; i++) {
    f.a[i] = (moelora_factor){memory, rank * k, rank * k, k};
    f.b[i] = (moelora_factor){memory, rank * f.slice_n, rank * f.slice_n, rank};
    f.column[i + 1] = f.column[i] + f.slice_n;
  }
  return f;
}

static inline moelora_gemm_problem gemm_of(moelora_routes routes, moelora_weights w) {
  return (moelora_gemm_problem){.routes = routes,
                                .dtype = MOELORA_BF16,
                                .x = memory,
                                .x_stride = w.k,
                                .w = w,
                                .out = memory,
                                .out_stride = {routes.top_k * w.n, w.n}};
}

static inline moelora_experts_problem experts_of(moelora_routes routes, moelora_weights w13,
                                                 moelora_weights w2) {
  return (moelora_experts_problem){.routes = routes,
                                   .dtype = MOELORA_BF16,
                                   .hidden = w2.n,
                                   .intermediate = w2.k,
                                   .x = memory,
                                   .x_stride = w2.n,
                                   .w13 = w13,
                                   .w2 = w2,
                                   .out = memory,
                                   .out_stride = w2.n};
}

/* To n columns, by one slice. */
static inline moelora_delta_problem delta_of(moelora_routes routes, int32_t rank, int64_t n,
                                             int64_t k) {
  return (moelora_delta_problem){.routes = routes,
                                 .dtype = MOELORA_BF16,
                                 .lora = factors_of(1, rank, n, k),
                                 .k = k,
                                 .columns = n,
                                 .x = memory,
                                 .x_stride = k,
                                 .out = memory,
                                 .out_stride = {routes.top_k * n, n}};
}
