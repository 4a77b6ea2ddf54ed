/* Products of bf16 rows on AMX tiles of 16 weight rows by 16 token rows by 32 elements of K:
 *
 *   A    [16 weight rows][32 of K]           in the layout of the weights
 *   B    [16 pairs of K][16 token rows][2]   a step of a panel
 *   C    [16 weight rows][16 token rows]     float32 sums, transposed when they are added to c
 *
 * A block of 2 x 2 tiles of C uses all eight tile registers, and each operand tile twice. */
#if defined(__x86_64__)
#include <immintrin.h>

#include "cpu/kernels.h"

enum { ROWS = MOELORA_MATRIX_ROWS, STEP = MOELORA_MATRIX_STEP, TILE_BYTES = MOELORA_PANEL_STEP };

/* LDTILECFG: eight tiles of 16 rows of 64 bytes. */
static const struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} config __attribute__((aligned(64))) = {
    .palette = 1,
    .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
    .rows = {16, 16, 16, 16, 16, 16, 16, 16},
};

/* Compiler barrier for memory accesses: GCC's tile loads do not declare that they read memory. */
static inline void order_memory(void) {
  __asm__ volatile("" : : : "memory");
}

static void enter(void) {
  _tile_loadconfig(&config);
}

static void leave(void) {
  _tile_release();
}

/* Transposes 16 x 16 32-bit lanes. */
static inline void transpose(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

/* Returns a mask of the first `left` lanes, or of a whole step if `left` is larger. */
static inline __mmask32 lanes_of(int64_t left) {
  return left < STEP ? (1u << left) - 1 : ~0u;
}

static void pack(int64_t m, int64_t k, const void *const *x, void *panels) {
  char *to = panels;
  for (int64_t first = 0; first < m; first += ROWS)
    for (int64_t at = 0; at < k; at += STEP, to += TILE_BYTES) {
      const __mmask32 lanes = lanes_of(k - at);
      __m512i r[ROWS];
      for (int i = 0; i < ROWS; i++)
        r[i] = first + i < m ? _mm512_maskz_loadu_epi16(lanes, (const uint16_t *)x[first + i] + at)
                             : _mm512_setzero_si512();
      transpose(r);
      for (int i = 0; i < ROWS; i++)
        _mm512_storeu_si512(to + 64 * i, r[i]);
    }
}

/* Up to 16 weight rows. */
typedef struct weight_rows {
  const char *from;
  int64_t stride, count;
  char *copy; /* [16, 32] copy of a step in which a tile load would read past the rows or past K */
} weight_rows;

static inline bool is_whole(const weight_rows *w, int64_t left) {
  return w->count == ROWS && left >= STEP;
}

/* Copies a step to `copy`, with zeros past the rows and past K. */
static void copy_step(const weight_rows *w, int64_t byte, int64_t left) {
  const __mmask32 lanes = lanes_of(left);
  order_memory(); /* keeps the stores below after earlier loads from `copy` */
  for (int64_t i = 0; i < ROWS; i++)
    _mm512_storeu_si512(w->copy + 64 * i, i < w->count ? _mm512_maskz_loadu_epi16(
                                                             lanes, w->from + i * w->stride + byte)
                                                       : _mm512_setzero_si512());
  order_memory();
}

#define LOAD_WEIGHTS(TILE, W)                                                                      \
  if (is_whole(W, left)) {                                                                         \
    _tile_loadd(TILE, (W)->from + byte, (W)->stride);                                              \
  } else {                                                                                         \
    copy_step(W, byte, left);                                                                      \
    _tile_loadd(TILE, (W)->copy, 64);                                                              \
  }

/* Computes sums [token tile][weight tile][16 weight rows][16 token rows]. */
static inline __attribute__((always_inline)) void
multiply_block(const bool two_weights, const bool two_tokens, int64_t k, const weight_rows w[2],
               const char *x, int64_t panel_bytes, float sums[2][2][ROWS * ROWS]) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const char *second = x + panel_bytes;
  for (int64_t left = k, byte = 0; left > 0; left -= STEP, byte += 2 * STEP) {
    LOAD_WEIGHTS(4, &w[0])
    _tile_loadd(6, x, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (two_weights) {
      LOAD_WEIGHTS(5, &w[1])
      _tile_dpbf16ps(1, 5, 6);
    }
    if (two_tokens) {
      _tile_loadd(7, second, 64);
      _tile_dpbf16ps(2, 4, 7);
      if (two_weights)
        _tile_dpbf16ps(3, 5, 7);
    }
    x += TILE_BYTES;
    second += TILE_BYTES;
  }
  _tile_stored(0, sums[0][0], 64);
  if (two_weights)
    _tile_stored(1, sums[0][1], 64);
  if (two_tokens)
    _tile_stored(2, sums[1][0], 64);
  if (two_tokens && two_weights)
    _tile_stored(3, sums[1][1], 64);
}

/* Adds sums[j][i], times the scales of row `row` + i and of weight row `column` + j unless scales
 * is NULL, to c[i * ldc + j], for i < m <= 16 and j < n <= 16. */
static inline void add_transposed(int64_t m, int64_t n, const float *sums,
                                  const moelora_product_scales *scales, int64_t row, int64_t column,
                                  float *c, int64_t ldc) {
  const __mmask16 lanes = (__mmask16)((1u << n) - 1);
  __m512i r[ROWS];
  for (int i = 0; i < ROWS; i++)
    r[i] = _mm512_loadu_si512(sums + ROWS * i);
  transpose(r);
  const __m512 w = _mm512_maskz_loadu_ps(scales ? lanes : 0, scales ? scales->w + column : sums);
  for (int64_t i = 0; i < m; i++, c += ldc) {
    __m512 sum = _mm512_castsi512_ps(r[i]);
    if (scales)
      sum = _mm512_mul_ps(sum, _mm512_mul_ps(w, _mm512_set1_ps(scales->x[row + i][scales->group])));
    _mm512_mask_storeu_ps(c, lanes, _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, c), sum));
  }
}

static inline int64_t at_most_rows(int64_t count) {
  return count < ROWS ? count : ROWS;
}

static void multiply(int64_t m, int64_t n, int64_t k, const void *panels, int64_t panel_bytes,
                     const void *weights, int64_t w_stride, const moelora_product_scales *scales,
                     float *c, int64_t ldc) {
  float sums[2][2][ROWS * ROWS] __attribute__((aligned(64)));
  char copies[2][TILE_BYTES] __attribute__((aligned(64)));
  order_memory(); /* keeps tile loads after the caller's stores, even if this is inlined */
  for (int64_t j = 0; j < n; j += 2 * ROWS) {
    const char *from = (const char *)weights + j * w_stride;
    const bool two_weights = n - j > ROWS;
    const weight_rows w[2] = {
        {from, w_stride, at_most_rows(n - j), copies[0]},
        {from + ROWS * w_stride, w_stride, at_most_rows(n - j - ROWS), copies[1]},
    };
    for (int64_t i = 0; i < m; i += 2 * ROWS) {
      const char *x = (const char *)panels + i / ROWS * panel_bytes;
      const bool two_tokens = m - i > ROWS;
      if (two_weights && two_tokens)
        multiply_block(true, true, k, w, x, panel_bytes, sums);
      else if (two_weights)
        multiply_block(true, false, k, w, x, panel_bytes, sums);
      else if (two_tokens)
        multiply_block(false, true, k, w, x, panel_bytes, sums);
      else
        multiply_block(false, false, k, w, x, panel_bytes, sums);
      for (int t = 0; t <= two_tokens; t++)
        for (int q = 0; q <= two_weights; q++)
          add_transposed(at_most_rows(m - i - ROWS * t), w[q].count, sums[t][q], scales,
                         i + ROWS * t, j + ROWS * q, c + (i + ROWS * t) * ldc + j + ROWS * q, ldc);
    }
  }
}

const moelora_cpu_matrix moelora_matrix_amx = {
    .enter = enter,
    .leave = leave,
    .pack = pack,
    .multiply = multiply,
};
#endif
