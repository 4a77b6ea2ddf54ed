/* What plans weigh against each other, in nanoseconds on the device at hand.
 *
 * Where two ways differ in the bytes that they move and in their launches, a launch takes about as
 * long on any GPU, and bytes take as long as its memory needs. On GPUs whose choices were measured
 * the figures are what they were measured with, whatever the driver says of their memory. */
#include "core/plan.h"

/* Of bytes that kernels move, in use: less than the peak. */
#define USUAL_BYTES_PER_NS 4000.
#define SHARE_OF_PEAK 0.82

/* H200. Other GPUs of its kind have its choices until they are measured. */
static const struct {
  int32_t compute_capability, num_units;
  double bytes_per_ns;
} measured[] = {{90, 132, USUAL_BYTES_PER_NS}};

double moelora_memory_ns(const moelora_device_info *device, double bytes) {
  for (size_t i = 0; i < sizeof measured / sizeof *measured; i++)
    if (measured[i].compute_capability == device->compute_capability &&
        measured[i].num_units == device->num_units)
      return bytes / measured[i].bytes_per_ns;
  if (device->memory_bytes_per_us == 0)
    return bytes / USUAL_BYTES_PER_NS;
  return bytes / (SHARE_OF_PEAK * (double)device->memory_bytes_per_us / 1e3);
}
