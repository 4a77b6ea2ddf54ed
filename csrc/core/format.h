/* What a format is, from its row in formats.inc, and where things lie in a tile of it (moelora.h
 * has the layout). Nothing else compares formats: what depends on one is asked here, or is a member
 * of FormatTraits in cuda/gemm/common/format.cuh. */
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

/* ---- columns of formats.inc ---- */

/* What a number of a weight is. */
typedef enum moelora_values {
  MOELORA_VALUES_NATIVE, /* of the dtype of x */
  MOELORA_VALUES_E2M1,
  MOELORA_VALUES_U4,
  MOELORA_VALUES_E4M3,
} moelora_values;

/* How a tile holds a scale. */
typedef enum moelora_scale {
  MOELORA_SCALE_NONE,
  MOELORA_SCALE_E8M0,    /* a byte, an exponent */
  MOELORA_SCALE_E4M3,    /* a byte, and a float32 of the tile */
  MOELORA_SCALE_X_DTYPE, /* two bytes, of the dtype of x */
  MOELORA_SCALE_F32,
} moelora_scale;

/* What a CUDA kernel is written for, as a moelora_format is what a weight is: one format, or all
 * that differ in how their scales lie, with x as it is or in e4m3. */
typedef enum moelora_kernel_format {
  MOELORA_KERNEL_NONE = -1,
#define MOELORA_KERNEL(NAME, TEXT, FORMAT) MOELORA_KERNEL_##NAME,
#include "formats.inc"
} moelora_kernel_format;

/* How many formats there are. */
enum {
  MOELORA_FORMATS = 0
#define MOELORA_FORMAT_OF(...) +1
#include "formats.inc"
};

/* True of formats in rows for which CONDITION holds. Other rows leave nothing in machine code. */
#define MOELORA_WHERE(CONDITION, NAME) || ((CONDITION) && format == MOELORA_##NAME)

static MOELORA_CONSTEXPR bool moelora_is_e2m1(moelora_format format) {
  return false
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ...)                                         \
  MOELORA_WHERE(MOELORA_VALUES_##VALUES == MOELORA_VALUES_E2M1, NAME)
#include "formats.inc"
      ;
}

static MOELORA_CONSTEXPR bool moelora_is_int4(moelora_format format) {
  return false
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ...)                                         \
  MOELORA_WHERE(MOELORA_VALUES_##VALUES == MOELORA_VALUES_U4, NAME)
#include "formats.inc"
      ;
}

static MOELORA_CONSTEXPR bool moelora_is_fp8(moelora_format format) {
  return false
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ...)                                         \
  MOELORA_WHERE(MOELORA_VALUES_##VALUES == MOELORA_VALUES_E4M3, NAME)
#include "formats.inc"
      ;
}

/* Whether scales are exponents, of a byte. */
static MOELORA_CONSTEXPR bool moelora_has_e8m0_scales(moelora_format format) {
  return false
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ROWS, COLUMNS, SCALE, ...)                   \
  MOELORA_WHERE(MOELORA_SCALE_##SCALE == MOELORA_SCALE_E8M0, NAME)
#include "formats.inc"
      ;
}

/* Whether scales are e4m3, in a byte, and a tile has a float32 scale of its own beside them. */
static MOELORA_CONSTEXPR bool moelora_has_tile_scale(moelora_format format) {
  return false
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ROWS, COLUMNS, SCALE, ...)                   \
  MOELORA_WHERE(MOELORA_SCALE_##SCALE == MOELORA_SCALE_E4M3, NAME)
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

/* Four bits: whether 32 columns share a scale, or 16. */
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

/* FP8: whether every row of a tile has a scale of its own. */
static MOELORA_CONSTEXPR bool moelora_has_row_scales(moelora_format format) {
  return false
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ROWS, ...)                                   \
  MOELORA_WHERE(MOELORA_VALUES_##VALUES == MOELORA_VALUES_E4M3 && (ROWS) == 1, NAME)
#include "formats.inc"
      ;
}

/* Whether kernels take it with x in e4m3. */
static MOELORA_CONSTEXPR bool moelora_takes_e4m3(moelora_format format) {
  return false
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ROWS, COLUMNS, SCALE, ZEROS, X_KERNEL)       \
  MOELORA_WHERE(MOELORA_KERNEL_##X_KERNEL != MOELORA_KERNEL_NONE, NAME)
#include "formats.inc"
      ;
}

static MOELORA_CONSTEXPR bool moelora_is_format(int64_t number) {
  return number >= 0 && number < MOELORA_FORMATS;
}

static MOELORA_CONSTEXPR bool moelora_is_quantized(moelora_format format) {
  return format != MOELORA_NATIVE;
}

static MOELORA_CONSTEXPR bool moelora_is_four_bits(moelora_format format) {
  return moelora_is_e2m1(format) || moelora_is_int4(format);
}

/* ---- of the kernels for it ---- */

/* Those that take a format with x of that kind. */
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

/* A format that they take: all of them have its values. */
static MOELORA_CONSTEXPR moelora_format moelora_format_of_kernel(moelora_kernel_format kernel) {
  return
#define MOELORA_KERNEL(NAME, TEXT, FORMAT) kernel == MOELORA_KERNEL_##NAME ? MOELORA_##FORMAT:
#include "formats.inc"
      MOELORA_NATIVE;
}

/* How many they take. */
static MOELORA_CONSTEXPR int32_t moelora_formats_of(moelora_kernel_format kernel) {
  return 0
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ROWS, COLUMNS, SCALE, ZEROS, X_KERNEL)       \
  +(kernel == MOELORA_KERNEL_##KERNEL || kernel == MOELORA_KERNEL_##X_KERNEL)
#include "formats.inc"
      ;
}

/* Whether some of these have zero points. */
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

/* Whether they take x in e4m3. */
static MOELORA_CONSTEXPR bool moelora_is_e4m3_kernel(moelora_kernel_format kernel) {
  return kernel != MOELORA_KERNEL_NONE &&
         kernel != moelora_kernel_format_of(moelora_format_of_kernel(kernel), MOELORA_X_NATIVE);
}

/* ---- tiles ---- */

/* Bytes of the 64 x 64 nibbles, or of the 64 x 128 numbers of FP8, which scales and zeros follow.
 */
enum { MOELORA_TILE_VALUES = 64 * 64 / 2, MOELORA_FP8_TILE_VALUES = 64 * 128 };

/* Of the scale of a tile, with what fills its 16 bytes. */
enum { MOELORA_TILE_SCALE_BYTES = 16 };

/* Of depth, of a tile. */
static MOELORA_CONSTEXPR int32_t moelora_tile_depth(moelora_format format) {
  return moelora_is_fp8(format) ? 128 : 64;
}

static MOELORA_CONSTEXPR int64_t moelora_depth_tiles(moelora_format format, int64_t k) {
  return (k + moelora_tile_depth(format) - 1) / moelora_tile_depth(format);
}

/* Columns that share a scale of weights and of e4m3 activations, or fewer than do. */
static MOELORA_CONSTEXPR int32_t moelora_x_group(moelora_format format) {
  return false
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ROWS, COLUMNS, ...)                          \
  MOELORA_WHERE(MOELORA_VALUES_##VALUES == MOELORA_VALUES_E4M3 && (COLUMNS) == 64, NAME)
#include "formats.inc"
             ? 64
             : 128;
}

/* Exponent of what CUDA kernels leave out of sums over products with weights of `format`, up to the
 * epilogue: scales that make bf16 numbers of INT4's nibbles at one go would not be finite. */
static MOELORA_CONSTEXPR int32_t moelora_missing_exponent(moelora_format format, bool is_bf16) {
  return moelora_is_int4(format) && is_bf16 ? 24 : 0;
}

/* Exponent of what numbers of such a format lack in a CUDA kernel beside the tile's scale. */
static MOELORA_CONSTEXPR int32_t moelora_tile_scale_exponent(bool is_bf16) {
  return is_bf16 ? 8 : 7;
}

/* Place in an FP8 tile's values of column c of row r. */
static MOELORA_CONSTEXPR int32_t moelora_fp8_offset(int32_t r, int32_t c) {
  return r * 128 + ((c / 16) ^ (r & 7)) * 16 + c % 8 / 2 * 4 + c % 2 + c % 16 / 8 * 2;
}

/* Scales of a row of a tile of four bits. */
static MOELORA_CONSTEXPR int32_t moelora_tile_groups(moelora_format format) {
  return 1 + moelora_has_groups_of_32(format) + 3 * moelora_has_groups_of_16(format);
}

/* And the bytes of one. */
static MOELORA_CONSTEXPR int32_t moelora_scale_bytes(moelora_format format) {
  return moelora_has_e8m0_scales(format) || moelora_has_tile_scale(format) ? 1 : 2;
}

/* Bytes from the start of a tile of four bits to its own scale, where it has one; those of values,
 * scales and zeros. */
static MOELORA_CONSTEXPR int32_t moelora_tile_scale_offset(moelora_format format) {
  return MOELORA_TILE_VALUES +
         64 * moelora_tile_groups(format) *
             (moelora_scale_bytes(format) + (moelora_has_zeros(format) ? 1 : 0));
}

/* Of FP8: four scales, of which two halves of the depth have one each, or one of each row. */
static MOELORA_CONSTEXPR int32_t moelora_fp8_tile_size(moelora_format format) {
  return MOELORA_FP8_TILE_VALUES + (moelora_has_row_scales(format) ? 64 : 4) * 4;
}

static MOELORA_CONSTEXPR int32_t moelora_tile_size(moelora_format format) {
  return !moelora_is_quantized(format) ? 0
         : moelora_is_fp8(format)
             ? moelora_fp8_tile_size(format)
             : moelora_tile_scale_offset(format) +
                   (moelora_has_tile_scale(format) ? MOELORA_TILE_SCALE_BYTES : 0);
}

/* Bytes from the start of a tile to the 64 that rows r and r + 8 share, where r / 8 is even. */
static MOELORA_CONSTEXPR int32_t moelora_words_offset(int32_t r) {
  return (r / 16 * 8 + r % 8) * 64;
}

/* The most bytes of a tile that such a kernel meets. */
static MOELORA_CONSTEXPR int32_t moelora_most_tile_bytes(moelora_kernel_format kernel) {
  int32_t most = 0;
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ROWS, COLUMNS, SCALE, ZEROS, X_KERNEL)       \
  if ((kernel == MOELORA_KERNEL_##KERNEL || kernel == MOELORA_KERNEL_##X_KERNEL) &&                \
      moelora_tile_size(MOELORA_##NAME) > most)                                                    \
    most = moelora_tile_size(MOELORA_##NAME);
#include "formats.inc"
  return most;
}

/* Room for a tile in a stage of the portable kernels, 64 of its depth with all scales. */
static MOELORA_CONSTEXPR int32_t moelora_step_bytes(moelora_kernel_format kernel) {
  const int32_t most = moelora_most_tile_bytes(kernel);
  return moelora_is_fp8(moelora_format_of_kernel(kernel)) ? most - MOELORA_FP8_TILE_VALUES / 2
                                                          : most;
}

/* Place of row r's scale (and zero) of group g among those of a tile. */
static MOELORA_CONSTEXPR int32_t moelora_scale_index(int32_t groups, int32_t r, int32_t g) {
  return (r / 16 * 8 + r % 8) * 2 * groups + r / 8 % 2 * groups + g;
}

/* A positive e4m3 scale as tiles have it: five bits of exponent, of which 22 is 2^0, and three of
 * mantissa, so that no number but 0 is subnormal. */
static MOELORA_CONSTEXPR uint8_t moelora_e5m3_of_e4m3(uint8_t scale) {
  return (uint8_t)(scale >= 8   ? scale + 120
                   : scale >= 4 ? 120 + (scale - 4) * 2
                   : scale >= 2 ? 112 + (scale - 2) * 4
                   : scale      ? 104
                                : 0);
}

/* Four nibbles of e2m1 in each half of a word, to the order of bits that tiles have (moelora.h). */
static MOELORA_CONSTEXPR uint32_t moelora_spread_e2m1(uint32_t nibbles) {
  return (nibbles << 12 & 0x80008000u) | (nibbles << 6 & 0x01c001c0u) |
         (nibbles << 5 & 0x10001000u) | (nibbles >> 1 & 0x00380038u) |
         (nibbles >> 2 & 0x22002200u) | (nibbles >> 8 & 0x00070007u) |
         (nibbles >> 3 & 0x0c000c00u) | (nibbles << 2 & 0x40004000u);
}

/* And back, of a word or a vector of them. */
#define MOELORA_GATHER_E2M1(word)                                                                  \
  (((word) >> 12 & 0x00080008u) | ((word) >> 6 & 0x00070007u) | ((word) >> 5 & 0x00800080u) |      \
   ((word) << 1 & 0x00700070u) | ((word) << 2 & 0x88008800u) | ((word) << 8 & 0x07000700u) |       \
   ((word) << 3 & 0x60006000u) | ((word) >> 2 & 0x10001000u))

/* Tiles of gate rows, which come before as many of up rows; 0 of PLAIN order. */
static MOELORA_CONSTEXPR int64_t moelora_half_tiles(moelora_row_order order, int64_t rows) {
  return order == MOELORA_ROWS_PLAIN ? 0 : (rows / 2 + MOELORA_PACK - 1) / MOELORA_PACK;
}

/* Tiles of `rows` rows, which are even in number but for PLAIN order. */
static MOELORA_CONSTEXPR int64_t moelora_row_tiles(moelora_row_order order, int64_t rows) {
  return order == MOELORA_ROWS_PLAIN ? (rows + MOELORA_PACK - 1) / MOELORA_PACK
                                     : 2 * moelora_half_tiles(order, rows);
}

/* Which of `rows` rows is row `at` of all tiles; -1: none of them. */
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

/* The other way: the row of all tiles that has row n of `rows`. */
static MOELORA_CONSTEXPR int64_t moelora_tile_row_of(moelora_row_order order, int64_t rows,
                                                     int64_t n) {
  const int64_t half_rows = moelora_half_tiles(order, rows) * MOELORA_PACK;
  return order == MOELORA_ROWS_PLAIN         ? n
         : order == MOELORA_ROWS_INTERLEAVED ? n % 2 * half_rows + n / 2
         : n < rows / 2                      ? n
                                             : half_rows + n - rows / 2;
}

#ifdef __cplusplus
}
#endif

#endif
