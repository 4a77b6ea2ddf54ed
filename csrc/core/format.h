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

/* Bytes of the 64 x 64 nibbles, or of the 64 x 128 numbers of FP8, which scales and zeros follow.
 */
enum { MOELORA_TILE_VALUES = 64 * 64 / 2, MOELORA_FP8_TILE_VALUES = 64 * 128 };

/* A format of kernels: FP8 weights and x in FP8. Those of x as it is are of MOELORA_FP8. */
#define MOELORA_W8A8 ((moelora_format)(MOELORA_FP8_ROWS + 1))

static MOELORA_CONSTEXPR bool moelora_is_fp8(moelora_format format) {
  return format >= MOELORA_FP8 && format <= MOELORA_FP8_ROWS;
}

/* Of depth, of a tile. */
static MOELORA_CONSTEXPR int32_t moelora_tile_depth(moelora_format format) {
  return format >= MOELORA_FP8 ? 128 : 64;
}

static MOELORA_CONSTEXPR int64_t moelora_depth_tiles(moelora_format format, int64_t k) {
  return (k + moelora_tile_depth(format) - 1) / moelora_tile_depth(format);
}

/* Columns that share a scale of weights and of e4m3 activations, or fewer than do. */
static MOELORA_CONSTEXPR int32_t moelora_x_group(moelora_format format) {
  return format == MOELORA_FP8_G64 ? 64 : 128;
}

/* Exponent of what CUDA kernels leave out of sums over products with weights of `format`, up to the
 * epilogue: scales that make bf16 numbers of INT4's nibbles at one go would not be finite. */
static MOELORA_CONSTEXPR int32_t moelora_missing_exponent(moelora_format format, bool is_bf16) {
  return format >= MOELORA_INT4 && format < MOELORA_FP8 && is_bf16 ? 24 : 0;
}

/* Place in an FP8 tile's values of column c of row r. */
static MOELORA_CONSTEXPR int32_t moelora_fp8_offset(int32_t r, int32_t c) {
  return r * 128 + ((c / 16) ^ (r & 7)) * 16 + c % 8 / 2 * 4 + c % 2 + c % 16 / 8 * 2;
}

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
         : format >= MOELORA_FP8 ? MOELORA_FP8_TILE_VALUES + (format == MOELORA_FP8_ROWS ? 256 : 16)
                                 : MOELORA_TILE_VALUES + 64 * moelora_tile_groups(format) *
                                                             (moelora_scale_bytes(format) +
                                                              (moelora_has_zeros(format) ? 1 : 0));
}

/* Bytes from the start of a tile to the 64 that rows r and r + 8 share, where r / 8 is even. */
static MOELORA_CONSTEXPR int32_t moelora_words_offset(int32_t r) {
  return (r / 16 * 8 + r % 8) * 64;
}

/* The formats that GPU kernels are written for: all of INT4 share one, which asks how scales and
 * zero points lie when it loads a tile; so do all of FP8, of each kind of x. */
static MOELORA_CONSTEXPR moelora_format moelora_kernel_format(moelora_format format,
                                                              moelora_x_format x) {
  return moelora_is_int4(format)   ? MOELORA_INT4
         : !moelora_is_fp8(format) ? format
         : x == MOELORA_X_NATIVE   ? MOELORA_FP8
                                   : MOELORA_W8A8;
}

/* The most bytes of a tile that such a kernel meets. */
static MOELORA_CONSTEXPR int32_t moelora_most_tile_bytes(moelora_format format) {
  return moelora_tile_size(format == MOELORA_INT4  ? MOELORA_INT4_ZP_G32
                           : format >= MOELORA_FP8 ? MOELORA_FP8_ROWS
                                                   : format);
}

/* Room for a tile in a stage of the portable kernels, 64 of its depth with all scales. */
static MOELORA_CONSTEXPR int32_t moelora_step_bytes(moelora_format format) {
  return format >= MOELORA_FP8 ? MOELORA_FP8_TILE_VALUES / 2 + 256
                               : moelora_most_tile_bytes(format);
}

/* Place of row r's scale (and zero) of group g among those of a tile. */
static MOELORA_CONSTEXPR int32_t moelora_scale_index(int32_t groups, int32_t r, int32_t g) {
  return (r / 16 * 8 + r % 8) * 2 * groups + r / 8 % 2 * groups + g;
}

/* Four nibbles of e2m1 in each half of a word, to the order of bits that MXFP4 tiles have
 * (moelora.h). */
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
