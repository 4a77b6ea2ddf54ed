/* `dot` of kernels.h for one vector instruction set: a micro tile of up to DOT_ROWS token rows by
 * MOELORA_DOT_N weight rows of vector partial sums, all in registers. One step along K loads a
 * vector of each row and multiplies all pairs; the lanes of a sum are added once, at the end.
 *
 * The including file defines, before it includes this,
 *   element       what operands are made of
 *   vector, sum   registers of DOT_STEP elements, and of float32 partial sums
 *   DOT_ROWS      token rows, bounded by the register file
 *   DOT_STEP      elements of a vector
 *   load(p), load_part(p, count)      the latter zero past `count` < DOT_STEP, reads nothing there
 *   zero(), multiply_add(a, b, s)     the latter s + products of a and b
 *   add_lanes(s0, s1, s2, s3)         __m128 of the four totals
 *
 * The order of additions depends on k alone, so every instance gives a row the same bits. */

static inline __attribute__((always_inline)) void
dot_tile(const int rows, const bool fetch, int64_t k, const void *const *x, const void *const *w,
         int64_t ahead_bytes, float *c, int64_t ldc) {
  const element *restrict wj[MOELORA_DOT_N];
  const element *restrict xi[DOT_ROWS];
  sum total[DOT_ROWS][MOELORA_DOT_N];
  for (int j = 0; j < MOELORA_DOT_N; j++)
    wj[j] = w[j];
  for (int i = 0; i < rows; i++) {
    xi[i] = x[i];
    for (int j = 0; j < MOELORA_DOT_N; j++)
      total[i][j] = zero();
  }
  int64_t at = 0;
  for (; at + DOT_STEP <= k; at += DOT_STEP) {
    vector b[MOELORA_DOT_N];
    for (int j = 0; j < MOELORA_DOT_N; j++) {
      b[j] = load(wj[j] + at);
      if (fetch)
        _mm_prefetch((const char *)(wj[j] + at) + ahead_bytes, _MM_HINT_T1);
    }
    for (int i = 0; i < rows; i++) {
      vector a = load(xi[i] + at);
      for (int j = 0; j < MOELORA_DOT_N; j++)
        total[i][j] = multiply_add(a, b[j], total[i][j]);
    }
  }
  if (at < k) {
    vector b[MOELORA_DOT_N];
    for (int j = 0; j < MOELORA_DOT_N; j++)
      b[j] = load_part(wj[j] + at, k - at);
    for (int i = 0; i < rows; i++) {
      vector a = load_part(xi[i] + at, k - at);
      for (int j = 0; j < MOELORA_DOT_N; j++)
        total[i][j] = multiply_add(a, b[j], total[i][j]);
    }
  }
  for (int i = 0; i < rows; i++) {
    __m128 totals = add_lanes(total[i][0], total[i][1], total[i][2], total[i][3]);
    _mm_storeu_ps(c + i * ldc, _mm_add_ps(_mm_loadu_ps(c + i * ldc), totals));
  }
}

#define DOT_CASE(ROWS)                                                                             \
  case ROWS:                                                                                       \
    if (ROWS <= DOT_ROWS && ahead_bytes)                                                           \
      dot_tile(ROWS <= DOT_ROWS ? ROWS : 1, true, k, x, w, ahead_bytes, c, ldc);                   \
    else                                                                                           \
      dot_tile(ROWS <= DOT_ROWS ? ROWS : 1, false, k, x, w, 0, c, ldc);                            \
    break;

static void dot(int64_t m, int64_t k, const void *const *x, const void *const *w,
                int64_t ahead_bytes, float *c, int64_t ldc) {
  while (m > 0) {
    int64_t rows = m < DOT_ROWS ? m : DOT_ROWS;
    switch (rows) {
      DOT_CASE(1)
      DOT_CASE(2)
      DOT_CASE(3)
      DOT_CASE(4)
      DOT_CASE(5)
      DOT_CASE(6)
    }
    /* the first rows have fetched */
    ahead_bytes = 0;
    m -= rows;
    x += rows;
    c += rows * ldc;
  }
}
