/* Building blocks of fuzz_api.c: views with corrupted fields, memory of exactly the size that they
 * span, and a run of an operator with the guarantees it must keep. */
#pragma once

#include "harness.h"

enum { MAX_VIEWS = 64, LARGEST = 1 << 16, SPACE = 1 << 22 };

static uint64_t current_seed;

#define STOP(...)                                                                                  \
  do {                                                                                             \
    fprintf(stderr, "seed %llu: ", (unsigned long long)current_seed);                              \
    FAIL(__VA_ARGS__);                                                                             \
  } while (0)

static bool one_in(int64_t n) {
  return random_in(1, n) == 1;
}

/* ---- views ---- */

typedef struct owned {
  moelora_tensor *view;
  unsigned char *memory; /* exactly `bytes`, from malloc */
  size_t bytes;
  bool output;
  unsigned char *before; /* outputs only */
} owned;

static owned views[MAX_VIEWS];
static int num_views;
static bool backed; /* all views have all the memory that they claim */

static void forget_views(void) {
  for (int i = 0; i < num_views; i++) {
    free(views[i].memory);
    free(views[i].before);
  }
  num_views = 0;
}

/* Bytes from the first element to the end of the last; -1 if no memory can be that large. */
static int64_t bytes_of(const moelora_tensor *t) {
  if (t->ndim < 0 || t->ndim > MOELORA_MAX_DIMS || (int)t->dtype < 0 || t->dtype > MOELORA_U8)
    return -1;
  double last = 0; /* exact where it matters */
  bool empty = false;
  for (int32_t i = 0; i < t->ndim; i++) {
    if (t->size[i] < 0 || (t->size[i] > 1 && t->stride[i] < 0))
      return -1;
    empty = empty || t->size[i] == 0;
    last += t->size[i] > 1 ? (double)(t->size[i] - 1) * (double)t->stride[i] : 0;
  }
  double bytes = empty ? 0 : (last + 1) * (double)dtype_bytes(t->dtype);
  return bytes > 0x1p60 ? INT64_MAX : (int64_t)bytes;
}

static int64_t any_size(void) {
  static const int64_t odd[] = {
      -1,        0,        1, 2, 3, 63, 64, 65, INT32_MAX, (int64_t)1 << 31, (int64_t)1 << 62,
      INT64_MAX, INT64_MIN};
  return odd[random_in(0, sizeof odd / sizeof *odd - 1)];
}

static void bump(int64_t *value, int64_t by) { /* wraps */
  *value = (int64_t)((uint64_t)*value + (uint64_t)by);
}

static void disturb_view(moelora_tensor *t) {
  int32_t dim = (int32_t)random_in(0, MOELORA_MAX_DIMS - 1);
  switch (random_in(0, 7)) {
  case 0:
    t->size[dim] = any_size();
    break;
  case 1:
    bump(&t->size[dim], random_in(-1, 1));
    break;
  case 2:
    t->stride[dim] = any_size();
    break;
  case 3:
    bump(&t->stride[dim], random_in(-2, 8));
    break;
  case 4:
    t->ndim = (int32_t)(one_in(4) ? any_size() : t->ndim + (int64_t)random_in(-1, 1));
    break;
  case 5:
    t->dtype = (moelora_dtype)random_in(-1, 7);
    break;
  case 6:
    *t = absent;
    break;
  default: /* one step wider per row */
    for (int32_t i = 0; i + 1 < t->ndim && i < MOELORA_MAX_DIMS; i++)
      bump(&t->stride[i], t->stride[i] / 2);
  }
}

/* Ids near the limits of their range; arbitrary bits for other data. */
static void fill(const owned *o, bool ids) {
  for (size_t i = 0; i < o->bytes; i++)
    o->memory[i] = (unsigned char)random_bits();
  if (!ids || one_in(4))
    return;
  for (size_t i = 0; i + 4 <= o->bytes; i += 4) {
    int32_t id = (int32_t)(one_in(16) ? any_size() : random_in(-2, 6));
    memcpy(o->memory + i, &id, 4);
  }
}

/* Allocates the memory of a view. The pointer may also be wrong: NULL, misaligned, or another
 * view's. */
static void back(moelora_tensor *t, bool output) {
  if (!t->data) /* absent */
    return;
  int64_t bytes = bytes_of(t);
  bool huge = bytes < 0 || bytes > LARGEST;
  backed = backed && !huge;
  owned *o = &views[num_views++];
  *o = (owned){.view = t, .output = output, .bytes = huge ? 0 : (size_t)bytes};
  bool odd_address = one_in(200);
  o->bytes += odd_address ? 1 : 0;
  o->memory = malloc(o->bytes ? o->bytes : 1);
  fill(o, t->dtype == MOELORA_I32 || t->dtype == MOELORA_I64);
  t->data = o->memory + (odd_address ? 1 : 0);
  if (one_in(200))
    t->data = NULL;
  if (one_in(200) && num_views > 1) {
    const owned *other = &views[random_in(0, num_views - 2)];
    t->data = other->memory;
    backed = backed && other->bytes >= o->bytes;
  }
}

static void remember_outputs(void) {
  for (int i = 0; i < num_views; i++) {
    owned *o = &views[i];
    if (o->output && o->bytes) {
      o->before = malloc(o->bytes);
      memcpy(o->before, o->memory, o->bytes);
    }
  }
}

static void check_status(const char *name, moelora_status status, bool ran) {
  bool has_message = *moelora_error_message() != '\0';
  if (has_message != (status != MOELORA_OK))
    STOP("%s: status %d with the message '%s'", name, (int)status, moelora_error_message());
  for (int i = 0; i < num_views; i++) {
    const owned *o = &views[i];
    if (status == MOELORA_OK && o->view->data && bytes_of(o->view) < 0)
      STOP("%s: accepted a view that no memory can hold", name);
    if ((status != MOELORA_OK || !ran) && o->before && memcmp(o->before, o->memory, o->bytes))
      STOP("%s: wrote to an output, status %d: %s", name, (int)status, moelora_error_message());
  }
}

/* ---- where ---- */

static moelora_exec any_exec(void) {
  moelora_exec exec = {.device = MOELORA_CPU};
  if (one_in(100))
    exec.device = (moelora_device)random_in(-1, 3);
  if (one_in(100))
    exec.device_index = (int32_t)any_size();
  if (one_in(100))
    exec.num_threads = (int32_t)any_size();
  return exec;
}

/* Exactly the workspace that was requested, at the end of its allocation. */
static moelora_exec with_workspace(moelora_exec exec, size_t bytes, unsigned char **memory) {
  *memory = aligned_alloc(256, (bytes + 511) / 256 * 256);
  exec.workspace = *memory;
  exec.workspace_bytes = bytes;
  if (one_in(50))
    exec.workspace_bytes -= bytes ? 1 : 0;
  if (one_in(50))
    exec.workspace = *memory + 8;
  return exec;
}

#define RUN(NAME, ARGS)                                                                            \
  do {                                                                                             \
    moelora_exec exec_ = any_exec();                                                               \
    size_t bytes_ = 0;                                                                             \
    remember_outputs();                                                                            \
    moelora_status status_ = NAME##_bytes(ARGS, &exec_, &bytes_);                                  \
    check_status("prepare_" #NAME, status_, false);                                                \
    if (backed && bytes_ <= SPACE) {                                                               \
      unsigned char *memory_;                                                                      \
      exec_ = with_workspace(exec_, bytes_, &memory_);                                             \
      moelora_status second_ = call_##NAME(ARGS, &exec_);                                          \
      check_status(#NAME, second_, true);                                                          \
      if (status_ != MOELORA_OK && second_ == MOELORA_OK)                                          \
        STOP(#NAME " ran what prepare refused");                                                   \
      runs += second_ == MOELORA_OK;                                                               \
      free(memory_);                                                                               \
    }                                                                                              \
  } while (0)

static long long runs;
