#include "core/log.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static moelora_log_level level;

static void read_level(void) {
  const char *word = getenv("MOELORA_LOG");
  if (!word || !*word)
    return;
  if (strcmp(word, "plan") == 0)
    level = MOELORA_LOG_PLAN;
  else if (strcmp(word, "shapes") == 0)
    level = MOELORA_LOG_SHAPES;
  else
    fprintf(stderr, "moelora: MOELORA_LOG=%.64s: wanted plan or shapes\n", word);
}

moelora_log_level moelora_log(void) {
  pthread_once(&once, read_level);
  return level;
}
