/* Tests gradients of factors and biases, and rounded factors, on the emulated GPU against float64
 * sums. Also tests guarantees bit for bit: the gradients of an adapter equal those it has alone;
 * NaN in other adapters do not affect it; accumulating equals overwriting plus one addition.
 *
 *   test_gradients FIRST COUNT */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <random>
#include <string>
#include <vector>

#include "cuda/backward/gradients.h"
#include "cuda/gemm/common/tile.cuh"

/* From core/plan.h, which C++ cannot include. */
extern "C" {
moelora_status moelora_find_device(const moelora_exec *, const moelora_backend **,
                                   moelora_device_info *);
void moelora_plan_blocks(const moelora_routes *, int32_t rows, int32_t cluster,
                         const moelora_device_info *, const moelora_variant *tuned,
                         moelora_align_plan *);
}

#define CHECK(CONDITION, ...)                                                                      \
  do {                                                                                             \
    if (!(CONDITION)) {                                                                            \
      fprintf(stderr, "test_gradients: case %llu: ", number);                                      \
      fprintf(stderr, __VA_ARGS__);                                                                \
      fprintf(stderr, "\n");                                                                       \
      exit(1);                                                                                     \
    }                                                                                              \
  } while (0)
#define CHECK_OK(CALL) CHECK((CALL) == MOELORA_OK, "%s: %s", #CALL, moelora_error_message())

static unsigned long long number;
static std::mt19937_64 generator;
static uint64_t hash = 14695981039346656037u;

static int64_t draw(int64_t low, int64_t high) {
  return low + (int64_t)(generator() % (uint64_t)(high - low + 1));
}
static bool maybe() {
  return draw(0, 1);
}
static double draw_number() {
  return std::normal_distribution<double>()(generator);
}

static uint16_t round_to(moelora_dtype dtype, float v) {
  return dtype == MOELORA_BF16 ? __float2bfloat16_rn(v).bits : __float2half_rn(v).bits;
}
static float value_of(moelora_dtype dtype, uint16_t bits) {
  return dtype == MOELORA_BF16 ? __bfloat162float({bits}) : __half2float({bits});
}
static float rounded(moelora_dtype dtype, float v) {
  return dtype == MOELORA_F32 ? v : value_of(dtype, round_to(dtype, v));
}

/* Rows of values, by flat row or by token, and their layout for a kernel. */
struct Operand {
  moelora_row_index index;
  int64_t width, stride, shift; // elements per row, row stride, offset of the first
  std::vector<float> values;    // [P or M, width] of the dtype
};

struct Product {
  Operand ranks, wide;
  int32_t slices, max_rank;
  int64_t ranks_slice;
  bool weighted, transposed;
  moelora_dtype dtype[2];
  bool shared[2], wanted[2];
  int64_t pad; // padding between rows of a gradient, in elements
};

struct Bias {
  Operand rows;
  bool weighted;
  moelora_dtype dtype;
};

struct Case {
  moelora_dtype dtype;
  int64_t tokens, top_k, experts, loras, rows;
  std::vector<int32_t> ids, mapping, ranks;
  std::vector<float> weights;
  int32_t block_rows, cluster, grain;
  bool searches; // segments are not listed
  bool few;      // pairs of few rows have a kernel of their own, if it can
  std::vector<Product> products;
  Bias bias;
};

static Operand draw_operand(const Case &c, moelora_row_index index, int64_t width) {
  Operand o = {index, width, width + draw(0, 1) * draw(0, 16), draw(0, 2) ? 0 : draw(0, 8), {}};
  if (maybe())
    o.stride = (width + 15) / 8 * 8, o.shift = o.shift / 8 * 8;
  o.values.resize((size_t)((index == MOELORA_ROW_TOKEN ? c.tokens : c.rows) * width));
  for (float &v : o.values)
    v = rounded(c.dtype, (float)draw_number());
  return o;
}

/* aligned: the kernel for pairs of few rows can write its gradients. */
static Product draw_product(const Case &c, int64_t most_columns, bool aligned) {
  Product p = {};
  p.slices = (int32_t)draw(1, 2);
  p.max_rank = (int32_t)(maybe() ? draw(1, 16) : draw(0, 1) ? 8 * draw(1, 4) : draw(1, 70));
  p.ranks_slice = p.max_rank + (maybe() ? (16 - p.max_rank % 16) % 16 : 0);
  p.transposed = maybe();
  if (aligned) {
    p.max_rank = (p.max_rank + 7) / 8 * 8;
    p.ranks_slice = (p.max_rank + 15) / 16 * 16;
    p.slices = p.transposed ? 1 : p.slices;
  }
  p.weighted = maybe();
  p.ranks = draw_operand(c, (moelora_row_index)draw(0, 2), p.slices * p.ranks_slice);
  const int64_t columns =
      !aligned && maybe() ? draw(1, most_columns) : 8 * draw(1, most_columns / 8);
  p.wide = draw_operand(c, (moelora_row_index)draw(0, 2), columns);
  for (int i = 0; i < 2; i++) {
    p.dtype[i] = !aligned && maybe() ? MOELORA_F32 : c.dtype;
    p.shared[i] = draw(0, 2) == 0;
    p.wanted[i] = i >= p.slices || draw(0, 4) > 0;
  }
  p.pad = draw(0, 2) ? 0 : aligned ? 8 : draw(1, 9);
  return p;
}

static Case draw_case(uint64_t n) {
  generator.seed(n);
  Case c = {};
  c.dtype = maybe() ? MOELORA_BF16 : MOELORA_F16;
  const bool split = n % 8 == 7,
             many = n % 8 == 3; // gradients with several parts; many keys: two sorts
  c.experts = split ? draw(1, 2) : draw(1, 6);
  c.top_k = draw(1, c.experts);
  c.tokens = split ? draw(2100, 4400) / c.top_k : maybe() ? draw(1, 12) : draw(13, 150);
  c.loras = many ? 1500 : draw(1, 4);
  c.experts += many ? 6 : 0;
  c.rows = c.tokens * c.top_k;
  const bool ranked = maybe(), sparse = draw(0, 3) == 0;
  for (int64_t p = 0; p < c.rows; p++) {
    c.ids.push_back((int32_t)(draw(0, 20) ? draw(0, c.experts - 1) : draw(-2, c.experts + 2)));
    c.weights.push_back((float)draw(0, 1000) / 512);
  }
  for (int64_t m = 0; m < c.tokens; m++)
    c.mapping.push_back((int32_t)(split && draw(0, 9) ? 0 : sparse ? -1 : draw(-1, c.loras)));
  for (int64_t l = 0; l < c.loras && ranked; l++)
    c.ranks.push_back((int32_t)draw(0, 40));
  const int kind = (int)draw(0, 2);
  c.block_rows = kind == 0 ? 16 : kind == 1 ? 96 : 128;
  c.cluster = kind == 2 ? 2 : 1;
  c.grain = 8;
  c.searches = maybe();
  c.few = draw(0, 3) > 0;
  const bool aligned = maybe();
  for (int64_t i = draw(1, 3); i > 0; i--)
    c.products.push_back(draw_product(c,
                                      split || many         ? 40
                                      : aligned && !maybe() ? 1300 // a second tile, see kFewColumns
                                                            : 300,
                                      aligned));
  c.bias = {draw_operand(c, (moelora_row_index)draw(0, 2), draw(1, 200)), maybe(),
            maybe() ? MOELORA_F32 : c.dtype};
  return c;
}

/* The memory of a gradient, including padding. */
struct Memory {
  moelora_gradient view;
  std::vector<char> bytes;

  float get(int64_t l, int64_t e, int64_t i, int64_t j) const {
    const size_t at = (size_t)(l * view.stride_l + e * view.stride_e + i * view.stride_i + j);
    if (view.dtype == MOELORA_F32)
      return ((const float *)bytes.data())[at];
    return value_of(view.dtype, ((const uint16_t *)bytes.data())[at]);
  }
};

static Memory new_gradient(moelora_dtype dtype, int64_t loras, int64_t experts, int64_t rows,
                           int64_t columns, int64_t pad, bool accumulate) {
  Memory m;
  const int64_t stride = columns + pad;
  m.view = {nullptr, dtype,   (int32_t)loras,          (int32_t)experts,
            rows,    columns, experts * rows * stride, rows * stride,
            stride};
  const size_t count = (size_t)(loras * experts * rows * stride);
  m.bytes.resize(count * moelora_dtype_bytes(dtype) + 16);
  for (size_t i = 0; i < count; i++)
    if (dtype == MOELORA_F32)
      ((float *)m.bytes.data())[i] = accumulate ? 0.5f : NAN;
    else
      ((uint16_t *)m.bytes.data())[i] = round_to(dtype, accumulate ? 0.5f : NAN);
  return m;
}

struct Results {
  std::vector<Memory> gradients; // two per product
  Memory bias;
};

/* Lays out the rows of an operand; elements outside of rows are NaN. */
static std::vector<uint16_t> lie(const Case &c, const Operand &o, const moelora_blocks &blocks,
                                 moelora_gradient_operand *view) {
  const int64_t positions = blocks.max_blocks * blocks.rows;
  const int64_t count = o.index == MOELORA_ROW_POSITION ? positions
                        : o.index == MOELORA_ROW_FLAT   ? c.rows
                                                        : c.tokens;
  std::vector<uint16_t> memory((size_t)(count * o.stride + o.shift + 8), round_to(c.dtype, NAN));
  for (int64_t i = 0; i < count; i++) {
    const int64_t from = o.index == MOELORA_ROW_POSITION ? blocks.sorted_ids[i] : i;
    for (int64_t j = 0; j < o.width && (o.index == MOELORA_ROW_TOKEN || from < c.rows); j++)
      memory[(size_t)(o.shift + i * o.stride + j)] =
          round_to(c.dtype, o.values[(size_t)(from * o.width + j)]);
  }
  *view = {memory.data() + o.shift, o.stride, o.index};
  return memory;
}

/* Indices of pairs in sparse gradients, some of them -1. */
struct Pairs {
  std::vector<int32_t> index; // [loras, experts]
  int32_t count = 0;          // of gradients, one of which has no pair
};

/* Whether the kernel for pairs of few rows can write a gradient: its memory is aligned. */
static bool allows_few(const Case &c, const Product &p, int slice) {
  const int64_t columns = p.transposed ? p.max_rank : p.wide.width;
  return p.dtype[slice] == c.dtype && columns % 8 == 0 && p.pad % 8 == 0 &&
         !(p.transposed && p.slices > 1);
}

static Results run(const Case &c, bool accumulate, const Pairs *pairs = nullptr) {
  moelora_exec exec = {};
  exec.device = MOELORA_CUDA;
  const moelora_backend *backend;
  moelora_device_info device;
  CHECK_OK(moelora_find_device(&exec, &backend, &device));

  moelora_routes from = {};
  from.num_tokens = c.tokens;
  from.top_k = (int32_t)c.top_k;
  from.num_rows = c.rows;
  from.num_experts = (int32_t)c.experts;
  from.topk_ids = {c.ids.data(), {c.top_k, 1}, false};
  from.topk_weights = c.weights.data();
  from.topk_weights_stride[0] = c.top_k;
  from.topk_weights_stride[1] = 1;
  from.max_loras = (int32_t)c.loras;
  from.token_lora_mapping = {c.mapping.data(), {1, 0}, false};
  from.lora_ranks = c.ranks.empty() ? nullptr : c.ranks.data();

  bool shared = false, weighted = false, few = !accumulate && c.few;
  int32_t rank_columns = 0;
  for (const Product &p : c.products) {
    rank_columns = std::max(rank_columns, p.slices * moelora_padded_rank(p.max_rank));
    for (int i = 0; i < p.slices; i++)
      few = few && (!p.wanted[i] || p.shared[i] || allows_few(c, p, i));
    shared = shared || (p.wanted[0] && p.shared[0]) || (p.slices > 1 && p.wanted[1] && p.shared[1]);
    weighted = weighted || p.weighted;
  }
  const moelora_gradient_uses uses = {shared,
                                      weighted,
                                      !accumulate,
                                      pairs ? pairs->index.data() : nullptr,
                                      pairs ? pairs->count : 0,
                                      few ? MOELORA_GRADIENT_FEW(rank_columns) : 0};
  moelora_align_plan plan;
  moelora_plan_blocks(&from, c.block_rows, c.cluster, &device, nullptr, &plan);
  std::vector<char> memory;
  moelora_routes routes;
  moelora_blocks blocks;
  moelora_gradient_rows list;
  moelora_sort_scratch scratch;
  for (size_t bytes = 0, pass = 0; pass < 2; pass++) {
    memory.assign(bytes + 256, (char)0xff);
    char *base = (char *)(((uintptr_t)memory.data() + 255) & ~(uintptr_t)255);
    moelora_arena arena = {pass ? base : nullptr, 0};
    routes = moelora_cuda_take_routes(&from, false, &arena);
    blocks = {};
    blocks.rows = c.block_rows;
    blocks.cluster = (int16_t)c.cluster;
    blocks.grain = (int16_t)c.grain;
    blocks.max_blocks = moelora_max_blocks(&from, c.block_rows, c.cluster);
    const size_t rows = (size_t)(blocks.max_blocks * blocks.rows);
    const auto take = [&](size_t count) { return (int32_t *)moelora_take(&arena, 4 * count); };
    blocks.sorted_ids = take(rows);
    blocks.expert_ids = take((size_t)blocks.max_blocks);
    blocks.counts = take((size_t)blocks.max_blocks);
    blocks.packed_ranks = take(rows);
    blocks.num_post = take(1);
    if (plan.segments > 0)
      blocks.segments = (moelora_segment *)take(4 * (size_t)plan.segments);
    scratch = moelora_cuda_take_scratch(&from, MOELORA_ALIGN_SEGMENTED, &plan, &arena);
    list = moelora_cuda_take_gradient_rows(&from, &uses, &arena);
    bytes = arena.used;
    exec.workspace_bytes = bytes;
  }
  CHECK_OK(moelora_cuda_align_rows(&from, &routes, &blocks, &plan, &scratch, &exec));
  if (c.searches)
    blocks.segments = nullptr;
  CHECK_OK(moelora_cuda_list_gradient_rows(&list, &routes, &blocks, &exec));

  Results results;
  std::vector<std::vector<uint16_t>> operands;
  moelora_gradients_launch launch = {};
  launch.dtype = c.dtype;
  launch.top_k = (int32_t)c.top_k;
  launch.accumulate = accumulate;
  for (const Product &p : c.products) {
    moelora_gradient_product &to = launch.product[launch.count++];
    operands.push_back(lie(c, p.ranks, blocks, &to.ranks));
    operands.push_back(lie(c, p.wide, blocks, &to.wide));
    to.ranks_slice = p.ranks_slice;
    to.slices = p.slices;
    to.max_rank = p.max_rank;
    to.columns = p.wide.width;
    to.weighted = p.weighted;
    to.transposed = p.transposed;
    for (int i = 0; i < p.slices; i++) {
      const bool sparse = pairs && !p.shared[i];
      const int64_t experts = p.shared[i] ? 1 : sparse ? pairs->count : c.experts;
      results.gradients.push_back(new_gradient(
          p.dtype[i], sparse ? 1 : c.loras, experts, p.transposed ? p.wide.width : p.max_rank,
          p.transposed ? p.max_rank : p.wide.width, p.pad, accumulate));
      results.gradients.back().view.sparse = sparse;
      to.gradient[i] = results.gradients.back().view;
      if (p.wanted[i])
        to.gradient[i].data = results.gradients.back().bytes.data();
    }
  }
  std::vector<float> slots(moelora_cuda_gradient_slot_bytes(&launch, &list) / sizeof(float) + 1,
                           NAN);
  launch.slots = slots.data();
  moelora_arena nothing = {};
  const moelora_gradient_rows sizes = moelora_cuda_take_gradient_rows(&from, &uses, &nothing);
  CHECK(moelora_cuda_gradient_slot_bytes(&launch, &sizes) ==
            moelora_cuda_gradient_slot_bytes(&launch, &list),
        "slots of a list without memory are others");
  CHECK_OK(moelora_cuda_factor_gradients(&launch, &list, &exec));

  moelora_bias_launch bias = {};
  operands.push_back(lie(c, c.bias.rows, blocks, &bias.rows));
  bias.columns = c.bias.rows.width;
  bias.dtype = c.dtype;
  bias.weighted = c.bias.weighted;
  bias.accumulate = accumulate;
  results.bias = new_gradient(c.bias.dtype, 1, c.experts, 1, bias.columns, 0, accumulate);
  bias.gradient = results.bias.view;
  bias.gradient.data = results.bias.bytes.data();
  CHECK_OK(moelora_cuda_bias_gradient(&bias, &routes, &blocks, &exec));
  return results;
}

/* ---- expected results ---- */

struct Sum {
  double sum = 0, size = 0; // sum of the values, sum of magnitudes
};

static bool is_close(float got, const Sum &want, moelora_dtype dtype) {
  const double unit = dtype == MOELORA_F32 ? 0 : dtype == MOELORA_BF16 ? 0x1p-8 : 0x1p-11;
  return fabs(got - want.sum) <= unit * fabs(want.sum) + 0x1p-18 * want.size + 0x1p-24;
}

static float at_row(const Case &c, const Operand &o, int64_t row, int64_t j) {
  return o.values[(size_t)((o.index == MOELORA_ROW_TOKEN ? row / c.top_k : row) * o.width + j)];
}

static int32_t adapter_of(const Case &c, int64_t row) {
  const int32_t l = c.mapping[(size_t)(row / c.top_k)];
  return l < c.loras ? l : -1;
}

static void check_product(const Case &c, const Product &p, int slice, const Memory &got) {
  const int64_t experts = got.view.experts, columns = p.wide.width;
  std::vector<Sum> sums((size_t)(c.loras * experts * p.max_rank * columns));
  for (int64_t row = 0; row < c.rows; row++) {
    const int32_t e = c.ids[(size_t)row], l = adapter_of(c, row);
    if (e < 0 || e >= c.experts || l < 0)
      continue;
    const int64_t rank = c.ranks.empty() ? p.max_rank : std::min(c.ranks[(size_t)l], p.max_rank);
    for (int64_t r = 0; r < rank; r++) {
      float a = at_row(c, p.ranks, row, slice * p.ranks_slice + r);
      if (p.weighted)
        a = rounded(c.dtype, a * c.weights[(size_t)row]);
      Sum *to = &sums[(size_t)(((l * experts + (experts > 1 ? e : 0)) * p.max_rank + r) * columns)];
      for (int64_t j = 0; j < columns; j++) {
        const double v = (double)a * at_row(c, p.wide, row, j);
        to[j].sum += v, to[j].size += fabs(v);
      }
    }
  }
  for (size_t i = 0; i < sums.size(); i++) {
    const int64_t j = (int64_t)i % columns, r = (int64_t)i / columns % p.max_rank;
    const int64_t e = (int64_t)i / columns / p.max_rank % experts,
                  l = (int64_t)i / columns / p.max_rank / experts;
    const float v = p.transposed ? got.get(l, e, j, r) : got.get(l, e, r, j);
    CHECK(is_close(v, sums[i], got.view.dtype),
          "adapter %lld, expert %lld, rank %lld, column %lld is %g, expected %g", (long long)l,
          (long long)e, (long long)r, (long long)j, v, sums[i].sum);
  }
}

static void check_bias(const Case &c, const Memory &got) {
  for (int64_t e = 0; e < c.experts; e++)
    for (int64_t j = 0; j < c.bias.rows.width; j++) {
      Sum sum;
      for (int64_t row = 0; row < c.rows; row++)
        if (c.ids[(size_t)row] == e) {
          const double v = (c.bias.weighted ? (double)c.weights[(size_t)row] : 1.) *
                           at_row(c, c.bias.rows, row, j);
          sum.sum += v, sum.size += fabs(v);
        }
      CHECK(is_close(got.get(0, e, 0, j), sum, got.view.dtype),
            "bias of expert %lld, column %lld is %g, expected %g", (long long)e, (long long)j,
            got.get(0, e, 0, j), sum.sum);
    }
}

/* Checks that adapter l has the same bits in both. */
static void check_same(const Results &a, const Results &b, int64_t l, const char *what) {
  for (size_t i = 0; i < a.gradients.size(); i++) {
    const moelora_gradient &g = a.gradients[i].view;
    const size_t size = moelora_dtype_bytes(g.dtype), from = (size_t)(l * g.stride_l) * size;
    CHECK(memcmp(&a.gradients[i].bytes[from], &b.gradients[i].bytes[from],
                 (size_t)g.stride_l * size) == 0,
          "gradient %zu of adapter %lld %s", i, (long long)l, what);
  }
}

static void check_accumulated(const Case &c, const Results &written) {
  Case wide = c;
  for (Product &p : wide.products)
    p.dtype[0] = p.dtype[1] = MOELORA_F32;
  wide.bias.dtype = MOELORA_F32;
  const Results sums = run(wide, false), added = run(c, true);
  for (size_t i = 0; i <= written.gradients.size(); i++) {
    const bool is_bias = i == written.gradients.size();
    const Memory &sum = is_bias ? sums.bias : sums.gradients[i];
    const Memory &got = is_bias ? added.bias : added.gradients[i];
    const moelora_gradient &g = got.view;
    for (int64_t at = 0; at < (int64_t)g.loras * g.experts * g.rows * g.columns; at++) {
      const int64_t j = at % g.columns, r = at / g.columns % g.rows,
                    e = at / g.columns / g.rows % g.experts,
                    l = at / g.columns / g.rows / g.experts;
      const float v = sum.get(l, e, r, j);
      if (v == v) // requested
        CHECK(got.get(l, e, r, j) == rounded(g.dtype, 0.5f + v), "gradient %zu accumulates %g", i,
              got.get(l, e, r, j));
    }
  }
}

/* Checks that sparse gradients have the bits of `whole`, and that nothing else is written. */
static void check_sparse(const Case &c, const Results &whole) {
  Pairs pairs;
  for (int64_t i = 0; i < c.loras * c.experts; i++)
    pairs.index.push_back(draw(0, 3) ? pairs.count++ : (int32_t)-draw(1, 2));
  const int32_t unused = pairs.count++;
  const Results found = run(c, false, &pairs);
  size_t i = 0;
  for (const Product &p : c.products)
    for (int slice = 0; slice < p.slices; slice++, i++) {
      const Memory &all = whole.gradients[i], &some = found.gradients[i];
      const moelora_gradient &g = some.view;
      if (!g.sparse) {
        CHECK(all.bytes == some.bytes, "shared gradient %zu differs beside sparse ones", i);
        continue;
      }
      for (int64_t at = 0; at < g.rows * g.columns; at++)
        CHECK(isnan(some.get(0, unused, at / g.columns, at % g.columns)),
              "sparse gradient %zu is written at an index without a pair", i);
      for (size_t pair = 0; p.wanted[slice] && pair < pairs.index.size(); pair++) {
        const int64_t l = (int64_t)pair / c.experts, e = (int64_t)pair % c.experts;
        for (int64_t at = 0; pairs.index[pair] >= 0 && at < g.rows * g.columns; at++) {
          const float want = all.get(l, e, at / g.columns, at % g.columns);
          const float got = some.get(0, pairs.index[pair], at / g.columns, at % g.columns);
          CHECK(got == want, "sparse gradient %zu of adapter %lld, expert %lld is %g, not %g", i,
                (long long)l, (long long)e, got, want);
        }
      }
    }
}

static void test_gradients() {
  const Case c = draw_case(number);
  const Results whole = run(c, c.loras > 100);
  if (c.loras > 100) {
    check_accumulated(c, whole);
    return;
  }
  size_t i = 0;
  for (const Product &p : c.products)
    for (int slice = 0; slice < p.slices; slice++, i++) {
      if (p.wanted[slice])
        check_product(c, p, slice, whole.gradients[i]);
      for (char byte : whole.gradients[i].bytes)
        hash = (hash ^ (unsigned char)byte) * 1099511628211u;
    }
  check_bias(c, whole.bias);
  check_accumulated(c, whole);
  check_sparse(c, whole);

  // One adapter alone, and next to others with NaN.
  const int64_t l = draw(0, c.loras - 1);
  Case alone = c, spoiled = c;
  for (int32_t &mapped : alone.mapping)
    mapped = mapped == l ? mapped : -1;
  alone.searches = !c.searches;
  for (Product &p : spoiled.products)
    for (Operand *o : {&p.ranks, &p.wide})
      for (size_t at = 0; at < o->values.size(); at++) {
        const int64_t row = (int64_t)at / o->width;
        const int64_t token = o->index == MOELORA_ROW_TOKEN ? row : row / c.top_k;
        if (c.mapping[(size_t)token] != l)
          o->values[at] = NAN;
      }
  alone.few = !c.few;
  check_same(whole, run(alone, false), l, "differs from what it is alone");
  check_same(whole, run(spoiled, false), l, "takes a NaN of others");
}

/* ---- rounded factors ---- */

static void test_rounded() {
  generator.seed(number);
  const moelora_dtype dtype = maybe() ? MOELORA_BF16 : MOELORA_F16;
  moelora_routes routes = {};
  routes.num_experts = (int32_t)draw(1, 4);
  routes.max_loras = (int32_t)draw(1, 3);
  moelora_factors factors = {};
  factors.num_slices = (int32_t)draw(1, 3);
  factors.max_rank = (int32_t)(maybe() ? 8 : draw(1, 9));
  factors.slice_n = maybe() ? 64 : draw(1, 90);
  factors.wide = draw(0, 5) > 0;
  const int64_t depth = maybe() ? 4 * draw(1, 700) : draw(1, 50);
  std::vector<std::vector<float>> memory;
  for (int i = 0; i < factors.num_slices; i++)
    for (moelora_factor *f : {&factors.a[i], &factors.b[i]}) {
      const int64_t rows = f == &factors.a[i] ? factors.max_rank : factors.slice_n;
      const int64_t columns = f == &factors.a[i] ? depth : factors.max_rank;
      f->stride_i = columns + draw(0, 1) * draw(0, 8);
      f->stride_e = maybe() ? rows * f->stride_i : 0;
      f->stride_l = routes.num_experts * rows * f->stride_i + draw(0, 4);
      memory.emplace_back((size_t)(routes.max_loras * f->stride_l));
      for (float &v : memory.back())
        v = (float)draw_number();
      f->data = memory.back().data();
    }
  moelora_exec exec = {};
  exec.device = MOELORA_CUDA;
  moelora_arena arena = {};
  moelora_cuda_take_rounded(&factors, depth, &routes, dtype, &arena);
  CHECK((arena.used > 0) == factors.wide, "takes %zu bytes", arena.used);
  std::vector<char> copy(arena.used + 256);
  arena = {(char *)(((uintptr_t)copy.data() + 255) & ~(uintptr_t)255), 0};
  const moelora_rounded_factors rounded_factors =
      moelora_cuda_take_rounded(&factors, depth, &routes, dtype, &arena);
  CHECK_OK(moelora_cuda_round_factors(&rounded_factors, 1, &routes, dtype, &exec));
  if (!factors.wide) {
    CHECK(rounded_factors.to.a[0].data == factors.a[0].data, "copies what is rounded");
    return;
  }
  for (int i = 0; i < factors.num_slices; i++)
    for (int which = 0; which < 2; which++) {
      const moelora_factor &f = which ? factors.b[i] : factors.a[i];
      const moelora_factor &to = which ? rounded_factors.to.b[i] : rounded_factors.to.a[i];
      const int64_t rows = which ? factors.slice_n : factors.max_rank;
      const int64_t columns = which ? factors.max_rank : depth;
      CHECK((to.stride_e == 0) == (f.stride_e == 0), "what is shared stays so");
      for (int64_t l = 0; l < routes.max_loras; l++)
        for (int64_t e = 0; e < routes.num_experts; e++)
          for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < columns; j++) {
              const float v =
                  ((const float *)f.data)[l * f.stride_l + e * f.stride_e + r * f.stride_i + j];
              CHECK(((const uint16_t *)
                         to.data)[l * to.stride_l + e * to.stride_e + r * to.stride_i + j] ==
                        round_to(dtype, v),
                    "slice %d, factor %d, row %lld, column %lld", i, which, (long long)r,
                    (long long)j);
            }
    }
}

int main(int argc, char **argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: test_gradients FIRST COUNT\n");
    return 2;
  }
  const unsigned long long first = strtoull(argv[1], nullptr, 10),
                           count = strtoull(argv[2], nullptr, 10);
  for (number = first; number < first + count; number++) {
    test_gradients();
    test_rounded();
  }
  printf("gradients: %llu cases from %llu, hash %016llx\n", count, first, (unsigned long long)hash);
  return 0;
}
