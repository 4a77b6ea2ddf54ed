/* back_project.c: products y W of the backward, with the weights as the forward stores them. */
#pragma once

#include "cpu/back_steps.h"

typedef struct moelora_back_projection moelora_back_projection;
struct moelora_back_projection {
  const moelora_back_call *call;
  const float *y; /* rows of w->n values, the gradient of x w^T */
  int64_t y_stride;
  bool y_by_token;          /* y has a row per token; otherwise by sorted position */
  const moelora_weights *w; /* data NULL: only factors */
  const moelora_factors *lora;
  float *yb; /* [P, slices, R] by sorted position: s y B; NULL: no adapters */
  float *dz; /* [P, w->k] by flat row: y W + yb A; NULL: `emit` receives it */
  /* Receives the finished columns [begin, begin + count) of sorted row `at`. */
  void (*emit)(const moelora_back_projection *projection, int64_t at, int64_t begin, int64_t count,
               const float *values);
  void *context;
};

/* Computes projection->yb = rounded(s y B) for every row with an adapter. */
void moelora_cpu_back_shrink(const moelora_back_projection *projection);
void moelora_cpu_back_project(const moelora_back_projection *projection);
