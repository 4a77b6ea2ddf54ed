/* `dot` of kernels.h for one vector instruction set: a register tile of up to DOT_ROWS token rows
 * by MOELORA_DOT_N weight rows of vector accumulators. Each step along K loads a vector of each row
 * and multiplies each token vector by each weight vector; lanes are summed at the end.
 *
 * The including file first defines
 *   element       element type of operands
 *   vector, sum   registers of DOT_STEP elements, and of float32 accumulators
 *   DOT_ROWS      token rows, limited by the register file
 *   DOT_STEP      elements per vector
 *   load(p), load_part(p, count)      load_part zero-fills past `count` < DOT_STEP without reading
 *   zero(), multiply_add(a, b, s)     s + products of a and b
 *   fold(s)                           __m128 with the total of s in four parts
 *
 * The order of additions depends only on k, so a row's result has the same bits for any m and n. */

/* Returns the totals of four accumulators. */
static inline __m128 add_lanes(const sum *s) {
  __m128 a = fold(s[0]), b = fold(s[1]), c = fold(s[2]), d = fold(s[3]);
  __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
  __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
  return _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab));
}

static inline __attribute__((always_inline)) void dot_tile(const int rows, const bool fetch,
                                                           const bool ragged, int64_t columns,
                                                           int64_t k, const void *const *x,
                                                           const char *w, int64_t w_stride,
                                                           int64_t ahead, float *c, int64_t ldc) {
  const element *restrict wj[MOELORA_DOT_N];
  const element *restrict xi[DOT_ROWS];
  sum total[DOT_ROWS][MOELORA_DOT_N];
  /* with fewer columns, repeats the last one */
  for (int64_t j = 0; j < MOELORA_DOT_N; j++)
    wj[j] = (const element *)(w + (ragged && j >= columns ? columns - 1 : j) * w_stride);
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
      /* to L2, not L1: rows that are a power of two apart map to few sets of L1 */
      if (fetch)
        _mm_prefetch((const char *)(wj[j] + at) + ahead, _MM_HINT_T1);
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
    float *out = c + i * ldc;
    __m128 totals = add_lanes(total[i]);
    if (!ragged) {
      _mm_storeu_ps(out, _mm_add_ps(_mm_loadu_ps(out), totals));
    } else {
      float part[MOELORA_DOT_N];
      _mm_storeu_ps(part, totals);
      for (int64_t j = 0; j < columns; j++)
        out[j] += part[j];
    }
  }
}

#define DOT_TILE(ROWS, FETCH, RAGGED)                                                              \
  dot_tile(ROWS <= DOT_ROWS ? ROWS : 1, FETCH, RAGGED, columns, k, xi, w, w_stride, ahead, ci, ldc)
#define DOT_CASE(ROWS)                                                                             \
  case ROWS:                                                                                       \
    if (columns < MOELORA_DOT_N)                                                                   \
      DOT_TILE(ROWS, false, true);                                                                 \
    else if (ahead)                                                                                \
      DOT_TILE(ROWS, true, false);                                                                 \
    else                                                                                           \
      DOT_TILE(ROWS, false, false);                                                                \
    break;

static void dot(int64_t m, int64_t n, int64_t k, const void *const *x, const void *weights,
                int64_t w_stride, const void *next, float *c, int64_t ldc) {
  const char *w = weights;
  for (int64_t columns = n; columns > 0; columns -= MOELORA_DOT_N) {
    int64_t ahead = columns > MOELORA_DOT_N ? MOELORA_DOT_N * w_stride
                    : next                  ? (intptr_t)next - (intptr_t)w
                                            : 0;
    const void *const *xi = x;
    float *ci = c;
    for (int64_t left = m, rows; left > 0; left -= rows, xi += rows, ci += rows * ldc) {
      rows = left < DOT_ROWS ? left : DOT_ROWS;
      switch (rows) {
        DOT_CASE(1)
        DOT_CASE(2)
        DOT_CASE(3)
        DOT_CASE(4)
        DOT_CASE(5)
        DOT_CASE(6)
      }
      ahead = 0; /* the first tile of x has prefetched the next weight rows */
    }
    w += MOELORA_DOT_N * w_stride;
    c += MOELORA_DOT_N;
  }
}
