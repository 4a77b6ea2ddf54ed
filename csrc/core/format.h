/* Properties of weight formats, derived from formats.inc, and the layout of their tiles (see
 * moelora.h). Other files use these functions, or FormatTraits in cuda/gemm/common/format.cuh,
 * instead of comparing formats. */
#pragma once

#include "moelora.h"

#ifdef __CUDACC__
#define MOELORA_CONSTEXPR __host__ __device__ constexpr
#elif defined(__cplusplus)
#define MOELORA_CONSTEXPR constexpr
#else
#define MOELORA_CONSTEXPR inline
#endif

MOELORA_BEGIN_C

/* ---- columns of formats.inc ---- */

/* Type of a weight's values. */
typedef enum moelora_values {
  MOELORA_VALUES_NATIVE, /* the dtype of x */
  MOELORA_VALUES_E4M3,
  MOELORA_VALUES_EIGHT_BITS = MOELORA_VALUES_E4M3, /* four-bit types follow */
#define MOELORA_CODES(VALUES, ...) MOELORA_VALUES_##VALUES,
#include "formats.inc"
} moelora_values;

/* Representation of a scale in a tile. */
typedef enum moelora_scale {
  MOELORA_SCALE_NONE,
  MOELORA_SCALE_E8M0,    /* one byte, an exponent */
  MOELORA_SCALE_E4M3,    /* one byte; the tile also has a float32 scale */
  MOELORA_SCALE_X_DTYPE, /* two bytes, the dtype of x */
  MOELORA_SCALE_F32,     /* four bytes */
} moelora_scale;

/* Weight format of CUDA kernels: one moelora_format, or several that differ in the layout of
 * scales, in zero points, or in the numbers of looked-up codes; and whether x is 16-bit or e4m3. */
typedef enum moelora_kernel_format {
  MOELORA_KERNEL_NONE = -1,
#define MOELORA_KERNEL(NAME, TEXT, FORMAT) MOELORA_KERNEL_##NAME,
#include "formats.inc"
} moelora_kernel_format;

/* Number of formats. */
enum {
  MOELORA_FORMATS = 0
#define MOELORA_FORMAT_OF(...) +1
#include "formats.inc"
};

static MOELORA_CONSTEXPR moelora_values moelora_values_of(moelora_format format) {
  return
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ...)                                         \
  format == MOELORA_##NAME ? MOELORA_VALUES_##VALUES:
#include "formats.inc"
      MOELORA_VALUES_NATIVE;
}

/* Appends "|| format is NAME" if the constant CONDITION holds, else "|| false". */
#define MOELORA_WHERE(CONDITION, NAME) || ((CONDITION) && format == MOELORA_##NAME)

static MOELORA_CONSTEXPR bool moelora_is_int4(moelora_format format) {
  return moelora_values_of(format) == MOELORA_VALUES_U4;
}

/* Whether CUDA kernels look up the numbers of 4-bit codes in a table. */
static MOELORA_CONSTEXPR bool moelora_is_looked_up(moelora_values values) {
  return values > MOELORA_VALUES_U4;
}

static MOELORA_CONSTEXPR bool moelora_is_fp8(moelora_format format) {
  return moelora_values_of(format) == MOELORA_VALUES_E4M3;
}

static MOELORA_CONSTEXPR bool moelora_is_four_bits(moelora_format format) {
  return moelora_values_of(format) > MOELORA_VALUES_EIGHT_BITS;
}

/* Whether scales are one-byte exponents. */
static MOELORA_CONSTEXPR bool moelora_has_e8m0_scales(moelora_format format) {
  return false
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ROWS, COLUMNS, SCALE, ...)                   \
  MOELORA_WHERE(MOELORA_SCALE_##SCALE == MOELORA_SCALE_E8M0, NAME)
#include "formats.inc"
      ;
}

/* Whether scales are e4m3, one byte each, with an additional float32 scale per tile. */
static MOELORA_CONSTEXPR bool moelora_has_tile_scale(moelora_format format) {
  return false
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ROWS, COLUMNS, SCALE, ...)                   \
  MOELORA_WHERE(MOELORA_SCALE_##SCALE == MOELORA_SCALE_E4M3, NAME)
#include "formats.inc"
      ;
}

/* 4-bit formats: whether scales are float32. */
static MOELORA_CONSTEXPR bool moelora_has_f32_scales(moelora_format format) {
  return false
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ROWS, COLUMNS, SCALE, ...)                   \
  MOELORA_WHERE(MOELORA_SCALE_##SCALE == MOELORA_SCALE_F32 &&                                      \
                    MOELORA_VALUES_##VALUES != MOELORA_VALUES_E4M3,                                \
                NAME)
#include "formats.inc"
      ;
}

static MOELORA_CONSTEXPR bool moelora_has_zeros(moelora_format format) {
  return false
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ROWS, COLUMNS, SCALE, ZEROS, ...)            \
  MOELORA_WHERE(ZEROS, NAME)
#include "formats.inc"
      ;
}

/* Whether 32 columns share a scale. */
static MOELORA_CONSTEXPR bool moelora_has_groups_of_32(moelora_format format) {
  return false
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ROWS, COLUMNS, ...)                          \
  MOELORA_WHERE((COLUMNS) == 32, NAME)
#include "formats.inc"
      ;
}

static MOELORA_CONSTEXPR bool moelora_has_groups_of_16(moelora_format format) {
  return false
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ROWS, COLUMNS, ...)                          \
  MOELORA_WHERE((COLUMNS) == 16, NAME)
#include "formats.inc"
      ;
}

/* FP8: whether each row of a tile has its own scale. */
static MOELORA_CONSTEXPR bool moelora_has_row_scales(moelora_format format) {
  return false
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ROWS, ...)                                   \
  MOELORA_WHERE(MOELORA_VALUES_##VALUES == MOELORA_VALUES_E4M3 && (ROWS) == 1, NAME)
#include "formats.inc"
      ;
}

static MOELORA_CONSTEXPR bool moelora_is_format(int64_t number) {
  return number >= 0 && number < MOELORA_FORMATS;
}

static MOELORA_CONSTEXPR bool moelora_is_quantized(moelora_format format) {
  return format != MOELORA_NATIVE;
}

/* ---- kernel formats ---- */

/* Returns the kernel format for a weight format and a format of x. */
static MOELORA_CONSTEXPR moelora_kernel_format moelora_kernel_format_of(moelora_format format,
                                                                        moelora_x_format x) {
  return
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ROWS, COLUMNS, SCALE, ZEROS, X_KERNEL)       \
  format == MOELORA_##NAME                                                                         \
      ? (x == MOELORA_X_NATIVE ? MOELORA_KERNEL_##KERNEL : MOELORA_KERNEL_##X_KERNEL)              \
      :
#include "formats.inc"
      MOELORA_KERNEL_NONE;
}

/* Whether there are kernels that multiply the format by e4m3 x. */
static MOELORA_CONSTEXPR bool moelora_takes_e4m3(moelora_format format) {
  return moelora_kernel_format_of(format, MOELORA_X_TOKEN) != MOELORA_KERNEL_NONE;
}

/* Returns the first weight format of a kernel format; all of them have values of the same width. */
static MOELORA_CONSTEXPR moelora_format moelora_format_of_kernel(moelora_kernel_format kernel) {
  return
#define MOELORA_KERNEL(NAME, TEXT, FORMAT) kernel == MOELORA_KERNEL_##NAME ? MOELORA_##FORMAT:
#include "formats.inc"
      MOELORA_NATIVE;
}

/* Returns the number of weight formats that the kernels of a kernel format support. */
static MOELORA_CONSTEXPR int32_t moelora_formats_of(moelora_kernel_format kernel) {
  return 0
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ROWS, COLUMNS, SCALE, ZEROS, X_KERNEL)       \
  +(kernel == MOELORA_KERNEL_##KERNEL || kernel == MOELORA_KERNEL_##X_KERNEL)
#include "formats.inc"
      ;
}

/* Whether any weight format of a kernel format has zero points. */
static MOELORA_CONSTEXPR bool moelora_kernel_has_zeros(moelora_kernel_format kernel) {
  return false
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ROWS, COLUMNS, SCALE, ZEROS, X_KERNEL)       \
  || ((ZEROS) && kernel == MOELORA_KERNEL_##KERNEL)
#include "formats.inc"
      ;
}

static MOELORA_CONSTEXPR bool moelora_is_native_kernel(moelora_kernel_format kernel) {
  return kernel == MOELORA_KERNEL_NATIVE;
}

/* Whether x is e4m3. */
static MOELORA_CONSTEXPR bool moelora_is_e4m3_kernel(moelora_kernel_format kernel) {
  return kernel != MOELORA_KERNEL_NONE &&
         kernel != moelora_kernel_format_of(moelora_format_of_kernel(kernel), MOELORA_X_NATIVE);
}

/* Whether kernels dequantize the weights to the dtype of x. */
static MOELORA_CONSTEXPR bool moelora_is_dequantized_kernel(moelora_kernel_format kernel) {
  return moelora_is_quantized(moelora_format_of_kernel(kernel)) && !moelora_is_e4m3_kernel(kernel);
}

/* ---- tiles ---- */

/* Bytes of the values of a tile, 64 x 64 nibbles or 64 x 128 e4m3; scales and zeros follow. */
enum { MOELORA_TILE_VALUES = 64 * 64 / 2, MOELORA_FP8_TILE_VALUES = 64 * 128 };

/* Bytes of the scale of a tile, with padding. */
enum { MOELORA_TILE_SCALE_BYTES = 16 };

/* Returns the K extent of a tile. */
static MOELORA_CONSTEXPR int32_t moelora_tile_depth(moelora_format format) {
  return moelora_is_fp8(format) ? 128 : 64;
}

static MOELORA_CONSTEXPR int64_t moelora_depth_tiles(moelora_format format, int64_t k) {
  return (k + moelora_tile_depth(format) - 1) / moelora_tile_depth(format);
}

/* Returns the columns per scale of e4m3 x; a scale of the weights covers at least as many. */
static MOELORA_CONSTEXPR int32_t moelora_x_group(moelora_format format) {
  return false
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ROWS, COLUMNS, ...)                          \
  MOELORA_WHERE(MOELORA_VALUES_##VALUES == MOELORA_VALUES_E4M3 && (COLUMNS) == 64, NAME)
#include "formats.inc"
             ? 64
             : 128;
}

/* Exponent d: forward CUDA kernels keep accumulators scaled by 2^-d until the epilogue. For bf16,
 * the scales of INT4 nibbles and of looked-up codes would otherwise overflow. */
static MOELORA_CONSTEXPR int32_t moelora_deferred_exponent(moelora_format format, bool is_bf16) {
  return is_bf16 && moelora_values_of(format) >= MOELORA_VALUES_U4 ? 24 : 0;
}

/* Exponent d: CUDA kernels multiply the scale of a tile by 2^d. */
static MOELORA_CONSTEXPR int32_t moelora_tile_scale_exponent(bool is_bf16) {
  return is_bf16 ? 8 : 7;
}

/* Returns the offset of (row r, column c) in the values of an FP8 tile. */
static MOELORA_CONSTEXPR int32_t moelora_fp8_offset(int32_t r, int32_t c) {
  return r * 128 + ((c / 16) ^ (r & 7)) * 16 + c % 8 / 2 * 4 + c % 2 + c % 16 / 8 * 2;
}

/* Returns the number of scales per row of a 4-bit tile. */
static MOELORA_CONSTEXPR int32_t moelora_tile_groups(moelora_format format) {
  return 1 + moelora_has_groups_of_32(format) + 3 * moelora_has_groups_of_16(format);
}

static MOELORA_CONSTEXPR int32_t moelora_scale_bytes(moelora_format format) {
  return moelora_has_e8m0_scales(format) || moelora_has_tile_scale(format) ? 1
         : moelora_has_f32_scales(format)                                  ? 4
                                                                           : 2;
}

/* Offset of the scale of a whole 4-bit tile, if it has one: it follows values, scales and zeros. */
static MOELORA_CONSTEXPR int32_t moelora_tile_scale_offset(moelora_format format) {
  return MOELORA_TILE_VALUES +
         64 * moelora_tile_groups(format) *
             (moelora_scale_bytes(format) + (moelora_has_zeros(format) ? 1 : 0));
}

/* Returns the bytes of the scales of an FP8 tile: 64 (of rows) or 4 (two in use). */
static MOELORA_CONSTEXPR int32_t moelora_fp8_scale_bytes(moelora_format format) {
  return (moelora_has_row_scales(format) ? 64 : 4) * 4;
}

/* Returns the bytes of an FP8 tile: values, scales, and zeros that align the next tile to 128
 * bytes. Bulk copies from other addresses are slower. */
static MOELORA_CONSTEXPR int32_t moelora_fp8_tile_size(moelora_format format) {
  return MOELORA_FP8_TILE_VALUES + (moelora_fp8_scale_bytes(format) + 127) / 128 * 128;
}

static MOELORA_CONSTEXPR int32_t moelora_tile_size(moelora_format format) {
  return !moelora_is_quantized(format) ? 0
         : moelora_is_fp8(format)
             ? moelora_fp8_tile_size(format)
             : moelora_tile_scale_offset(format) +
                   (moelora_has_tile_scale(format) ? MOELORA_TILE_SCALE_BYTES : 0);
}

/* Returns the offset of the 64 bytes that rows r and r + 8 of a 4-bit tile share, r / 8 even. */
static MOELORA_CONSTEXPR int32_t moelora_words_offset(int32_t r) {
  return (r / 16 * 8 + r % 8) * 64;
}

/* Returns the maximum size of a tile among the formats of a kernel. */
static MOELORA_CONSTEXPR int32_t moelora_max_tile_bytes(moelora_kernel_format kernel) {
  int32_t most = 0;
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ROWS, COLUMNS, SCALE, ZEROS, X_KERNEL)       \
  if ((kernel == MOELORA_KERNEL_##KERNEL || kernel == MOELORA_KERNEL_##X_KERNEL) &&                \
      moelora_tile_size(MOELORA_##NAME) > most)                                                    \
    most = moelora_tile_size(MOELORA_##NAME);
#include "formats.inc"
  return most;
}

/* Bytes of a tile in a stage of the portable kernels: 64 columns of values, and all scales. */
static MOELORA_CONSTEXPR int32_t moelora_step_bytes(moelora_kernel_format kernel) {
  const int32_t most = moelora_max_tile_bytes(kernel);
  return moelora_is_fp8(moelora_format_of_kernel(kernel)) ? most - MOELORA_FP8_TILE_VALUES / 2
                                                          : most;
}

/* Returns the index of the scale and zero of row r and group g in a 4-bit tile. */
static MOELORA_CONSTEXPR int32_t moelora_scale_index(int32_t groups, int32_t r, int32_t g) {
  return (r / 16 * 8 + r % 8) * 2 * groups + r / 8 % 2 * groups + g;
}

/* Converts a non-negative e4m3 scale to the representation of tiles: a five-bit exponent with bias
 * 22 and a three-bit mantissa, without subnormals other than 0. */
static MOELORA_CONSTEXPR uint8_t moelora_e5m3_of_e4m3(uint8_t scale) {
  return (uint8_t)(scale >= 8   ? scale + 120
                   : scale >= 4 ? 120 + (scale - 4) * 2
                   : scale >= 2 ? 112 + (scale - 2) * 4
                   : scale      ? 104
                                : 0);
}

/* Reorders four e2m1 nibbles in each half of a word to the bit order of tiles (moelora.h). */
static MOELORA_CONSTEXPR uint32_t moelora_spread_e2m1(uint32_t nibbles) {
  return (nibbles << 12 & 0x80008000u) | (nibbles << 6 & 0x01c001c0u) |
         (nibbles << 5 & 0x10001000u) | (nibbles >> 1 & 0x00380038u) |
         (nibbles >> 2 & 0x22002200u) | (nibbles >> 8 & 0x00070007u) |
         (nibbles >> 3 & 0x0c000c00u) | (nibbles << 2 & 0x40004000u);
}

/* The inverse of moelora_spread_e2m1(), for a word or a vector of words. */
#define MOELORA_GATHER_E2M1(word)                                                                  \
  (((word) >> 12 & 0x00080008u) | ((word) >> 6 & 0x00070007u) | ((word) >> 5 & 0x00800080u) |      \
   ((word) << 1 & 0x00700070u) | ((word) << 2 & 0x88008800u) | ((word) << 8 & 0x07000700u) |       \
   ((word) << 3 & 0x60006000u) | ((word) >> 2 & 0x10001000u))

/* Reorders codes that kernels look up: the nibbles of both halves of a word alternate. */
static MOELORA_CONSTEXPR uint32_t moelora_spread_codes(uint32_t nibbles) {
  return (nibbles & 0xf000000fu) | (nibbles << 4 & 0x00000f00u) | (nibbles << 8 & 0x000f0000u) |
         (nibbles << 12 & 0x0f000000u) | (nibbles >> 12 & 0x000000f0u) |
         (nibbles >> 8 & 0x0000f000u) | (nibbles >> 4 & 0x00f00000u);
}
#define MOELORA_GATHER_CODES(word)                                                                 \
  (((word) & 0xf000000fu) | ((word) >> 4 & 0x000000f0u) | ((word) >> 8 & 0x00000f00u) |            \
   ((word) >> 12 & 0x0000f000u) | ((word) << 12 & 0x000f0000u) | ((word) << 8 & 0x00f00000u) |     \
   ((word) << 4 & 0x0f000000u))

/* Reorders four nibbles in each half of a word to the order of tiles; inverse: MOELORA_GATHER. */
static MOELORA_CONSTEXPR uint32_t moelora_spread(moelora_values values, uint32_t nibbles) {
  return values == MOELORA_VALUES_E2M1  ? moelora_spread_e2m1(nibbles)
         : moelora_is_looked_up(values) ? moelora_spread_codes(nibbles)
                                        : nibbles;
}
#define MOELORA_GATHER(format, word)                                                               \
  (moelora_values_of(format) == MOELORA_VALUES_E2M1  ? MOELORA_GATHER_E2M1(word)                   \
   : moelora_is_looked_up(moelora_values_of(format)) ? MOELORA_GATHER_CODES(word)                  \
                                                     : (word))

/* Returns the number of tiles of gate rows, which precede as many of up rows; 0 for PLAIN. */
static MOELORA_CONSTEXPR int64_t moelora_half_tiles(moelora_row_order order, int64_t rows) {
  return order == MOELORA_ROWS_PLAIN ? 0 : (rows / 2 + MOELORA_PACK - 1) / MOELORA_PACK;
}

/* Returns the number of row tiles for `rows` rows; even except for PLAIN order. */
static MOELORA_CONSTEXPR int64_t moelora_row_tiles(moelora_row_order order, int64_t rows) {
  return order == MOELORA_ROWS_PLAIN ? (rows + MOELORA_PACK - 1) / MOELORA_PACK
                                     : 2 * moelora_half_tiles(order, rows);
}

/* Returns the row of the weight that row `at` of the tiles holds; -1: padding. */
static MOELORA_CONSTEXPR int64_t moelora_row_of_tile(moelora_row_order order, int64_t rows,
                                                     int64_t at) {
  const int64_t half_rows = moelora_half_tiles(order, rows) * MOELORA_PACK;
  if (order == MOELORA_ROWS_PLAIN)
    return at < rows ? at : -1;
  const int64_t up = at >= half_rows ? 1 : 0, i = at - up * half_rows;
  if (i >= rows / 2)
    return -1;
  return order == MOELORA_ROWS_INTERLEAVED ? 2 * i + up : up * (rows / 2) + i;
}

/* Returns the row of the tiles that holds row n of the weight; the inverse of the above. */
static MOELORA_CONSTEXPR int64_t moelora_tile_row_of(moelora_row_order order, int64_t rows,
                                                     int64_t n) {
  const int64_t half_rows = moelora_half_tiles(order, rows) * MOELORA_PACK;
  return order == MOELORA_ROWS_PLAIN         ? n
         : order == MOELORA_ROWS_INTERLEAVED ? n % 2 * half_rows + n / 2
         : n < rows / 2                      ? n
                                             : half_rows + n - rows / 2;
}

MOELORA_END_C
