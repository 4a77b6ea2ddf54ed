/* Validates the LoRA factors of a projection. */
#include "core/check.h"

/* Checks a factor [max_loras, E or 1, *, *], which must have the dtype of `like`. */
static moelora_status check_factor(moelora_arg arg, moelora_arg like, const moelora_factors_arg *of,
                                   const char *layout, moelora_factor *factor) {
  const moelora_tensor *t = arg.tensor;
  MOELORA_TRY(moelora_check_view(arg, layout));
  MOELORA_TRY(moelora_check_dtype(arg, like));
  MOELORA_TRY(moelora_check_at_least_one(arg));
  MOELORA_REQUIRE_DIM(t->size[1] == 1 || t->size[1] == of->experts.value, arg, size, 1,
                      "%s is %lld: expected as many experts, or 1 factor shared by all",
                      moelora_label_extent(of->experts).text, (long long)of->experts.value);
  MOELORA_TRY(moelora_check_rows(arg));
  *factor = (moelora_factor){
      .data = t->data,
      .stride_l = moelora_stride(t, 0),
      .stride_e = t->size[1] == 1 ? 0 : t->stride[1],
      .stride_i = moelora_stride(t, 2),
  };
  return MOELORA_OK;
}

moelora_factors_arg moelora_factors_alone(moelora_arg x, int32_t num_experts, int32_t most) {
  return (moelora_factors_arg){
      .like = x,
      .least = 1,
      .most = most,
      .experts = moelora_words(num_experts, "num_experts"),
      .n.value = MOELORA_ANY_SIZE,
      .k = moelora_size_of(x, 1),
  };
}

moelora_status moelora_check_factors(moelora_arguments *all, const moelora_lora *lora,
                                     const moelora_factors_arg *of, moelora_factors *factors) {
  const moelora_row *row = moelora_row_of(all, lora);
  const bool shrink = of->k.value > 0, defines_n = of->n.value == MOELORA_ANY_SIZE;
  const moelora_tensor *leading = shrink ? &lora->a[0] : &lora->b[0];
  const moelora_arg first = moelora_entry(shrink ? row->name : row->name_b, 0, leading);
  const int32_t slices = lora->num_slices;
  moelora_extent rank = moelora_words(0, "the rank of the first slice"), columns = of->n;
  MOELORA_REQUIRE(slices >= of->least && slices <= of->most,
                  "%s has %d slices, expected %d to %d%s", first.name, slices, of->least, of->most,
                  of->slices ? of->slices : "");
  if (slices == 0)
    return MOELORA_OK;
  columns.slices = slices;
  columns.value /= slices;
  MOELORA_REQUIRE(defines_n || of->n.value % slices == 0,
                  "%s is %lld, expected a multiple of the %d slices of %s",
                  moelora_label_extent(of->n).text, (long long)of->n.value, slices, first.name);
  factors->num_slices = slices;
  factors->wide = of->may_be_wide && of->like.tensor->dtype != MOELORA_F32 &&
                  !moelora_is_absent(leading) && leading->dtype == MOELORA_F32;
  moelora_arg like = factors->wide ? first : of->like;
  for (int32_t i = 0; i < slices; i++) {
    const moelora_arg a = moelora_entry(row->name, i, &lora->a[i]);
    const moelora_arg b = moelora_entry(row->name_b, i, &lora->b[i]);
    if (shrink)
      MOELORA_TRY(check_factor(a, like, of, "[max_loras, E or 1, R, K]", &factors->a[i]));
    if (!of->skips_b)
      MOELORA_TRY(check_factor(b, like, of, "[max_loras, E or 1, N, R]", &factors->b[i]));
    if (i == 0) {
      rank.value = leading->size[shrink ? 2 : 3];
      if (defines_n)
        columns = moelora_words(b.tensor->size[2], "the columns of the first slice");
      if (all->slots.value == MOELORA_ANY_SIZE)
        all->slots = moelora_size_of(first, 0);
      MOELORA_REQUIRE_DIM(leading->size[0] < INT32_MAX, first, size, 0, "expected fewer slots");
    }
    if (shrink) {
      MOELORA_TRY(moelora_check_size(a, 0, all->slots));
      MOELORA_TRY(moelora_check_size(a, 2, rank));
      MOELORA_TRY(moelora_check_size(a, 3, of->k));
    }
    if (!of->skips_b) {
      MOELORA_TRY(moelora_check_size(b, 0, all->slots));
      MOELORA_TRY(moelora_check_size(b, 3, rank));
      if (!of->widths_differ)
        MOELORA_TRY(moelora_check_size(b, 2, columns));
      if (factors->slice_n < b.tensor->size[2])
        factors->slice_n = b.tensor->size[2];
    }
    factors->column[i + 1] = factors->column[i] + (of->skips_b ? 0 : b.tensor->size[2]);
  }
  factors->max_rank = (int32_t)rank.value;
  return MOELORA_OK;
}
