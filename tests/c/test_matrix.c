/* Products on AMX tiles, with emulated instructions, so that every machine runs them: against sums
 * in double, for ragged sizes; nothing past the rows, and past K, is read or may matter; a row's
 * bits do not depend on what shares its tile. */
#include "harness.h"

#if defined(__x86_64__)
#include "amx_emulated.h"

#define moelora_matrix_amx emulated
#include "cpu/matrix_amx.c"

enum { MAX_M = 70, MAX_N = 50, MAX_K = 200, LDC = 56 };

static uint16_t random_bf16(void) {
  const float x = (float)rand() / (float)RAND_MAX - 0.5f;
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (uint16_t)(bits >> 16);
}

/* `rows` rows of k values, `stride` apart; everything else is NaN. */
static uint16_t *random_rows(int64_t rows, int64_t k, int64_t stride) {
  const size_t count = (size_t)((rows - 1) * stride + k);
  uint16_t *all = malloc(count * sizeof *all);
  for (size_t i = 0; i < count; i++)
    all[i] = (int64_t)i % stride < k ? random_bf16() : 0x7fc0;
  return all;
}

static void multiply_rows(int64_t m, int64_t n, int64_t k, const void *const *x, const uint16_t *w,
                          int64_t stride, const moelora_product_scales *scales, float *c) {
  const int64_t panel = (k + 31) / 32 * MOELORA_PANEL_STEP;
  char *panels = malloc((size_t)((m + 15) / 16 * panel));
  emulated.pack(m, k, x, panels);
  emulated.enter();
  emulated.multiply(m, n, k, panels, panel, w, stride * (int64_t)sizeof *w, scales, c, LDC);
  emulated.leave();
  free(panels);
}

static void check_product(int64_t m, int64_t n, int64_t k) {
  static float c[MAX_M * LDC], alone[LDC];
  const int64_t stride = k + rand() % 9;
  uint16_t *x = random_rows(m, k, k), *w = random_rows(n, k, stride);
  const void *rows[MAX_M];
  for (int64_t i = 0; i < m; i++)
    rows[i] = x + i * k;
  for (int64_t i = 0; i < m * LDC; i++)
    c[i] = (float)(i % 7);
  float w_scales[MAX_N], x_scales[MAX_M];
  const float *x_rows[MAX_M];
  const moelora_product_scales all = {w_scales, x_rows, 0};
  const moelora_product_scales *scales = rand() % 2 ? &all : NULL;
  for (int64_t j = 0; j < n; j++)
    w_scales[j] = scales ? (float)(1 + rand() % 4) : 1;
  for (int64_t i = 0; i < m; i++) {
    x_scales[i] = scales ? (float)(1 + rand() % 4) / 2 : 1;
    x_rows[i] = x_scales + i;
  }
  multiply_rows(m, n, k, rows, w, stride, scales, c);
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < LDC; j++) {
      double sum = (double)((i * LDC + j) % 7), scale = 1;
      for (int64_t q = 0; q < k && j < n; q++) {
        const double term = amx_bf16(x[i * k + q]) * (double)amx_bf16(w[j * stride + q]) *
                            w_scales[j] * x_scales[i];
        sum += term;
        scale += fabs(term);
      }
      if (!(fabs(c[i * LDC + j] - sum) <= 1e-5 * scale))
        FAIL("m=%d n=%d k=%d: c[%d, %d] is %g, expected %g", (int)m, (int)n, (int)k, (int)i, (int)j,
             c[i * LDC + j], sum);
    }
  const int64_t one = rand() % m;
  for (int64_t j = 0; j < LDC; j++)
    alone[j] = (float)((one * LDC + j) % 7);
  const moelora_product_scales own = {w_scales, x_rows + one, 0};
  multiply_rows(1, n, k, rows + one, w, stride, scales ? &own : NULL, alone);
  CHECK(memcmp(alone, c + one * LDC, sizeof alone) == 0);
  free(x);
  free(w);
}

int main(void) {
  int32_t count = 0;
  const int64_t sizes[] = {1, 2, 15, 16, 17, 31, 32, 33, 48};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
    for (size_t j = 0; j < sizeof sizes / sizeof *sizes; j++, count++)
      check_product(sizes[i], sizes[j], 1 + rand() % MAX_K);
  for (; count < 200; count++)
    check_product(1 + rand() % MAX_M, 1 + rand() % MAX_N, 1 + rand() % MAX_K);
  printf("test_matrix: %d products\n", count);
  return 0;
}
#else
int main(void) {
  printf("test_matrix: no AMX on this architecture\n");
  return 0;
}
#endif
