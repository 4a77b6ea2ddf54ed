#include "operations.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

namespace emulation {
namespace {

float value_of(Type type, const void *at) {
  if (type == E4M3)
    return from_e4m3(*(const uint8_t *)at);
  uint16_t bits;
  memcpy(&bits, at, 2);
  return type == BF16 ? __uint_as_float((uint32_t)bits << 16) : __half2float(__half{bits});
}

/* Rounds inexact sums to odd, so that rounding again rounds only once. */
double add_to_odd(double a, double b) {
  const double sum = a + b, other = sum - a, rest = (a - (sum - other)) + (b - other);
  if (rest == 0 || rest != rest || isinf(sum))
    return sum;
  uint64_t bits;
  memcpy(&bits, &sum, 8);
  if ((rest < 0) != (sum < 0))
    bits--; /* toward zero, if the exact sum is there */
  bits |= 1;
  double odd;
  memcpy(&odd, &bits, 8);
  return odd;
}

float to_float_odd(double v) {
  float f = (float)v;
  if (f == v || v != v || isinf(f))
    return f;
  uint32_t bits = __float_as_uint(f);
  if (fabs((double)f) > fabs(v))
    bits--;
  return __uint_as_float(bits | 1);
}

/* d[16, n] += a[16, k] b[k, n]; lane t holds rows t/4 and t/4 + 8, as the instructions specify. */
__attribute__((target_clones("default", "avx2", "avx512f"))) void
multiply(int k, int n, const double *a, const double *b, float *const *d, bool add) {
  for (int row = 0; row < 16; row++) {
    double sums[256] = {};
    for (int i = 0; i < k; i++) {
      const double v = a[row * k + i];
      for (int column = 0; column < n; column++)
        sums[column] += v * b[i * n + column];
    }
    for (int column = 0; column < n; column++) {
      float *to = &d[row % 8 * 4 + column % 8 / 2][column / 8 * 4 + row / 8 * 2 + column % 2];
      *to = (float)(sums[column] + (add ? (double)*to : 0.));
    }
  }
}

/* Rows t/4 and t/4 + 8; columns 2(t%4) and the next, and those 8 further on. */
void registers_to_rows(Type type, const uint32_t (&a)[32][4], double *rows) {
  for (int t = 0; t < 32; t++)
    for (int i = 0; i < 4; i++)
      for (int half = 0; half < 2; half++) {
        const uint16_t bits = (uint16_t)(a[t][i] >> 16 * half);
        rows[(t / 4 + i % 2 * 8) * 16 + i / 2 * 8 + t % 4 * 2 + half] = value_of(type, &bits);
      }
}

/* The swizzle XORs the index of 16-byte chunks within rows of `span` bytes, 128, 64 or 32, with
 * address bits 7 and up; 0: none. */
uint32_t swizzled(uint32_t address, uint32_t span) {
  return span ? address ^ (address >> 7 & (span / 16 - 1)) << 4 : address;
}

/* Address of byte `byte` along K of row `row` of a matrix descriptor. */
uint32_t described(uint64_t descriptor, int row, int byte) {
  const uint32_t start = (uint32_t)(descriptor & 0x3fff) << 4;
  const uint32_t atoms = (uint32_t)(descriptor >> 32 & 0x3fff) << 4;
  const int kind = (int)(descriptor >> 62);
  if (kind == 0)
    fail("a matrix descriptor without a swizzle");
  const uint32_t pitch = 256u >> kind;
  return swizzled(
      start + (uint32_t)(row / 8) * atoms + (uint32_t)(row % 8) * pitch + (uint32_t)byte, pitch);
}

void read_rows(Type type, uint64_t descriptor, int first, int count, double *to, int row_stride,
               int column_stride) {
  const int size = type == E4M3 ? 1 : 2, per_chunk = 16 / size;
  for (int row = 0; row < count; row++)
    for (int chunk = 0; chunk < 2; chunk++) {
      const char *from = checked(described(descriptor, first + row, chunk * 16), 16);
      for (int i = 0; i < per_chunk; i++)
        to[row * row_stride + (chunk * per_chunk + i) * column_stride] =
            value_of(type, from + i * size);
    }
}

/* Columns [first, first + 16) over 16 elements of K, in rows of 64 elements with 128-byte swizzle
 * (MN-major). */
void read_columns(Type type, uint64_t descriptor, int first, double *to) {
  if (descriptor >> 62 != 1)
    fail("a transposed matrix without the swizzle of 128 bytes");
  for (int k = 0; k < 16; k++)
    for (int chunk = 0; chunk < 2; chunk++) {
      const char *from = checked(described(descriptor, k, first * 2 + chunk * 16), 16);
      for (int i = 0; i < 8; i++)
        to[(chunk * 8 + i) * 16 + k] = value_of(type, from + i * 2);
    }
}

struct Mma {
  bool is_bf16;
  float *d;
  const uint32_t *a, *b;
};

struct Matrices {
  Move how;
  uint32_t *v;
  int count;
  uint32_t at;
};

struct Product {
  Type type;
  int n;
  float *d;
  const uint32_t *a_registers;
  uint64_t a, b;
  bool add, a_transposed;
};

bool inside(const CUtensorMap &map, const int64_t *at) {
  for (int i = 0; i < map.rank; i++)
    if (at[i] < 0 || at[i] >= (int64_t)map.sizes[i])
      return false;
  return true;
}

/* each(address in shared memory, element or NULL if out of bounds) */
template <class Each>
void for_box(const CUtensorMap &map, const std::array<int, 5> &corner, uint32_t shared, Each each) {
  uint64_t count = 1;
  for (int i = 0; i < map.rank; i++)
    count *= map.box[i];
  for (uint64_t element = 0; element < count; element++) {
    int64_t at[5] = {};
    uint64_t rest = element;
    int64_t offset = 0;
    for (int i = 0; i < map.rank; i++) {
      at[i] = corner[(size_t)i] + (int64_t)(rest % map.box[i]);
      rest /= map.box[i];
      offset += at[i] * (int64_t)(i ? map.strides[i - 1] : map.element_bytes);
    }
    each(swizzled(shared + (uint32_t)element * map.element_bytes, map.swizzle),
         inside(map, at) ? map.data + offset : nullptr);
  }
}

uint32_t box_bytes(const CUtensorMap &map) {
  uint32_t bytes = map.element_bytes;
  for (int i = 0; i < map.rank; i++)
    bytes *= map.box[i];
  return bytes;
}

} // namespace

uint32_t fma_pair(bool is_bf16, uint32_t a, uint32_t b, uint32_t c) {
  const Type type = is_bf16 ? BF16 : F16;
  uint32_t pair = 0;
  for (int half = 0; half < 2; half++) {
    const uint16_t ha = (uint16_t)(a >> 16 * half), hb = (uint16_t)(b >> 16 * half),
                   hc = (uint16_t)(c >> 16 * half);
    const double exact = (double)value_of(type, &ha) * (double)value_of(type, &hb);
    const float sum = to_float_odd(add_to_odd(exact, (double)value_of(type, &hc)));
    const uint32_t bits = is_bf16 ? __float2bfloat16_rn(sum).bits : __float2half_rn(sum).bits;
    pair |= bits << 16 * half;
  }
  return pair;
}

void copy_async(uint32_t to, const void *from, int size, int bytes) {
  if (to % (uint32_t)size || (uintptr_t)from % (uintptr_t)size || bytes < 0 || bytes > size)
    fail("an asynchronous copy of %d of %d bytes from %p to %u", bytes, size, from, to);
  char *at = checked(to, (uint32_t)size);
  add_to_group(COPIES, [=] {
    memset(at, 0, (size_t)size);
    if (bytes)
      memcpy(at, from, (size_t)bytes);
  });
}

void move_matrices(Move how, uint32_t *v, int count, uint32_t at) {
  Matrices mine = {how, v, count, at};
  meet(
      ~0u,
      [](void *const(&lanes)[32], uint32_t) {
        const Matrices first = *(Matrices *)lanes[0];
        for (int i = 0; i < first.count; i++)
          for (int row = 0; row < 8; row++) {
            const uint32_t from = ((Matrices *)lanes[i * 8 + row])->at;
            if (from % 16)
              fail("%s of a row at %u", first.how.loads ? "ldmatrix" : "stmatrix", from);
            char *memory = checked(from, 16);
            for (int column = 0; column < 8; column++, memory += 2) {
              const int x = first.how.transposed ? column : row, y = row + column - x;
              char *held = (char *)&((Matrices *)lanes[x * 4 + y / 2])->v[i] + y % 2 * 2;
              memcpy(first.how.loads ? held : memory, first.how.loads ? memory : held, 2);
            }
          }
      },
      &mine);
}

uint32_t transpose(uint32_t v) {
  uint32_t pair[2] = {v, 0};
  meet(
      ~0u,
      [](void *const(&lanes)[32], uint32_t) {
        for (int t = 0; t < 32; t++)
          for (int half = 0; half < 2; half++) {
            const int row = t % 4 * 2 + half, column = t / 4;
            const uint32_t word = ((uint32_t *)lanes[row * 4 + column / 2])[0];
            ((uint32_t *)lanes[t])[1] |= (word >> column % 2 * 16 & 0xffff) << half * 16;
          }
      },
      pair);
  return pair[1];
}

void mma(bool is_bf16, float *d, const uint32_t *a, const uint32_t *b) {
  Mma mine = {is_bf16, d, a, b};
  meet(
      ~0u,
      [](void *const(&lanes)[32], uint32_t) {
        const Type type = ((Mma *)lanes[0])->is_bf16 ? BF16 : F16;
        uint32_t registers[32][4];
        double rows[16 * 16], columns[16 * 8];
        float *d[32];
        for (int t = 0; t < 32; t++) {
          const Mma &lane = *(Mma *)lanes[t];
          memcpy(registers[t], lane.a, 16);
          d[t] = lane.d;
          for (int i = 0; i < 4; i++) {
            const uint16_t bits = (uint16_t)(lane.b[i / 2] >> i % 2 * 16);
            columns[(i / 2 * 8 + t % 4 * 2 + i % 2) * 8 + t / 4] = value_of(type, &bits);
          }
        }
        registers_to_rows(type, registers, rows);
        multiply(16, 8, rows, columns, d, true);
      },
      &mine);
}

void wgmma(Type type, int n, float *d, const uint32_t *a_registers, uint64_t a, uint64_t b,
           bool add, bool a_transposed) {
  Product mine = {type, n, d, a_registers, a, b, add, a_transposed};
  meet(
      ~0u,
      [](void *const(&lanes)[32], uint32_t) {
        struct All {
          float *d[32];
          uint32_t a[32][4];
        };
        All all;
        const Product p = *(Product *)lanes[0];
        for (int t = 0; t < 32; t++) {
          const Product &lane = *(Product *)lanes[t];
          if (lane.a != p.a || lane.b != p.b || lane.n != p.n)
            fail("lanes of a warp multiply different matrices");
          all.d[t] = lane.d;
          if (p.a_registers)
            memcpy(all.a[t], lane.a_registers, 16);
        }
        const int warp = (int)(threadIdx.x / 32 % 4);
        product([p, all, warp] {
          const int k = p.type == E4M3 ? 32 : 16;
          double rows[16 * 32], columns[32 * 256];
          if (p.a_registers)
            registers_to_rows(p.type, all.a, rows);
          else if (p.a_transposed)
            read_columns(p.type, p.a, warp * 16, rows);
          else
            read_rows(p.type, p.a, warp * 16, 16, rows, k, 1);
          read_rows(p.type, p.b, 0, p.n, columns, 1, p.n);
          multiply(k, p.n, rows, columns, all.d, p.add);
        });
      },
      &mine);
}

static void complete(uint32_t to, uint32_t bytes, uint32_t barrier, bool multicast,
                     std::function<void(char *)> copy) {
  checked(to, bytes);
  checked(barrier, 8);
  for (unsigned rank = 0; rank < (multicast ? 2u : 1u); rank++) {
    char *memory = multicast ? window_of(rank) : window();
    later([=] {
      copy(memory);
      mbarrier_arrived((uint64_t *)(memory + barrier), bytes);
    });
  }
}

void load_bytes(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier, bool multicast) {
  if (to % 16 || (uintptr_t)from % 16 || bytes % 16 || bytes == 0)
    fail("a bulk copy of %u bytes from %p to %u", bytes, from, to);
  complete(to, bytes, barrier, multicast, [=](char *memory) { memcpy(memory + to, from, bytes); });
}

void load_box(uint32_t to, const CUtensorMap &map, std::array<int, 5> at, uint32_t barrier,
              bool multicast) {
  if (to % 128)
    fail("a box for %u", to);
  complete(to, box_bytes(map), barrier, multicast, [=](char *memory) {
    for_box(map, at, to, [&](uint32_t address, const char *element) {
      if (element)
        memcpy(memory + address, element, map.element_bytes);
      else
        memset(memory + address, 0, map.element_bytes);
    });
  });
}

void store_box(const CUtensorMap &map, int c0, int c1, uint32_t from) {
  if (from % 128)
    fail("a box from %u", from);
  checked(from, box_bytes(map));
  const char *memory = window();
  const CUtensorMap copy = map;
  add_to_group(BULK_STORES, [=] {
    for_box(copy, {c0, c1}, from, [&](uint32_t address, char *element) {
      if (element)
        memcpy(element, memory + address, copy.element_bytes);
    });
  });
  commit_group(BULK_STORES);
}

} // namespace emulation

/* Checks the limits that the driver checks. */
static CUresult encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *data,
                       const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                       const cuuint32_t *steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  *map = {};
  map->data = (char *)data;
  map->rank = (uint8_t)rank;
  map->element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8     ? 1
                       : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4
                                                                 : 2;
  map->swizzle = swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 0 : (uint8_t)(16u << swizzle);
  if (rank < 1 || rank > 5 || (uintptr_t)data % 16)
    return CUDA_ERROR_INVALID_VALUE;
  for (cuuint32_t i = 0; i < rank; i++) {
    map->sizes[i] = sizes[i];
    map->box[i] = box[i];
    if (sizes[i] < 1 || sizes[i] > (uint64_t)1 << 32 || box[i] < 1 || box[i] > 256 || steps[i] != 1)
      return CUDA_ERROR_INVALID_VALUE;
    if (i > 0) {
      map->strides[i - 1] = strides[i - 1];
      if (strides[i - 1] % 16 || strides[i - 1] >= (uint64_t)1 << 40)
        return CUDA_ERROR_INVALID_VALUE;
    }
  }
  const uint32_t inner = box[0] * map->element_bytes;
  const bool fits = map->swizzle == 0 || inner <= map->swizzle;
  return inner % 16 || !fits ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned, int,
                                             cudaDriverEntryPointQueryResult *result) {
  *found = strcmp(name, "cuTensorMapEncodeTiled") == 0 ? (void *)encode : nullptr;
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
