/* Variants that the API or the environment forces. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/plan.h"

static pthread_once_t environment_once = PTHREAD_ONCE_INIT;
static _Atomic(const moelora_variant *) forced[MOELORA_ROLES];
static _Atomic(const char *) forced_wrong; /* error in MOELORA_FORCE_VARIANT, or NULL */
static char environment[512]; /* its value when it was read: a process may change the variable */

static const char unknown[] = "no such variant";

/* Parses a list of variant names into at most one variant per role. Returns NULL, or an error. */
static const char *parse_names(const char *names,
                               const moelora_variant *(*variants)[MOELORA_ROLES]) {
  memset(*variants, 0, sizeof *variants);
  for (const char *name = names;; name++) {
    const size_t length = strcspn(name, ",");
    const moelora_variant *variant = moelora_find_variant(name, length);
    if (!variant)
      return unknown;
    if ((*variants)[variant->role])
      return "two variants of one role";
    (*variants)[variant->role] = variant;
    name += length;
    if (!*name)
      return NULL;
  }
}

static void force(const moelora_variant *const *variants) {
  for (int32_t role = 0; role < MOELORA_ROLES; role++)
    forced[role] = variants ? variants[role] : NULL;
}

static void read_environment(void) {
  const char *names = getenv("MOELORA_FORCE_VARIANT");
  if (names && *names) {
    const moelora_variant *variants[MOELORA_ROLES];
    snprintf(environment, sizeof environment, "%s", names);
    forced_wrong = parse_names(names, &variants);
    force(forced_wrong ? NULL : variants);
  }
}

moelora_status moelora_force_variant(const char *names) {
  moelora_clear_error();
  pthread_once(&environment_once, read_environment);
  const moelora_variant *variants[MOELORA_ROLES];
  const char *wrong = names ? parse_names(names, &variants) : NULL;
  MOELORA_REQUIRE(wrong != unknown, "variant '%s' does not exist", names);
  MOELORA_REQUIRE(!wrong, "'%s': %s", names, wrong);
  force(names ? variants : NULL);
  forced_wrong = NULL;
  return MOELORA_OK;
}

moelora_status moelora_check_environment(void) {
  pthread_once(&environment_once, read_environment);
  const char *wrong = forced_wrong;
  MOELORA_REQUIRE(!wrong, "MOELORA_FORCE_VARIANT is '%s': %s", environment, wrong);
  return moelora_check_limit();
}

const moelora_variant *moelora_forced(moelora_role role, moelora_dtype dtype,
                                      const moelora_device_info *device) {
  pthread_once(&environment_once, read_environment);
  const moelora_variant *variant = forced[role];
  return variant && variant->dtype == dtype && moelora_variant_runs_on(variant, device) ? variant
                                                                                        : NULL;
}

bool moelora_is_forced(const moelora_variant *variant) {
  return variant && forced[variant->role] == variant;
}
