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
