/* The intrinsics of csrc/cpu/matrix_amx.c in plain C, for machines without AMX: tiles are memory of
 * the thread. Sums add in another order than the instruction's. */
#pragma once

/* The guards of GCC's and clang's <immintrin.h>, which this file replaces. */
#define _IMMINTRIN_H_INCLUDED
#define __IMMINTRIN_H

#include <stdint.h>
#include <string.h>

/* ---- AVX-512 ---- */

typedef struct __m512i {
  uint32_t lane[16];
} __m512i;
typedef struct __m512 {
  float lane[16];
} __m512;
typedef uint32_t __mmask32;
typedef uint16_t __mmask16;

static inline __m512i _mm512_setzero_si512(void) {
  return (__m512i){{0}};
}

static inline __m512i _mm512_loadu_si512(const void *from) {
  __m512i r;
  memcpy(&r, from, sizeof r);
  return r;
}

static inline void _mm512_storeu_si512(void *to, __m512i r) {
  memcpy(to, &r, sizeof r);
}

static inline __m512i _mm512_maskz_loadu_epi16(__mmask32 lanes, const void *from) {
  uint16_t halves[32] = {0};
  for (int i = 0; i < 32; i++)
    if (lanes >> i & 1)
      memcpy(&halves[i], (const char *)from + 2 * i, sizeof *halves);
  return _mm512_loadu_si512(halves);
}

static inline __m512 _mm512_maskz_loadu_ps(__mmask16 lanes, const void *from) {
  __m512 r = {{0}};
  for (int i = 0; i < 16; i++)
    if (lanes >> i & 1)
      memcpy(&r.lane[i], (const char *)from + 4 * i, sizeof(float));
  return r;
}

static inline void _mm512_mask_storeu_ps(void *to, __mmask16 lanes, __m512 r) {
  for (int i = 0; i < 16; i++)
    if (lanes >> i & 1)
      memcpy((char *)to + 4 * i, &r.lane[i], sizeof(float));
}

#define LANES(NAME, OPERATOR)                                                                      \
  static inline __m512 NAME(__m512 a, __m512 b) {                                                  \
    for (int i = 0; i < 16; i++)                                                                   \
      a.lane[i] OPERATOR b.lane[i];                                                                \
    return a;                                                                                      \
  }
LANES(_mm512_add_ps, +=)
LANES(_mm512_mul_ps, *=)

static inline __m512 _mm512_set1_ps(float x) {
  __m512 r;
  for (int i = 0; i < 16; i++)
    r.lane[i] = x;
  return r;
}

static inline __m512 _mm512_castsi512_ps(__m512i a) {
  __m512 r;
  memcpy(&r, &a, sizeof r);
  return r;
}

/* From each quarter: lanes first, first + 1 of a and b, `size` lanes at a time. */
static inline __m512i amx_unpack(__m512i a, __m512i b, int first, int size) {
  __m512i r;
  for (int i = 0; i < 16; i++) {
    const int quarter = i / 4 * 4, at = i % 4 / size;
    const __m512i *from = at % 2 ? &b : &a;
    r.lane[i] = from->lane[quarter + first + (size == 1 ? at / 2 : i % 2)];
  }
  return r;
}

#define _mm512_unpacklo_epi32(A, B) amx_unpack(A, B, 0, 1)
#define _mm512_unpackhi_epi32(A, B) amx_unpack(A, B, 2, 1)
#define _mm512_unpacklo_epi64(A, B) amx_unpack(A, B, 0, 2)
#define _mm512_unpackhi_epi64(A, B) amx_unpack(A, B, 2, 2)

static inline __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int order) {
  __m512i r;
  for (int q = 0; q < 4; q++)
    memcpy(&r.lane[4 * q], &(q < 2 ? &a : &b)->lane[4 * (order >> 2 * q & 3)], 16);
  return r;
}

/* ---- AMX ---- */

typedef struct amx_tile {
  uint32_t row[16][16];
} amx_tile;
static _Thread_local amx_tile amx_tiles[8];
static _Thread_local int amx_configured;

static inline void _tile_loadconfig(const void *config) {
  amx_configured = *(const uint8_t *)config == 1;
}

static inline void _tile_release(void) {
  amx_configured = 0;
  memset(amx_tiles, 0xff, sizeof amx_tiles);
}

static inline void _tile_zero(int tile) {
  memset(&amx_tiles[tile], 0, sizeof amx_tiles[tile]);
}

static inline void _tile_loadd(int tile, const void *from, int64_t stride) {
  for (int i = 0; i < 16; i++)
    memcpy(amx_tiles[tile].row[i], (const char *)from + i * stride, 64);
}

static inline void _tile_stored(int tile, void *to, int64_t stride) {
  for (int i = 0; i < 16; i++)
    memcpy((char *)to + i * stride, amx_tiles[tile].row[i], 64);
}

static inline float amx_bf16(uint32_t bits) {
  float x;
  bits <<= 16;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static inline void _tile_dpbf16ps(int sums, int a, int b) {
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) {
      float sum;
      memcpy(&sum, &amx_tiles[sums].row[i][j], sizeof sum);
      for (int k = 0; k < 16; k++) {
        const uint32_t x = amx_tiles[a].row[i][k], y = amx_tiles[b].row[k][j];
        sum += amx_bf16(x & 0xffff) * amx_bf16(y & 0xffff);
        sum += amx_bf16(x >> 16) * amx_bf16(y >> 16);
      }
      sum = amx_configured ? sum : 0.0f / 0.0f;
      memcpy(&amx_tiles[sums].row[i][j], &sum, sizeof sum);
    }
}
