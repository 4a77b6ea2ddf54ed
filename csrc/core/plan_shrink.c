/* Plans a shrink: its kernel and its launch parameters.
 *
 * The split of rows into work items does not affect results. The split of K between warps does, so
 * it depends only on K, and on 16-byte alignment. */
#include "core/plan.h"

/* Values measured on an H200, or limits of a kernel. */
enum {
  RESIDENT_WARPS = 16, /* per SM, which leaves 128 registers per thread */
  THIN_SEGMENT = 4,    /* tokens; with fewer, the loads of A dominate */
  FAT_SEGMENT = 64,    /* tokens; from here on, loads of A and of x matter */
  FEW_TOKENS = 32,     /* maximum per item, if larger items would leave CTAs idle */
  MANY_TOKENS = 48,    /* maximum per item otherwise: larger items reread A less */
  NARROW = 32,         /* maximum rows of A that count as narrow */
  STAGED_RANKS = 64,   /* maximum of segments.cu (registers); also a threshold on sm_90 */
  HALF_ROWS = 16,      /* routed rows; with more, the next GEMM gets half of the registers */
  BLOCK_SHARES = 8,    /* work units per block and tile of ranks */
  SHARE_ITEMS = 32,    /* maximum items of a work unit: items.cuh */
  THIN_SHARES = 2, /* per tile of ranks, if blocks have at most a row: more delays the next GEMM */
  LISTED_KEYS = 4096,     /* maximum number of listed segments: every CTA counts the items of all */
  NARROW_LONG_ROWS = 320, /* windows: rows per expert from which narrow segments count as long */
  LONG_WINDOW_ROWS = 8,   /* windows: minimum rows per SM for whole segments */
  MANY_SEGMENTS = 6,      /* minimum per SM that counts as many */
};

/* Minimum tokens per segment, and rows per SM, for whole-segment kernels: with fewer, the other
 * kernels reread little of A. If x is in alignment order, the segments are listed while the kernel
 * that writes x drains; if x is gathered, both minima are multiplied by `gathered`. */
typedef struct long_segment {
  int32_t tokens, rows_of_unit, gathered;
} long_segment;

static const long_segment long_portable = {40, 128, 1}, /* K below MOELORA_LONG_DEPTH */
    long_narrow = {32, 7, 2},                           /* sm_90, up to NARROW rows of A */
    long_many = {16, 7, 1},  /* sm_90, up to NARROW rows of A, many segments */
    long_wide = {8, 7, 2},   /* sm_90, up to 64 rows of A */
    long_widest = {2, 7, 1}; /* sm_90, more rows of A */

bool moelora_are_boxes(const moelora_factors *lora, int64_t rows, int64_t stride) {
  return moelora_are_map_factors(lora->a, lora->num_slices, 1) && rows * (stride / 8) < UINT32_MAX;
}

static const moelora_variant *find(const moelora_shrink_load *load, moelora_method method,
                                   int32_t ranks, int32_t spans, int32_t ctas) {
  return moelora_variant_like(&(moelora_variant){.device = MOELORA_CUDA,
                                                 .dtype = load->dtype,
                                                 .role = MOELORA_ROLE_SHRINK,
                                                 .method = method,
                                                 .needs = MOELORA_SM80,
                                                 .block_n = ranks,
                                                 .spans = spans,
                                                 .ctas = ctas,
                                                 .elements = !load->vectors});
}

/* Returns the family whose whole-segment kernels are used. */
static moelora_family segments_family(const moelora_shrink_load *load) {
  return load->family == MOELORA_SM90 && load->boxes ? MOELORA_SM90 : MOELORA_SM80;
}

/* Returns the whole-segment kernel with the smallest block_n that covers all columns, or the
 * largest. */
static const moelora_variant *find_segments(const moelora_shrink_load *load) {
  const moelora_family family = segments_family(load);
  const int32_t most = family == MOELORA_SM90 ? 128 : STAGED_RANKS;
  const int32_t ranks = load->columns <= 32 ? 32 : load->columns <= 64 ? 64 : 128;
  return moelora_variant_like(&(moelora_variant){.device = MOELORA_CUDA,
                                                 .dtype = load->dtype,
                                                 .role = MOELORA_ROLE_SHRINK,
                                                 .method = MOELORA_SHRINK_SEGMENTS,
                                                 .needs = family,
                                                 .block_n = ranks < most ? ranks : most});
}

static bool serves(const moelora_variant *v, const moelora_shrink_load *load,
                   moelora_method method) {
  if (!v || !(v->elements || load->vectors))
    return false;
  if (v->method == MOELORA_SHRINK_SEGMENTS)
    return load->listed && (v->needs != MOELORA_SM90 || load->boxes);
  return v->method == method && v->spans == moelora_shrink_spans(load->depth, load->vectors);
}

/* Returns the forced, the tuned or the usual variant: the first that supports the problem. */
static const moelora_variant *prefer(const moelora_variant *usual, const moelora_shrink_load *load,
                                     moelora_method method, const moelora_device_info *device) {
  const moelora_variant *forced = moelora_forced(MOELORA_ROLE_SHRINK, load->dtype, device);
  return serves(forced, load, method)        ? forced
         : serves(load->tuned, load, method) ? load->tuned
                                             : usual;
}

/* Whether segments are processed adapter by adapter. Each expert of a token rereads its row of x,
 * which this order keeps in L2; it is not used if all of x fits half of L2 anyway. */
static bool orders_by_adapter(const moelora_shrink_load *load, const moelora_device_info *device) {
  return !load->by_position && 2 * load->depth * load->x_rows > device->l2_bytes / 2;
}

static moelora_shrink_plan plan_segments(const moelora_variant *variant,
                                         const moelora_shrink_load *load,
                                         const moelora_device_info *device) {
  return (moelora_shrink_plan){.variant = variant,
                               .shares = 1,
                               .by_adapter = orders_by_adapter(load, device),
                               .span = moelora_shrink_span(load->depth, load->vectors),
                               .work = (int64_t)device->num_units * variant->ctas};
}

/* ---- blocks ---- */

static bool are_long_blocks(const moelora_shrink_load *load, const moelora_device_info *device) {
  const bool sm90 = segments_family(load) == MOELORA_SM90;
  if (!load->listed || !load->vectors || (!sm90 && load->depth >= MOELORA_LONG_DEPTH))
    return false;
  const bool many = load->segments >= (int64_t)MANY_SEGMENTS * device->num_units;
  const long_segment from = !sm90                          ? long_portable
                            : load->columns > STAGED_RANKS ? long_widest
                            : load->columns > NARROW       ? long_wide
                            : many                         ? long_many
                                                           : long_narrow;
  const int64_t factor = load->by_position ? 1 : from.gathered;
  return load->rows >= factor * from.tokens * load->segments &&
         load->rows >= factor * from.rows_of_unit * device->num_units;
}

/* Returns the number of work units per block. Prefers one unit per warp, if that makes at least a
 * quarter of the usual number: for a second unit, a warp searches another block for few items. */
static int64_t shares_of(const moelora_shrink_load *load, const moelora_variant *v,
                         const moelora_device_info *device) {
  const int64_t chunks = moelora_divide_up(load->columns, v->block_n);
  const int64_t usual = BLOCK_SHARES * chunks;
  const int64_t once = (int64_t)device->num_units * v->ctas * v->warps / load->max_blocks;
  const int64_t least = moelora_divide_up(load->block_rows * chunks, SHARE_ITEMS);
  return once < usual && once >= least && 4 * once >= usual ? once : usual;
}

moelora_shrink_plan moelora_plan_shrink_blocks(const moelora_shrink_load *load,
                                               const moelora_device_info *device) {
  const int64_t rows = load->rows, segments = load->segments, columns = load->columns;
  const int32_t spans = moelora_shrink_spans(load->depth, load->vectors);
  /* A large K with a narrow A is bound by memory: using half of an SM's registers leaves the others
   * to the next GEMM, whose weight loads then overlap with the shrink. */
  const bool half = spans == 8 && columns <= NARROW && rows > HALF_ROWS;
  const int64_t resident = half ? RESIDENT_WARPS / 2 : RESIDENT_WARPS;
  const int64_t ctas = device->num_units * (resident / spans);
  const bool thin = rows < (columns <= NARROW ? THIN_SEGMENT : THIN_SEGMENT / 2) * segments;
  /* Large items reread A less; there must still be enough of them for all CTAs. */
  int64_t part = segments + rows / MANY_TOKENS < ctas ? FEW_TOKENS : MANY_TOKENS;
  const bool many_ranks =
      load->vectors && columns > 16 && segments + rows / FEW_TOKENS >= ctas && !thin;
  /* Two warps per K span split a wide A, if that leaves no CTA idle. */
  const bool two_warps = load->vectors && spans == 4 && columns > NARROW &&
                         segments * (columns / 32) >= device->num_units * (RESIDENT_WARPS / 8);
  const int32_t ranks = many_ranks ? (columns <= NARROW ? 32 : 64) : two_warps ? 32 : 16;
  const bool few = load->vectors && ranks == 16 && rows * columns / 16 <= ctas;
  const moelora_variant *usual =
      are_long_blocks(load, device)
          ? find_segments(load)
          : find(load, MOELORA_SHRINK_BLOCKS, ranks, spans, half && ranks <= 32 ? 1 : 0);
  const moelora_variant *v = prefer(usual, load, MOELORA_SHRINK_BLOCKS, device);
  if (v->method == MOELORA_SHRINK_SEGMENTS)
    return plan_segments(v, load, device);

  part = part < v->block_m ? part : v->block_m;
  const int64_t blocks = load->max_blocks;
  const int64_t shares = few && blocks >= rows
                             ? THIN_SHARES * moelora_divide_up(columns, v->block_n)
                             : shares_of(load, v, device);
  const int64_t items = segments + rows / part;
  const bool listed = load->listed > 0 && load->listed <= LISTED_KEYS && !thin;
  /* The number of blocks that all CTAs process at a time. */
  const int64_t group = (int64_t)device->num_units * v->ctas * blocks / items;
  const bool fat = rows >= FAT_SEGMENT * segments;
  return (moelora_shrink_plan){.variant = v,
                               .part = (int32_t)part,
                               .shares = (int32_t)shares,
                               .group = (int32_t)(fat && group < blocks ? group + 1 : blocks),
                               .listed = listed,
                               .few = few,
                               .by_adapter = listed && orders_by_adapter(load, device),
                               .work = listed ? items * moelora_divide_up(columns, v->block_n)
                                              : blocks * shares};
}

/* ---- windows of routed rows, which the kernels of deltas iterate over ---- */

moelora_windows moelora_cut_windows(const moelora_routes *routes, const moelora_list_blocks *lists,
                                    moelora_delta_order order, int64_t most, int64_t part,
                                    int64_t columns, int64_t workers) {
  const int64_t rows = routes->num_rows;
  moelora_windows w = {1, 1, 0};
  int64_t used, items;
  if (rows == 0)
    return w;
  if (order == MOELORA_LISTED) {
    const int64_t size = lists->block_size, per_block = moelora_divide_up(size, most);
    const int64_t pairs = (int64_t)routes->num_experts * routes->max_loras;
    w.rows = (int32_t)moelora_divide_up(size, per_block);
    w.count = lists->num_active * lists->blocks * per_block;
    used = (rows < pairs ? rows : pairs) + rows / w.rows;
    items = moelora_divide_up(w.rows, part) * columns; /* all rows of a block belong to one pair */
  } else {
    w.count = moelora_divide_up(rows, most);
    if (rows > most * workers)
      w.count = moelora_divide_up(w.count, workers) * workers;
    else if (w.count < workers / (most * workers / rows))
      w.count = workers / (most * workers / rows);
    w.rows = (int32_t)moelora_divide_up(rows, w.count);
    used = w.count = moelora_divide_up(rows, w.rows);
    items = w.rows * columns;
  }
  const int64_t each = workers > used ? workers / used : 1;
  w.shares = (int32_t)(each < items ? each : items);
  return w;
}

/* Rows per item, and items, of a batch. In an unsorted batch, every row may be a segment. */
typedef struct fit {
  int64_t part, items, ctas; /* CTAs resident on the GPU */
} fit;

static int64_t count_items(const moelora_shrink_load *load, const moelora_variant *v,
                           int64_t part) {
  const int64_t tokens = moelora_divide_up(load->rows, load->segments);
  return load->segments * moelora_divide_up(tokens, part) *
         moelora_divide_up(load->columns, v->block_n);
}

static fit fit_of(const moelora_shrink_load *load, const moelora_variant *v,
                  const moelora_device_info *device) {
  fit f = {.part = v->block_m};
  f.ctas = (int64_t)device->num_units * RESIDENT_WARPS / v->warps;
  if (v->block_m > FEW_TOKENS && count_items(load, v, f.part) < f.ctas)
    f.part = FEW_TOKENS;
  f.items = count_items(load, v, f.part);
  return f;
}

/* Whether there are items for at least three quarters of the CTAs. */
static bool suits(const moelora_shrink_load *load, const moelora_variant *v,
                  const moelora_device_info *device) {
  const fit f = fit_of(load, v, device);
  return 4 * f.items >= 3 * f.ctas;
}

static const moelora_variant *choose_windows(const moelora_shrink_load *load,
                                             const moelora_device_info *device) {
  const int64_t experts = load->routes->num_experts;
  const bool long_segments =
      load->columns > NARROW || load->rows >= (int64_t)NARROW_LONG_ROWS * experts;
  if (load->vectors && load->listed && long_segments &&
      load->rows >= (int64_t)LONG_WINDOW_ROWS * device->num_units)
    return find_segments(load);
  const int32_t spans = moelora_shrink_spans(load->depth, load->vectors);
  const moelora_method windows = MOELORA_SHRINK_WINDOWS;
  if (load->vectors) {
    const moelora_variant *wide = spans == 4 ? find(load, windows, 64, spans, 0) : NULL;
    if (wide && load->columns > NARROW && suits(load, wide, device))
      return wide;
    const moelora_variant *middle = find(load, windows, 32, spans, 0);
    if (load->columns > 16 && load->rows >= THIN_SEGMENT * load->segments &&
        suits(load, middle, device))
      return middle;
  }
  return find(load, windows, 16, spans, 0);
}

moelora_shrink_plan moelora_plan_shrink_windows(const moelora_shrink_load *load,
                                                const moelora_device_info *device) {
  if (load->segments == 0)
    return (moelora_shrink_plan){0};
  const moelora_variant *v =
      prefer(choose_windows(load, device), load, MOELORA_SHRINK_WINDOWS, device);
  if (v->method == MOELORA_SHRINK_SEGMENTS)
    return plan_segments(v, load, device);
  const fit f = fit_of(load, v, device);
  const moelora_windows windows =
      moelora_cut_windows(load->routes, load->lists, load->order, 64 * v->warps, f.part,
                          moelora_divide_up(load->columns, v->block_n), f.ctas);
  return (moelora_shrink_plan){.variant = v,
                               .part = (int32_t)f.part,
                               .shares = windows.shares,
                               .window = windows.rows,
                               .work = windows.count * windows.shares};
}
