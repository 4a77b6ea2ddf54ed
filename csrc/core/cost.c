/* Costs that plans compare, in nanoseconds on the device.
 *
 * To compare launches with memory traffic, plans assume that a launch takes the same time on any
 * GPU. Bytes are divided by the bandwidth: as measured, or a share of the peak if that is known.
 *
 * The time of a projection's tile follows from five resources: memory, L2, tensor cores, shared
 * memory, and the ALUs that dequantize. The slowest resource hides most of the time of the others,
 * more of it if several CTAs share an SM. The result ranks tiles; it does not predict the time of a
 * kernel. */
#include <math.h>

#include "core/format.h"
#include "core/plan_tile.h"

/* Bandwidth that kernels attain: if the peak is unknown, and as a share of the peak. */
#define USUAL_BYTES_PER_NS 4000.
#define SHARE_OF_PEAK 0.82

/* The tables were measured on an H200, as sm_90 and as sm_80. H100 SXM and GH200 have the same chip
 * and match it, but have not been measured. */
bool moelora_is_measured(const moelora_device_info *device) {
  const int32_t capability = device->compute_capability;
  return device->device == MOELORA_CUDA && (capability == 90 || capability == 80) &&
         device->num_units == 132;
}

double moelora_memory_ns(const moelora_device_info *device, double bytes) {
  if (moelora_is_measured(device) || device->memory_bytes_per_us == 0)
    return bytes / USUAL_BYTES_PER_NS;
  return bytes / (SHARE_OF_PEAK * (double)device->memory_bytes_per_us / 1e3);
}

/* ---- tile of a projection ---- */

/* Rates of one SM per clock, and shares. tensor_flops() has dense 16-bit peaks from data sheets;
 * the figures below are fitted to the measured tables of an H200 (tests/plans/test_plan_tiles.py
 * counts how often model and tables agree). */
#define L2_BYTES 20.7
#define SHARED_BYTES 116.  /* the peak is 128 */
#define DEQUANTIZED 25.    /* weights */
#define TENSOR_SHARE 0.81  /* of the peak: wgmma, or mma.sync on GPUs with nothing newer */
#define MMA_SYNC_SHARE 0.5 /* of the peak, mma.sync on newer GPUs */
#define FP8_RATE 1.6       /* relative to 16-bit, with promotion of partial sums */
#define UNHIDDEN 0.5       /* share of the faster resources' time that adds to the slowest's */
#define USUAL_MHZ 1830.

static double tensor_flops(const moelora_variant *v, const moelora_device_info *device) {
  const int32_t capability = device->compute_capability;
  const double fp8 = v->needs == MOELORA_SM90 && moelora_is_e4m3_kernel(v->format) ? FP8_RATE : 1;
  if (capability >= 90 && capability < 120) /* no kernels for Blackwell's own instructions */
    return 4096 * (v->needs == MOELORA_SM90 ? fp8 * TENSOR_SHARE : MMA_SYNC_SHARE);
  return TENSOR_SHARE * (capability == 80 ? 2048 : 1024);
}

/* Returns the number of CTAs per SM that hide each other's latency: two for Hopper kernels with 128
 * weight rows, if shared memory holds the stages of both and 2 KiB each, else one. Portable kernels
 * count as two: eight warps, in one CTA or in two. */
static double resident(const moelora_variant *v, const moelora_device_info *device) {
  const bool fit = 2 * (moelora_pipeline_bytes(v) + 2048) <= device->shared_bytes + 1024;
  return v->needs != MOELORA_SM90 || (moelora_shares_sm(v->block_n) && fit) ? 2 : 1;
}

/* Estimates the number of blocks of an expert with about `rows` rows (Poisson, approximated by a
 * normal distribution): 1, plus for each j >= 1 the probability of more than j * block rows. If the
 * deviation exceeds half a block, a partial block adds 1/2 on average. */
static double expected_blocks(double rows, double block) {
  const double deviation = sqrt(rows);
  double blocks = 1;
  if (2 * deviation > block)
    return rows / block + 0.5;
  for (double more = block; more < rows + 4.5 * deviation; more += block)
    blocks += 0.5 * erfc((more + 0.5 - rows) / sqrt(2 * rows));
  return blocks;
}

/* Estimates how many rows a block multiplies: its rows, rounded up to 16 (token-major: to 64), but
 * at least half of block_m. */
static double expected_width(const moelora_variant *v, double rows_of_block) {
  const bool first = moelora_is_token_major(v->format, v->block_m) && v->needs == MOELORA_SM90;
  const double step = first ? 64 : 16;
  const double least = first ? 64 : (v->block_m + 31) / 32 * 16;
  return fmax(least, fmin(v->block_m, rows_of_block + step / 2));
}

double moelora_tile_ns(const moelora_variant *v, double rows, const moelora_device_info *device) {
  const bool native = moelora_is_native_kernel(v->format);
  const bool fp8_x = moelora_is_e4m3_kernel(v->format) && v->needs == MOELORA_SM90;
  const double clocks = device->num_units *
                        (device->clock_mhz > 0 ? device->clock_mhz : USUAL_MHZ) /
                        1e3; /* of all SMs, per ns */
  const double weight =
      native ? 2 : (double)moelora_step_bytes(v->format) / (MOELORA_PACK * MOELORA_PACK);
  const double x = fp8_x ? 1 : 2;
  const double blocks = expected_blocks(rows, v->block_m);
  const double products = blocks * expected_width(v, rows / blocks);
  const double parts[] = {
      moelora_memory_ns(device, weight),
      (blocks * weight / v->cluster + products * x / v->block_n) / (L2_BYTES * clocks),
      2 * products / (tensor_flops(v, device) * clocks),
      /* shared memory: weights once per block, tokens once per 64 weight rows */
      ((native || fp8_x ? blocks * weight : 0) + products * x / 64) / (SHARED_BYTES * clocks),
      native || fp8_x ? 0 : blocks / (DEQUANTIZED * clocks),
  };
  double sum = 0, longest = 0;
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
    sum += parts[i];
    longest = fmax(longest, parts[i]);
  }
  return 1e3 * (longest + UNHIDDEN / resident(v, device) * (sum - longest));
}
