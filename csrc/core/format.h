/* Tiles of quantised weights: where things lie in one (moelora.h has the layout). */
#ifndef MOELORA_CORE_FORMAT_H
#define MOELORA_CORE_FORMAT_H

#include "moelora.h"

#ifdef __CUDACC__
#define MOELORA_CONSTEXPR __host__ __device__ constexpr
extern "C" {
#elif defined(__cplusplus)
#define MOELORA_CONSTEXPR constexpr
extern "C" {
#else
#define MOELORA_CONSTEXPR inline
#endif

/* Bytes of the 64 x 64 nibbles, which scales and zeros follow. */
enum { MOELORA_TILE_VALUES = 64 * 64 / 2 };

static MOELORA_CONSTEXPR bool moelora_is_int4(moelora_format format) {
  return format >= MOELORA_INT4 && format <= MOELORA_INT4_ZP_G32;
}

static MOELORA_CONSTEXPR bool moelora_has_zeros(moelora_format format) {
  return format == MOELORA_INT4_ZP || format == MOELORA_INT4_ZP_G32;
}

/* Scales of a row of a tile. */
static MOELORA_CONSTEXPR int32_t moelora_tile_groups(moelora_format format) {
  return format == MOELORA_MXFP4 || format == MOELORA_INT4_G32 || format == MOELORA_INT4_ZP_G32 ? 2
                                                                                                : 1;
}

static MOELORA_CONSTEXPR int32_t moelora_scale_bytes(moelora_format format) {
  return format == MOELORA_MXFP4 ? 1 : 2;
}

static MOELORA_CONSTEXPR int32_t moelora_tile_size(moelora_format format) {
  return format == MOELORA_NATIVE ? 0
                                  : MOELORA_TILE_VALUES + 64 * moelora_tile_groups(format) *
                                                              (moelora_scale_bytes(format) +
                                                               (moelora_has_zeros(format) ? 1 : 0));
}

/* Place of row r's scale (and zero) of group g among those of a tile. */
static MOELORA_CONSTEXPR int32_t moelora_scale_index(int32_t groups, int32_t r, int32_t g) {
  return (r / 16 * 8 + r % 8) * 2 * groups + r / 8 % 2 * groups + g;
}

#ifdef __cplusplus
}
#endif

#endif
