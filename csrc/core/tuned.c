/* Tuned plans: measured variants, which take precedence over the built-in choices.
 *
 * Rows are appended under a lock and read without one: readers only use rows below the count, which
 * is increased after a row is complete. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "core/plan.h"

enum { MAX_ROWS = 1024 };

typedef struct row {
  moelora_tuned_plan key; /* `key.variant` is unset: the caller's string may be freed */
  const moelora_variant *variant;
} row;

static row rows[MAX_ROWS];
static _Atomic int32_t num_rows;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_flag warned = ATOMIC_FLAG_INIT;

static bool is_device(const moelora_tuned_plan *key, const moelora_device_info *device) {
  return key->device == device->device &&
         (device->device == MOELORA_CPU || (key->compute_capability == device->compute_capability &&
                                            key->num_units == device->num_units));
}

static moelora_status check_row(const moelora_tuned_plan *plan, const moelora_variant *variant) {
  const struct {
    const char *name;
    int64_t value;
  } sizes[] = {
      {"num_experts", plan->num_experts},   {"top_k", plan->top_k},   {"hidden", plan->hidden},
      {"intermediate", plan->intermediate}, {"tokens", plan->tokens},
  };
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
    MOELORA_REQUIRE(sizes[i].value >= 1, "plan.%s is %lld, expected at least 1", sizes[i].name,
                    (long long)sizes[i].value);
  MOELORA_REQUIRE(variant, "variant '%s' does not exist", plan->variant);
  MOELORA_REQUIRE(variant->device == plan->device &&
                      (variant->dtype == plan->dtype || variant->dtype == MOELORA_I32),
                  "variant '%s' is for another device or another dtype", plan->variant);
  return MOELORA_OK;
}

moelora_status moelora_add_tuned_plan(const moelora_tuned_plan *plan) {
  moelora_clear_error();
  MOELORA_REQUIRE(plan && plan->variant, "plan or plan.variant is NULL");
  const moelora_variant *variant = moelora_find_variant(plan->variant, strlen(plan->variant));
  MOELORA_TRY(check_row(plan, variant));
  pthread_mutex_lock(&lock);
  int32_t at = num_rows;
  if (at < MAX_ROWS) {
    rows[at] = (row){*plan, variant};
    rows[at].key.variant = NULL;
    num_rows = at + 1;
  }
  pthread_mutex_unlock(&lock);
  MOELORA_REQUIRE(at < MAX_ROWS, "there are %d tuned plans, expected at most %d", at + 1, MAX_ROWS);
  return MOELORA_OK;
}

void moelora_clear_tuned_plans(void) {
  num_rows = 0;
}

/* Returns whether `candidate` replaces `best`, an older plan, for a layer with `tokens` tokens. The
 * best plan is the smallest one whose key.tokens is at least `tokens`, or the largest one if all
 * are smaller. A newer plan replaces an equal one. */
static bool is_better(const row *candidate, const row *best, int64_t tokens) {
  if (!best)
    return true;
  int64_t new = candidate->key.tokens, old = best->key.tokens;
  if ((new >= tokens) != (old >= tokens))
    return new >= tokens;
  return new >= tokens ? new <= old : new >= old;
}

static moelora_role role_of(const moelora_variant *variant) {
  return variant->role == MOELORA_ROLE_LAYER ? MOELORA_ROLE_GEMM : variant->role;
}

const moelora_variant *moelora_tuned_variant(const moelora_experts_problem *problem,
                                             const moelora_device_info *device, moelora_role role) {
  const int32_t count = num_rows;
  const row *best = NULL;
  bool known = false;
  for (int32_t i = 0; i < count; i++) {
    const moelora_tuned_plan *key = &rows[i].key;
    if (!is_device(key, device))
      continue;
    known = true;
    if (role_of(rows[i].variant) == role && key->dtype == problem->dtype &&
        key->num_experts == problem->routes.num_experts && key->top_k == problem->routes.top_k &&
        key->hidden == problem->hidden && key->intermediate == problem->intermediate &&
        is_better(&rows[i], best, problem->routes.num_tokens))
      best = &rows[i];
  }
  if (count && !known && device->device == MOELORA_CUDA && !atomic_flag_test_and_set(&warned))
    fprintf(stderr,
            "moelora: the tuned plans are for other devices than this one (sm_%d, %d SMs); the "
            "built-in table decides\n",
            device->compute_capability, device->num_units);
  return best ? best->variant : NULL;
}
