/* Returns the names of enumerators, for messages. */
#include "core/check.h"
#include "core/format.h"

#define NAME(dtype) #dtype,
static const char *const dtype_names[] = {MOELORA_DTYPES(NAME)};
static const char *const foreign_names[] = {MOELORA_FOREIGN_DTYPES(NAME) "of another library"};
#undef NAME

bool moelora_is_foreign(moelora_dtype dtype) {
  const size_t place = (size_t)dtype - MOELORA_FOREIGN;
  return place < sizeof foreign_names / sizeof *foreign_names;
}

const char *moelora_dtype_name(moelora_dtype dtype) {
  return moelora_is_foreign(dtype) ? foreign_names[dtype - MOELORA_FOREIGN]
         : (size_t)dtype < sizeof dtype_names / sizeof *dtype_names ? dtype_names[dtype]
                                                                    : "unknown";
}

const char *moelora_format_name(moelora_format format) {
  static const char *const names[] = {
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, ...) TEXT,
#include "formats.inc"
  };
  return moelora_is_format(format) ? names[format] : "unknown";
}

int32_t moelora_tile_bytes(moelora_format format) {
  return moelora_is_format(format) ? moelora_tile_size(format) : 0;
}

const char *moelora_kernel_name(moelora_kernel_format kernel) {
  static const char *const names[] = {
#define MOELORA_KERNEL(NAME, TEXT, FORMAT) TEXT,
#include "formats.inc"
  };
  return kernel == MOELORA_KERNEL_NONE ? "unknown" : names[kernel];
}

const char *moelora_order_name(moelora_row_order order) {
  return order == MOELORA_ROWS_GATE_UP       ? "GATE_UP"
         : order == MOELORA_ROWS_INTERLEAVED ? "INTERLEAVED"
                                             : "PLAIN";
}
