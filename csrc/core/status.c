/* The error message of a thread, and failures that all backends report. */
#include <stdarg.h>
#include <stdio.h>

#include "core/backend.h"

static _Thread_local char message[512];

const char *moelora_error_message(void) {
  return message;
}

void moelora_clear_error(void) {
  message[0] = '\0';
}

moelora_status moelora_fail(moelora_status status, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(message, sizeof message, format, args);
  va_end(args);
  return status;
}

moelora_status moelora_no_kernel(const char *variant, const char *why) {
  return moelora_fail(MOELORA_UNSUPPORTED, "%s %s: a mistake in moelora's plan", variant, why);
}
