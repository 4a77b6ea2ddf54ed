/* The CUDA runtime API that the sources use, on the engine. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

#define VECTORS(NAME, TYPE)                                                                        \
  struct alignas(8) NAME##2 {                                                                      \
    TYPE x, y;                                                                                     \
  };                                                                                               \
  struct alignas(16) NAME##4 {                                                                     \
    TYPE x, y, z, w;                                                                               \
  };                                                                                               \
  inline NAME##2 make_##NAME##2(TYPE x, TYPE y) {                                                  \
    return {x, y};                                                                                 \
  }                                                                                                \
  inline NAME##4 make_##NAME##4(TYPE x, TYPE y, TYPE z, TYPE w) {                                  \
    return {x, y, z, w};                                                                           \
  }
VECTORS(int, int)
VECTORS(uint, unsigned)
VECTORS(float, float)
#undef VECTORS

template <class A, class B> constexpr auto min(A a, B b) -> decltype(a + b) {
  using C = decltype(a + b);
  return (C)a < (C)b ? (C)a : (C)b;
}
template <class A, class B> constexpr auto max(A a, B b) -> decltype(a + b) {
  using C = decltype(a + b);
  return (C)a > (C)b ? (C)a : (C)b;
}

/* Reinterprets the bits as another type. */
template <class To, class From> To same_bits(From v) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &v, sizeof to);
  return to;
}
inline float __uint_as_float(uint32_t v) {
  return same_bits<float>(v);
}
inline float __int_as_float(int32_t v) {
  return same_bits<float>(v);
}
inline uint32_t __float_as_uint(float v) {
  return same_bits<uint32_t>(v);
}
inline int __popc(uint32_t v) {
  return __builtin_popcount(v);
}
inline int __ffs(int v) {
  return __builtin_ffs(v);
}
inline int __clz(int v) {
  return v ? __builtin_clz((unsigned)v) : 32;
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return (uint32_t)((uint64_t)a * b >> 32);
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t s) {
  const uint64_t both = (uint64_t)y << 32 | x;
  uint32_t r = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t byte = (uint32_t)(both >> 8 * (s >> 4 * i & 7)) & 0xff; // no signs, as CUDA's
    r |= byte << 8 * i;
  }
  return r;
}
inline uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t c) {
  for (int i = 0; i < 4; i++)
    c += (a >> 8 * i & 0xff) * (b >> 8 * i & 0xff);
  return c;
}
inline float __expf(float v) {
  return expf(v);
}
template <class T> T __ldcg(const T *p) {
  return *p;
}
template <class T> T __ldcs(const T *p) {
  return *p;
}

inline void __threadfence_block() {}
inline void __syncthreads() {
  emulation::barrier_sync(0, (int)blockDim.x);
}
inline void __syncwarp(uint32_t mask = ~0u) {
  emulation::meet(mask, [](void *const(&)[32], uint32_t) {}, nullptr);
}

namespace emulation {
template <class T> struct Shuffled {
  T value, result;
  int lane;
};
/* Returns the value of lane `lane`, or the own value if it does not exist. */
template <class T> T shuffle(uint32_t mask, T value, int lane) {
  Shuffled<T> mine = {value, value, lane};
  meet(
      mask,
      [](void *const(&lanes)[32], uint32_t mask) {
        for (int i = 0; i < 32; i++)
          if (mask >> i & 1) {
            auto *to = (Shuffled<T> *)lanes[i];
            if (!(mask >> to->lane & 1))
              fail("a shuffle from lane %d, which is not there", to->lane);
            to->result = ((Shuffled<T> *)lanes[to->lane])->value;
          }
      },
      &mine);
  return mine.result;
}
template <class T, class F> T reduce(uint32_t mask, T value, F) {
  Shuffled<T> mine = {value, value, 0};
  meet(
      mask,
      [](void *const(&lanes)[32], uint32_t mask) {
        T all = {};
        bool first = true;
        for (int i = 0; i < 32; i++)
          if (mask >> i & 1) {
            const T v = ((Shuffled<T> *)lanes[i])->value;
            all = first ? v : F::of(all, v);
            first = false;
          }
        for (int i = 0; i < 32; i++)
          if (mask >> i & 1)
            ((Shuffled<T> *)lanes[i])->result = all;
      },
      &mine);
  return mine.result;
}
struct Add {
  template <class T> static T of(T a, T b) { return a + b; }
};
struct Max {
  template <class T> static T of(T a, T b) { return a > b ? a : b; }
};
struct Or {
  template <class T> static T of(T a, T b) { return a | b; }
};
inline int lane() {
  return (int)(threadIdx.x % 32);
}
} // namespace emulation

/* Within groups of `width` lanes. */
template <class T> T __shfl_sync(uint32_t mask, T v, int lane, int width = 32) {
  return emulation::shuffle(mask, v, emulation::lane() / width * width + (lane & (width - 1)));
}
template <class T> T __shfl_xor_sync(uint32_t mask, T v, int bits) {
  return emulation::shuffle(mask, v, emulation::lane() ^ bits);
}
template <class T> T __shfl_up_sync(uint32_t mask, T v, unsigned by, int width = 32) {
  const int lane = emulation::lane();
  return emulation::shuffle(mask, v, lane % width >= (int)by ? lane - (int)by : lane);
}
inline uint32_t __ballot_sync(uint32_t mask, bool p) {
  return emulation::reduce(mask, (uint32_t)p << emulation::lane(), emulation::Or());
}
inline int __any_sync(uint32_t mask, bool p) {
  return __ballot_sync(mask, p) != 0;
}
inline int __all_sync(uint32_t mask, bool p) {
  return !__any_sync(mask, !p);
}
template <class T> T __reduce_add_sync(uint32_t mask, T v) {
  return emulation::reduce(mask, v, emulation::Add());
}
template <class T> T __reduce_max_sync(uint32_t mask, T v) {
  return emulation::reduce(mask, v, emulation::Max());
}
template <class T> uint32_t __match_any_sync(uint32_t mask, T v) {
  struct Match {
    T value;
    uint32_t same;
  } mine = {v, 0};
  emulation::meet(
      mask,
      [](void *const(&lanes)[32], uint32_t mask) {
        for (int i = 0; i < 32; i++)
          for (int j = 0; j < 32; j++)
            if ((mask >> i & 1) && (mask >> j & 1) &&
                ((Match *)lanes[i])->value == ((Match *)lanes[j])->value)
              ((Match *)lanes[i])->same |= 1u << j;
      },
      &mine);
  return mine.same;
}

/* Sets *p to NEW, of its value `old` and of v; returns `old`. */
#define ATOMIC(NAME, NEW)                                                                          \
  template <class T, class V> T NAME(T *p, V v) {                                                  \
    const T old = *p;                                                                              \
    *p = (T)(NEW);                                                                                 \
    return old;                                                                                    \
  }
ATOMIC(atomicAdd, old + (T)v)
ATOMIC(atomicSub, old - (T)v)
ATOMIC(atomicOr, old | (T)v)
ATOMIC(atomicMax, old > (T)v ? old : (T)v)
#undef ATOMIC

/* ---- host side ---- */

typedef enum {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorCooperativeLaunchTooLarge = 82
} cudaError_t;
typedef void *cudaStream_t;
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrL2CacheSize,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrClockRate,
  cudaDevAttrMemoryClockRate,
  cudaDevAttrGlobalMemoryBusWidth
};
struct cudaFuncAttributes {
  int ptxVersion;
  size_t sharedSizeBytes;
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID {
  cudaLaunchAttributeCooperative,
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeProgrammaticStreamSerialization
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    struct {
      unsigned x, y, z;
    } clusterDim;
    int cooperative, programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute *attrs = nullptr;
  unsigned numAttrs = 0;
};

namespace emulation {
inline int setting_of(const char *name, int other) {
  const char *value = getenv(name);
  return value && *value ? atoi(value) : other;
}
inline int capability() {
  return setting_of("EMULATION_CAPABILITY", 90);
}
inline int num_devices() {
  return setting_of("EMULATION_DEVICES", 1);
}
inline int num_sms() {
  return setting_of("EMULATION_SMS", 4);
}
} // namespace emulation

inline const char *cudaGetErrorName(cudaError_t) {
  return "emulated";
}
inline const char *cudaGetErrorString(cudaError_t) {
  return "emulated";
}
inline cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int *device) {
  *device = emulation::current_device;
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceCount(int *count) {
  *count = emulation::num_devices();
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= emulation::num_devices())
    return cudaErrorInvalidValue;
  emulation::current_device = device;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr name, int) {
  const int capability = emulation::capability();
  const int shared = capability == 80 ? 163 << 10 : (int)emulation::kDynamic;
  *value = name == cudaDevAttrComputeCapabilityMajor         ? capability / 10
           : name == cudaDevAttrComputeCapabilityMinor       ? capability % 10
           : name == cudaDevAttrMultiProcessorCount          ? emulation::num_sms()
           : name == cudaDevAttrL2CacheSize                  ? 50 << 20
           : name == cudaDevAttrMaxSharedMemoryPerBlockOptin ? shared
                                                             : 0; /* clocks, width of the bus */
  return cudaSuccess;
}
template <class F> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *to, F) {
  *to = {emulation::capability(), 0};
  return cudaSuccess;
}
template <class F> cudaError_t cudaFuncSetAttribute(F, cudaFuncAttribute, int bytes) {
  return bytes <= (int)emulation::kDynamic ? cudaSuccess : cudaErrorInvalidValue;
}
template <class F>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, F, int threads,
                                                          size_t shared) {
  const size_t of_shared = emulation::kDynamic / (shared + 1024), of_threads = 2048 / threads;
  *count = (int)(of_shared < of_threads ? of_shared : of_threads);
  *count = *count > 2 ? 2 : *count < 1 ? 1 : *count;
  return cudaSuccess;
}
template <class F>
cudaError_t cudaOccupancyMaxActiveClusters(int *count, F, const cudaLaunchConfig_t *config) {
  *count = emulation::num_sms() / (int)config->gridDim.x;
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t) {
  memset(to, value, bytes);
  return cudaSuccess;
}
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
  emulation::Launch launch;
  launch.grid = config->gridDim;
  launch.block = config->blockDim;
  launch.shared = config->dynamicSmemBytes;
  for (unsigned i = 0; i < config->numAttrs; i++) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
      launch.cluster = config->attrs[i].val.clusterDim.x;
    if (config->attrs[i].id == cudaLaunchAttributeCooperative)
      launch.cooperative = true;
  }
  emulation::run_grid(launch, [=] { kernel(arguments...); });
  return cudaSuccess;
}

typedef enum { cudaDriverEntryPointSuccess } cudaDriverEntryPointQueryResult;
enum { cudaEnableDefault };
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version,
                                             int flags, cudaDriverEntryPointQueryResult *result);
