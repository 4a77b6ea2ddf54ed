/* `add_rows` of kernels.h for the instruction set of the including file: a register tile of up to
 * ADD_ROWS rows of c by two vectors. Each step along k multiplies a row of w by one broadcast
 * element of each row of x. */
#pragma once

#include "cpu/kernels.h"

/* 6 x 2 accumulators, two vectors of w and one of x take 15 of the 16 registers of AVX2. */
enum { ADD_ROWS = 6 };

#if defined(__AVX512F__)
#include <immintrin.h>
typedef __m512 row_vector;
#define ROW_LANES 16
#define ROW_LOAD(P) _mm512_loadu_ps(P)
#define ROW_STORE(P, V) _mm512_storeu_ps(P, V)
#define ROW_MULTIPLY_ADD(X, V, S) _mm512_fmadd_ps(_mm512_set1_ps(X), V, S)
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
typedef __m256 row_vector;
#define ROW_LANES 8
#define ROW_LOAD(P) _mm256_loadu_ps(P)
#define ROW_STORE(P, V) _mm256_storeu_ps(P, V)
#define ROW_MULTIPLY_ADD(X, V, S) _mm256_fmadd_ps(_mm256_set1_ps(X), V, S)
#else
typedef float row_vector __attribute__((vector_size(16), aligned(4)));
#define ROW_LANES 4
#define ROW_LOAD(P) (*(const row_vector *)(P))
#define ROW_STORE(P, V) (*(row_vector *)(P) = (V))
#define ROW_MULTIPLY_ADD(X, V, S) ((S) + (X) * (V))
#endif

static inline
    __attribute__((always_inline)) void add_rows_tile(const int rows, const int vectors, int64_t k,
                                                      const float *const *x, const float *const *w,
                                                      int64_t j, float *c, int64_t ldc) {
  row_vector sum[ADD_ROWS][2];
  const float *xi[ADD_ROWS];
  for (int i = 0; i < rows; i++) {
    xi[i] = x[i];
    for (int v = 0; v < vectors; v++)
      sum[i][v] = ROW_LOAD(c + i * ldc + v * ROW_LANES);
  }
  for (int64_t q = 0; q < k; q++) {
    row_vector b[2];
    for (int v = 0; v < vectors; v++)
      b[v] = ROW_LOAD(w[q] + j + v * ROW_LANES);
    for (int i = 0; i < rows; i++)
      for (int v = 0; v < vectors; v++)
        sum[i][v] = ROW_MULTIPLY_ADD(xi[i][q], b[v], sum[i][v]);
  }
  for (int i = 0; i < rows; i++)
    for (int v = 0; v < vectors; v++)
      ROW_STORE(c + i * ldc + v * ROW_LANES, sum[i][v]);
}

#define ADD_ROWS_CASE(ROWS)                                                                        \
  case ROWS:                                                                                       \
    if (n - j >= 2 * ROW_LANES)                                                                    \
      add_rows_tile(ROWS, 2, k, x + i, w, j, c + i * ldc + j, ldc);                                \
    else                                                                                           \
      add_rows_tile(ROWS, 1, k, x + i, w, j, c + i * ldc + j, ldc);                                \
    break;

static inline void add_rows(int64_t m, int64_t n, int64_t k, const float *const *x,
                            const float *const *w, float *c, int64_t ldc) {
  for (int64_t j = 0; j < n; j += 2 * ROW_LANES)
    for (int64_t i = 0; i < m; i += ADD_ROWS)
      switch (m - i < ADD_ROWS ? m - i : ADD_ROWS) {
        ADD_ROWS_CASE(1)
        ADD_ROWS_CASE(2)
        ADD_ROWS_CASE(3)
        ADD_ROWS_CASE(4)
        ADD_ROWS_CASE(5)
        ADD_ROWS_CASE(6)
      }
}
