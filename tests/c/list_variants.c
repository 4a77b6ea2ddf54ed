/* One line per kernel variant of this build: its name, and whether this machine runs it. */
#include <stdio.h>

#include "moelora.h"

int main(void) {
  const char *name;
  for (int32_t i = 0; (name = moelora_variant_name(i)); i++)
    printf("%s %s\n", name, moelora_variant_usable(i) ? "usable" : "unusable");
  return 0;
}
